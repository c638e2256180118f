#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel, installs it into an empty virtual environment without an index, and runs the
programs, the examples and the package's tests there: wheel_test.py --build DIR

Exit code 77: no virtual environment can be made, or the wheel's tools are neither in
build/wheel-tools nor to be had from PyPI.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OPTIONS = argparse.Namespace()
SKIPPED = 77
UNIT_TESTS = ("abi_test", "client_test", "worker_test", "blocks_test", "gpu_calls_test",
              "ops_test", "calibrate_test", "import_gguf_test", "transfer_test",
              "transformers_cache_test", "transformers_device_test", "transformers_generate_test")
# A process may map these libraries of the system: glibc and the C++ runtime.
SYSTEM = re.compile(r".*/(ld-linux-x86-64\.so\.2|lib(c|m|dl|rt|pthread|util|resolv)\.so\.\d"
                    r"|libstdc\+\+\.so\.6.*|libgcc_s\.so\.1)")
# Libraries that Crumb is made of, however they are called.
OURS = re.compile(r"grpc|protobuf|absl|rocksdb|libuc[pstm]|libssl|libcrypto|libre2|cares|upb|gpr"
                  r"|spdlog|libfmt|yaml-cpp|prometheus|snappy|libicu")


def clean_environment():
    """Nothing that could lead the loader or Python elsewhere."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "PATH": "/usr/bin:/bin"}


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                          check=False, timeout=600, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}"
                             f"{done.stderr}")
    return done.stdout


class WheelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.wheel = pathlib.Path(run("bash", ROOT / "deploy/build_wheel.sh", "--build",
                                     OPTIONS.build, "--to", cls.folder / "wheel").strip())
        cls.venv = cls.folder / "venv"
        run(sys.executable, "-m", "venv", cls.venv)
        cls.python = cls.venv / "bin/python"
        cls.pip("install", cls.wheel)
        site = run(cls.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        cls.package = pathlib.Path(site.strip()) / "crumb"

    @classmethod
    def pip(cls, *arguments):
        run(cls.venv / "bin/pip", "--disable-pip-version-check", *arguments[:1], "-q",
            "--no-index", "--no-deps", *arguments[1:])

    def test_1_tag_and_contents(self):
        self.assertRegex(self.wheel.name,
                         r"^crumb_kv-\d+\.\d+\.\d+-py3-none-manylinux_2_36_x86_64\.whl$")
        names = {path.name for path in self.package.rglob("*")}
        self.assertLessEqual({"crumbd", "crumb", "libcrumb.so.1", "py.typed", "_abi.py",
                              "libuct_cma.so.0"}, names)
        licensed = {path.stem for path in (self.package / "lib/licenses").iterdir()}
        self.assertLessEqual({"libgrpc29", "librocksdb7.8", "libucx0", "libssl3"}, licensed)

    def test_2_the_package_itself_needs_neither_numpy_nor_torch(self):
        installed = run(self.venv / "bin/pip", "list", "--format=freeze", env=clean_environment())
        self.assertNotIn("numpy", installed)
        out = run(self.python, ROOT / "python/examples/pages.py", env=clean_environment())
        self.assertIn("lookup: 3 of 4 pages, then ABSENT\nget: the same bytes: True\n"
                      "flush: durable pages: 3\n", out)

    def test_3_a_second_worker_is_warm(self):
        self.pip("install", *(ROOT / "build/wheel-tools/wheelhouse").glob("*.whl"))
        out = run(self.python, ROOT / "python/examples/warm_worker.py", env=clean_environment())
        cold, warm = (line.split(", outputs ") for line in out.splitlines())
        self.assertEqual(cold[0], "cached 0 of 1000 tokens, computed 1000")
        self.assertEqual(warm[0], "cached 704 of 1000 tokens, computed 296")
        self.assertEqual(cold[1], warm[1])

    def test_4_programs_load_no_library_of_the_system(self):
        version = run(self.venv / "bin/crumbd", "--version", env=clean_environment())
        self.assertRegex(version, r"^crumbd \d")
        code = """
import os, pathlib, sys
sys.path.insert(0, sys.argv[1])
import crumb, server
with server.socket_dir(None) as folder, crumb.Client(folder) as client:
    client.wait_connected(30)
    children = pathlib.Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for pid in (os.getpid(), *children):
        print("process", os.readlink(f"/proc/{pid}/exe"))
        print(open(f"/proc/{pid}/maps").read())
"""
        out = run(self.python, "-c", code, ROOT / "python/examples", env=clean_environment())
        ours, server = out.split("process ")[1:]
        self.assertTrue(server.startswith(str(self.package / "bin/crumbd")), server[:200])
        mapped = {process: {line.split(None, 5)[5] for line in text.splitlines()[1:]
                            if ".so" in line and len(line.split(None, 5)) == 6}
                  for process, text in (("python", ours), ("crumbd", server))}
        inside = str(self.package)
        foreign = {path for path in mapped["crumbd"]
                   if not path.startswith(inside) and not SYSTEM.fullmatch(path)}
        self.assertEqual(foreign, set())
        for process, paths in mapped.items():
            parts = {path for path in paths if OURS.search(pathlib.Path(path).name)}
            # The interpreter has an OpenSSL of its own, which ours must not replace.
            parts = {path for path in parts if process == "crumbd" or "libssl" not in path
                     and "libcrypto" not in path or path.startswith(inside)}
            self.assertGreater(len(parts), 20, process)
            self.assertEqual({path for path in parts if not path.startswith(inside)}, set())

    def test_4_ucx_finds_its_modules_in_the_package(self):
        code = """
import ctypes, pathlib, sys
uct = ctypes.CDLL(str(pathlib.Path(sys.argv[1]) / "lib/libuct-crumb.so.0"))
components, count = ctypes.c_void_p(), ctypes.c_uint()
assert uct.uct_query_components(ctypes.byref(components), ctypes.byref(count)) == 0
print(open("/proc/self/maps").read())
"""
        maps = run(self.python, "-c", code, self.package, env=clean_environment())
        self.assertIn(f"{self.package}/lib/ucx/libuct_cma.so.0", maps)
        self.assertNotRegex(maps, r"/usr/lib/\S*libuc[pst]")

    def test_5_unit_tests(self):
        self.pip("install", *(ROOT / "build/wheel-tools/wheelhouse").glob("*.whl"))
        for name in UNIT_TESTS:
            with self.subTest(name):
                done = subprocess.run([self.python, HERE / f"{name}.py"], capture_output=True,
                                      text=True, check=False, timeout=300,
                                      env=clean_environment())
                print(name, done.stderr.strip().splitlines()[-1])
                self.assertEqual(done.returncode, 0, done.stderr)

    def test_6_types(self):
        tools = ROOT / "build/wheel-tools/bin"
        print(run(tools / "mypy", "--config-file", ROOT / "python/pyproject.toml",
                  "--python-executable", self.python, "--cache-dir", self.folder / "mypy",
                  cwd=self.folder).strip())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.parse_known_args(namespace=OPTIONS)
    tools = subprocess.run(["bash", ROOT / "deploy/build_wheel.sh", "--tools"],
                           capture_output=True, text=True, check=False)
    if tools.returncode != 0:
        print("Skipped: needs python3-venv, and PyPI or build/wheel-tools\n" + tools.stderr)
        return SKIPPED
    result = unittest.main(argv=[sys.argv[0], "-v"], exit=False).result
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
