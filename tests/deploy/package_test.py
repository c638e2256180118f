#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Tests the installed files: as a Debian package, under systemd, in a container."""

import argparse
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from services import ROOT, Crumbd, Process, wait_for

BUILD = ROOT / "build/release"
RUN_SECONDS = 400
UNIT = ROOT / "deploy/systemd/crumbd.service"
CONTAINERFILE = ROOT / "deploy/container/Containerfile"


def run(*command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True,
                          timeout=RUN_SECONDS, check=False, **options)
    if done.returncode != 0:
        raise AssertionError(f"{shlex.join(map(str, command))}: {done.returncode}\n"
                             f"{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


class PackageTest(unittest.TestCase):
    """The Debian package, made and unpacked: `root` and `control` in `folder`."""

    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory(prefix="crumb-deb-")
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.folder = pathlib.Path(cls.temporary.name)
        run("cpack", "-G", "DEB", "--config", BUILD / "CPackConfig.cmake", "-B", cls.folder)
        (cls.package,) = cls.folder.glob("*.deb")
        run("dpkg-deb", "-x", cls.package, cls.folder / "root")
        run("dpkg-deb", "-e", cls.package, cls.folder / "control")
        cls.prefix = cls.folder / "root/usr"

    def test_a_consumer_builds_against_the_package_and_gets_hits(self):
        run("cmake", "-S", ROOT / "tests/consumer", "-B", self.folder / "consumer", "-G", "Ninja",
            f"-DCMAKE_PREFIX_PATH={self.prefix}", "-DCMAKE_BUILD_TYPE=Release")
        run("cmake", "--build", self.folder / "consumer")
        output = run(self.folder / "consumer/consumer", self.serve("run"))
        self.assertEqual(output, "0 of 512 tokens were cached\n256 of 512 tokens were cached\n")

    def test_a_c_program_links_the_installed_library(self):
        (library,) = self.prefix.glob("lib*/**/libcrumb.so")
        program = self.folder / "program"
        run("cc", "-std=c11", "-I", self.prefix / "include",
            ROOT / "tests/client/c_api/c_api_program.c", "-o", program, "-L", library.parent,
            "-lcrumb", f"-Wl,-rpath,{library.parent}")
        folder = self.serve("run-c")
        cached = [int(re.search(r"cached (\d+)", run(program, folder, "5"))[1]) for _ in range(2)]
        self.assertEqual(cached[0], 0)
        self.assertGreater(cached[1], 0)

    def serve(self, name):
        """The socket folder of an installed crumbd."""
        folder = self.folder / name
        folder.mkdir()
        crumbd = Crumbd(self.prefix / "bin", folder)
        self.addCleanup(crumbd.stop)
        crumbd.start()
        return folder

    def test_nothing_installed_points_at_the_sources(self):
        for path in sorted(self.prefix.rglob("*.cmake")):
            self.assertNotIn(str(ROOT), path.read_text(encoding="utf-8"), path)

    def test_every_installed_header_stands_alone(self):
        headers = sorted((self.prefix / "include/libcrumb/crumb").glob("*.h"))
        self.assertGreater(len(headers), 10)
        source = self.folder / "headers.cc"
        source.write_text("".join(f'#include "crumb/{h.name}"\n' for h in headers))
        run("c++", "-std=c++20", "-fsyntax-only", "-I", self.prefix / "include/libcrumb", source)


    def test_it_holds_what_belongs_into_it(self):
        listing = run("dpkg-deb", "-c", self.package)
        names = set(re.findall(r" \./(\S+)(?: -> \S+)?$", listing, re.MULTILINE))
        for name in ("usr/bin/crumbd", "usr/bin/crumb", "etc/crumb/crumbd.yaml",
                     "usr/lib/systemd/system/crumbd.service", "usr/lib/sysusers.d/crumb.conf",
                     "usr/lib/tmpfiles.d/crumb.conf", "usr/include/libcrumb/crumb/client.h",
                     "usr/include/crumb.h", "usr/include/crumb_blocks.h",
                     "usr/include/crumb_device.h", "usr/include/crumb_transfer.h",
                     "usr/share/crumb/grafana/dashboards/crumb.json",
                     "usr/share/crumb/prometheus/rules/alerts.yml"):
            self.assertIn(name, names)
        for ending in ("cmake/crumb/crumb-config.cmake", "/libcrumb.so"):
            self.assertTrue(any(name.endswith(ending) for name in names), ending)
        self.assertFalse([n for n in names if n.startswith("usr/etc")])

    def test_it_names_its_dependencies_and_configuration(self):
        depends = run("dpkg-deb", "-f", self.package, "Depends")
        for library in ("libgrpc++", "librocksdb", "libyaml-cpp", "libc6"):
            self.assertIn(library, depends)
        self.assertNotIn("-dev", depends)
        self.assertEqual((self.folder / "control/conffiles").read_text(),
                         "/etc/crumb/crumbd.yaml\n")
        for script in ("postinst", "prerm"):
            path = self.folder / "control" / script
            self.assertTrue(path.stat().st_mode & stat.S_IXUSR, script)
            run("sh", "-n", path)

    def test_its_program_takes_its_configuration(self):
        root = self.folder / "root"
        output = run(root / "usr/bin/crumbd", "--config", root / "etc/crumb/crumbd.yaml",
                     "--check-config")
        self.assertEqual(output, "crumbd: the configuration is valid\n")
        self.assertIn("crumb", run(root / "usr/bin/crumb", "--help"))


class SystemdTest(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory(prefix="crumb-systemd-")
        self.addCleanup(self.temporary.cleanup)
        self.folder = pathlib.Path(self.temporary.name)

    def test_the_unit_is_valid(self):
        text = UNIT.read_text(encoding="utf-8")
        self.assertIn("ExecStart=/usr/bin/crumbd ", text)
        unit = self.folder / "crumbd.service"
        unit.write_text(text.replace("/usr/bin/crumbd", f"{BUILD}/bin/crumbd"), encoding="utf-8")
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True,
                              text=True, timeout=60, check=False)
        complaints = [line for line in done.stderr.splitlines() if "crumbd.service" in line]
        self.assertEqual(complaints, [])
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_users_and_folders_are_valid(self):
        root = self.folder / "root"
        for folder in ("etc", "run", "var/lib", "usr/lib/sysusers.d", "usr/lib/tmpfiles.d"):
            (root / folder).mkdir(parents=True)
        for kind in ("sysusers", "tmpfiles"):
            source = ROOT / f"deploy/systemd/crumb.{kind}.conf"
            (root / f"usr/lib/{kind}.d/crumb.conf").write_bytes(source.read_bytes())
        run("systemd-sysusers", f"--root={root}")
        self.assertRegex((root / "etc/passwd").read_text(), r"(?m)^crumb:x:\d+:\d+:.*nologin$")
        if os.geteuid() == 0:  # it makes files of other users
            run("systemd-tmpfiles", f"--root={root}", "--create", "crumb.conf")
            mode = (root / "run/crumb").stat().st_mode
            self.assertEqual(stat.S_IMODE(mode), 0o750)

    def test_crumbd_notifies_when_it_is_ready_and_when_it_stops(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(self.folder / "notify"))
            manager.settimeout(30)
            crumbd = Crumbd(BUILD / "bin", self.folder)
            self.addCleanup(crumbd.stop)
            crumbd.start(env={**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify")})
            self.assertEqual(manager.recv(100), b"READY=1")
            self.assertEqual(crumbd.get("/readyz"), "ready\n")
            self.assertEqual(crumbd.stop(), 0)
            self.assertEqual(manager.recv(100), b"STOPPING=1")

    def unit_line(self, name):
        """The words of a line of the unit, with the built program and the test's configuration."""
        words = re.search(rf"(?m)^{name}=(.*)$", UNIT.read_text(encoding="utf-8"))[1].split()
        self.assertEqual(words[0], "/usr/bin/crumbd")
        there = {"/usr/bin/crumbd": BUILD / "bin/crumbd",
                 "/etc/crumb/crumbd.yaml": self.folder / "crumbd.yaml"}
        return [str(there.get(word, word)) for word in words]

    def test_the_unit_starts_reloads_and_stops(self):
        """Runs the unit's lines as systemd does, because tests run without systemd."""
        tenants = self.folder / "tenants.json"
        tenants.write_text('{"tenants": []}')
        tenants.chmod(0o600)
        crumbd = Crumbd(BUILD / "bin", self.folder,
                        extra=f"tenants:\n  file: {tenants}\n  reload_interval: 1h\n")
        endpoints = self.folder / "crumbd.endpoints.json"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(self.folder / "notify"))
            manager.settimeout(60)
            environment = {**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify")}
            first = Process(self.unit_line("ExecStart"), self.folder / "first.log",
                            env=environment)
            self.addCleanup(first.stop)
            self.assertEqual(manager.recv(100), b"READY=1", first.tail())
            with (self.folder / "second.log").open("w") as log:  # pipes would outlive the command
                done = subprocess.run(self.unit_line("ExecReload"), env=environment, stdout=log,
                                      stderr=log, timeout=120, check=False)
            log = (self.folder / "second.log").read_text()
            self.assertEqual(done.returncode, 0, log)
            received = {manager.recv(100), manager.recv(100)}
            main = next(int(word[8:]) for word in received if word.startswith(b"MAINPID="))
            self.addCleanup(lambda: endpoints.exists() and os.kill(main, signal.SIGKILL))
            self.assertEqual(received, {b"READY=1", b"MAINPID=%d" % main})
            self.assertEqual(first.child.wait(timeout=60), 0)
            self.assertNotEqual(main, first.child.pid)
            crumbd.endpoints = json.loads(endpoints.read_text())
            self.assertEqual(crumbd.get("/readyz"), "ready\n")
            # SIGHUP reloads the watched files at once.
            tenants.write_text("no tenants")
            os.kill(main, signal.SIGHUP)
            wait_for("the file is read", lambda: re.search(
                r"(?m)^crumb_tenant_reload_failures_total 1$", crumbd.get("/metrics")))
            self.assertEqual(crumbd.get("/readyz"), "ready\n")
            os.kill(main, signal.SIGTERM)
            self.assertEqual(manager.recv(100), b"STOPPING=1")
            wait_for("the end", lambda: not endpoints.exists())

    def test_a_manager_that_is_gone_changes_nothing(self):
        crumbd = Crumbd(BUILD / "bin", self.folder)
        self.addCleanup(crumbd.stop)
        crumbd.start(env={**os.environ, "NOTIFY_SOCKET": str(self.folder / "no_listener")})
        wait_for("a warning", lambda: "no_listener" in crumbd.process.tail())
        self.assertEqual(crumbd.get("/readyz"), "ready\n")


class ContainerfileTest(unittest.TestCase):
    """Checks its instructions against the tree, because tests cannot build containers.

    deploy/container/try_image.sh does, where podman is.
    """

    def instructions(self):
        text = CONTAINERFILE.read_text(encoding="utf-8")
        lines = [l for l in text.splitlines() if l.strip() and not l.startswith("#")]
        joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
        return [line.split(None, 1) for line in joined.splitlines()]

    def test_instructions_are_known_and_in_order(self):
        found = self.instructions()
        known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "VOLUME", "ENTRYPOINT",
                 "CMD", "LABEL", "STOPSIGNAL"}
        self.assertLessEqual({name for name, _ in found}, known)
        stages = [rest for name, rest in found if name == "FROM"]
        self.assertEqual(len(stages), 2)
        self.assertTrue(stages[0].endswith(" AS build"))
        last = {name: rest for name, rest in found}
        self.assertRegex(last["USER"], r"^\d+:\d+$")
        self.assertNotEqual(last["USER"].split(":")[0], "0")

    def test_the_script_that_tries_it_fits(self):
        script = CONTAINERFILE.parent / "try_image.sh"
        run("bash", "-n", script)
        text = script.read_text(encoding="utf-8")
        found = self.instructions()
        base = next(rest for name, rest in found if name == "ARG").split("=")[0]
        self.assertIn(f"--build-arg {base}=", text)
        user = next(rest for name, rest in found if name == "USER")
        self.assertIn(f"chown {user} ", text)
        for folder in next(rest for name, rest in found if name == "VOLUME").split():
            self.assertIn(f":{folder}\"", text)
            self.assertIn(folder, next(rest for name, rest in found[::-1] if name == "RUN"))

    def test_the_context_leaves_out_what_is_built(self):
        ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
        self.assertLessEqual({"build/", ".git/"}, set(ignored))

    def test_what_it_copies_and_runs_is_there(self):
        for name, rest in self.instructions():
            if name == "COPY" and "--from" not in rest:
                for source in rest.split()[:-1]:
                    self.assertTrue((ROOT / source).exists(), source)
            if name == "RUN":
                run("bash", "-n", "-c", rest)
                for script in re.findall(r"bash (\S+\.sh)", rest):
                    self.assertTrue((ROOT / script).exists(), script)
                for preset in re.findall(r"--preset (\S+)", rest):
                    self.assertIn(f'"{preset}"', (ROOT / "CMakePresets.json").read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, default=BUILD)
    arguments, rest = parser.parse_known_args()
    BUILD = arguments.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest])
