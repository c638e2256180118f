#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumbd and workers as in containers of their own: PID, IPC and mount namespaces apart, users of
their own without capabilities, a read-only root for crumbd, control groups with memory limits. They
share one folder of sockets and nothing else."""

import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from services import MODEL, ROOT, Crumbd, Process, prompt_of, run_worker, wait_for

BIN = ROOT / "build/release/bin"
CRUMBD_USER = 64200
WORKER_USER = 1000
MIB = 1 << 20
HOST_BYTES = 64 * MIB
UNSHARE = ["unshare", "--pid", "--fork", "--ipc", "--mount", "--mount-proc"]


def may_unshare():
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


class ControlGroup:
    """A memory control group of either version; None from `make` where none can be made."""

    def __init__(self, folder, limit, usage):
        self.folder = folder
        self.limit = folder / limit
        self.usage_file = folder / usage

    @classmethod
    def make(cls, name, limit_bytes):
        mount = pathlib.Path("/sys/fs/cgroup")
        for base, limit, usage in ((mount, "memory.max", "memory.current"),
                                   (mount / "memory", "memory.limit_in_bytes",
                                    "memory.usage_in_bytes")):
            folder = base / f"crumb-test-{os.getpid()}-{name}"
            try:
                if not (base / "cgroup.procs").exists():
                    continue
                folder.mkdir()
                if (folder / limit).exists():
                    (folder / limit).write_text(str(limit_bytes))
                    return cls(folder, limit, usage)
                folder.rmdir()
            except OSError:
                continue
        return None

    def enter(self):
        """A command prefix that runs the rest in here."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def usage(self):
        return int(self.usage_file.read_text())

    def remove(self):
        wait_for("the control group is empty", self._removed)

    def _removed(self):
        try:
            self.folder.rmdir()
            return True
        except OSError:
            return not self.folder.exists()


def as_user(user, groups):
    return ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={groups}",
            "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]


def sandbox(script, user, groups, group=None):
    """A command prefix: control group, namespaces, mounts by `script`, then the user."""
    shell = ["sh", "-c", f'set -e; {script}; exec "$@"', "sh"]
    return [*(group.enter() if group else []), *UNSHARE, *shell, *as_user(user, groups)]


def child_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def end_inside(process, how):
    """Ends the program in a sandbox, because unshare does not do so once the user changes."""
    if process.alive():
        os.kill(child_of(process.child.pid), how)
    return process.child.wait(timeout=30)


def namespaces(pid):
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("pid", "ipc", "mnt")}


@unittest.skipUnless(may_unshare(), "this user may not make namespaces")
class NamespacesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory(prefix="crumb-namespaces-")
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.folder = pathlib.Path(cls.temporary.name)
        cls.folder.chmod(0o755)
        # Programs and model are in a folder that any user can read.
        cls.programs = cls.folder / "bin"
        cls.programs.mkdir()
        for name in ("crumbd", "crumb-tiny-lm"):
            shutil.copy(BIN / name, cls.programs)
        shutil.copytree(MODEL, cls.folder / "model")
        cls.run_folder = cls.folder / "run"
        cls.run_folder.mkdir(mode=0o750)
        cls.groups = []
        cls.crumbd_group = cls.group("crumbd", HOST_BYTES + 256 * MIB)
        cls.worker_group = cls.group("worker", 512 * MIB)
        if cls.crumbd_group is None:
            print("no memory control group can be made here: limits are not tested")
        cls.crumbd = Crumbd(cls.programs, cls.run_folder, host_bytes=f"{HOST_BYTES // MIB}MiB",
                            extra=f"sessions:\n  allowed_uids: [\"{WORKER_USER}\"]\n")
        shutil.chown(cls.run_folder, CRUMBD_USER, CRUMBD_USER)
        cls.crumbd.start(prefix=sandbox(cls.read_only_root(), CRUMBD_USER, CRUMBD_USER,
                                        cls.crumbd_group))
        cls.addClassCleanup(end_inside, cls.crumbd.process, signal.SIGTERM)

    @classmethod
    def group(cls, name, limit):
        group = ControlGroup.make(name, limit)
        if group is not None:
            cls.addClassCleanup(group.remove)
        return group

    @classmethod
    def read_only_root(cls):
        return (f"mount --bind {cls.run_folder} {cls.run_folder}; "
                "mount -o remount,bind,ro /; ! touch /crumb-test 2>/dev/null")

    def worker_prefix(self):
        # A worker sees the sockets in crumbd's folder, but not the SSD tier.
        return sandbox(f"mount -t tmpfs none {self.run_folder}/ssd", WORKER_USER, CRUMBD_USER,
                       self.worker_group)

    def work(self, number):
        return run_worker(self.programs, self.run_folder, prompt_of(number),
                          prefix=self.worker_prefix(), model=self.folder / "model")

    def series(self, name):
        text = self.crumbd.get("/metrics")
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])

    def leased(self, worker):
        assert worker.alive(), f"the worker ended:\n{worker.tail()}"
        return self.series("crumb_leases") > 0

    def crumbd_pid(self):
        return child_of(self.crumbd.process.child.pid)

    def test_crumbd_is_apart_and_has_no_rights(self):
        theirs = namespaces(self.crumbd_pid())
        ours = namespaces("self")
        for kind, name in theirs.items():
            self.assertNotEqual(name, ours[kind])
        status = pathlib.Path(f"/proc/{self.crumbd_pid()}/status").read_text()
        self.assertRegex(status, rf"Uid:\s+{CRUMBD_USER}\s+{CRUMBD_USER}")
        for capabilities in ("CapEff", "CapPrm", "CapBnd"):
            self.assertRegex(status, rf"{capabilities}:\s+0+\n")
        self.assertRegex(status, r"NoNewPrivs:\s+1")
        self.assertEqual(self.crumbd.endpoints["pid"], "1")

    def test_every_slab_is_there_before_it_is_ready(self):
        if self.crumbd_group is None:
            self.skipTest("no memory control group can be made here")
        self.assertGreaterEqual(self.crumbd_group.usage(), HOST_BYTES)

    def test_workers_of_other_namespaces_get_hits(self):
        first = self.work(0)
        self.assertEqual(sum(first["hit_tokens"].values()), 0)
        second = self.work(0)
        self.assertGreater(second["hit_tokens"]["host"], 0)
        self.assertEqual(second["hit_tokens"]["host"] + second["computed_tokens"],
                         second["prompt_tokens"])
        third = self.work(0)  # over the same pages
        self.assertEqual((third["hit_tokens"], third["text"]),
                         (second["hit_tokens"], second["text"]))
        self.assertEqual(self.series('crumb_transferred_bytes_total{plane="grpc",direction="out"}'),
                         0)

    def test_a_killed_worker_of_another_pid_namespace_is_noticed(self):
        self.work(5)
        prompt, writer = os.pipe()
        try:
            worker = Process([*self.worker_prefix(), self.programs / "crumb-tiny-lm", "--model",
                              self.folder / "model", "--prompt-file", "-", "--store",
                              self.run_folder, "--generate", "2500"],
                             self.folder / "worker.log", stdin=prompt)
            os.write(writer, prompt_of(5).encode("utf-8"))
            os.close(writer)
            wait_for("a lease", lambda: self.leased(worker))
            reaped = self.series("crumb_sessions_reaped_total")
            self.assertTrue(worker.alive(), worker.tail())
            self.assertNotEqual(namespaces(child_of(worker.child.pid)),
                                namespaces(self.crumbd_pid()))
            end_inside(worker, signal.SIGKILL)
            # A lease ends with the process, which a descriptor reports; it has no time limit.
            wait_for("leases and sessions are gone",
                     lambda: self.series("crumb_sessions") + self.series("crumb_leases") == 0)
            self.assertEqual(self.series("crumb_sessions_reaped_total"), reaped + 1)
        finally:
            os.close(prompt)

    def test_it_stops_as_a_container_is_stopped(self):
        folder = self.folder / "stopped"
        folder.mkdir(mode=0o755)
        shutil.chown(folder, CRUMBD_USER, CRUMBD_USER)
        crumbd = Crumbd(self.programs, folder, host_bytes="16MiB")
        crumbd.start(prefix=sandbox("true", CRUMBD_USER, CRUMBD_USER))
        self.assertEqual(end_inside(crumbd.process, signal.SIGTERM), 0)
        self.assertFalse((folder / "crumbd.endpoints.json").exists())

    def test_a_limit_that_cannot_hold_the_slabs_is_said(self):
        group = self.group("small", HOST_BYTES + 8 * MIB)
        if group is None:
            self.skipTest("no memory control group can be made here")
        folder = self.folder / "small"
        folder.mkdir(mode=0o755)
        small = Crumbd(self.programs, folder, host_bytes=f"{HOST_BYTES // MIB}MiB")
        done = subprocess.run([*group.enter(), small.binary, "--config", folder / "crumbd.yaml"],
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 1)  # not killed
        self.assertIn("store.host.bytes_max is 64MiB", done.stderr)
        self.assertIn(str(group.limit), done.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=pathlib.Path, default=BIN)
    arguments, rest = parser.parse_known_args()
    BIN = arguments.bin.resolve()
    unittest.main(argv=[sys.argv[0], *rest])
