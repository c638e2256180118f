#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""tests/gpu.sh with made-up programs and a made-up GPU: what it runs, and what it calls a failure."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "gpu.sh"
TOOLS = ("basename bash cat cut dirname grep head mkdir mktemp sed sort tail timeout tr uniq").split()
BENCHES = ("crumb-decode-bench", "crumb-device-bench", "crumb-device-hit-bench", "crumb-kernel-bench")
PASSES = "echo '[  PASSED  ] 3 tests.'"


def skips(reason):
    return f"printf 'a_test.cc:7: Skipped\\n{reason}\\n\\n[  SKIPPED ] A.B (0 ms)\\n'"


class GpuScriptTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="crumb-gpu-script-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = self.folder / "path"
        self.path.mkdir()
        for tool in TOOLS:
            (self.path / tool).symlink_to(shutil.which(tool))

    def program(self, name, body):
        """A program that writes down its call."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        calls = self.folder / "calls"
        file.write_text(f"#!/bin/bash\necho \"{file.name} $*\" >>{calls}\n{body}\n")
        file.chmod(0o755)

    def machine(self, tests):
        self.program("path/nvidia-smi", "echo 'NVIDIA H200, 9.0, 580.1'")
        self.program("path/python3", "true")
        for name in BENCHES:
            self.program(f"programs/bin/{name}", f"echo {name}")
        for name, body in tests.items():
            self.program(f"programs/tests/{name}", body)

    def run_script(self, *arguments):
        return subprocess.run([self.path / "bash", SCRIPT, *arguments], capture_output=True,
                              text=True, timeout=60, check=False, env={"PATH": str(self.path)})

    def run_checks(self, *arguments):
        return self.run_script("--programs", self.folder / "programs", "--output",
                               self.folder / "output", *arguments)

    def calls(self):
        return (self.folder / "calls").read_text().splitlines()

    def test_help_and_unknown_arguments(self):
        told = self.run_script("--help")
        self.assertEqual(told.returncode, 0)
        for option in ("--programs", "--output", "--commit", "--quick"):
            self.assertIn(option, told.stdout)
        self.assertNotIn("set -uo", told.stdout)
        unknown = self.run_script("--fast")
        self.assertEqual(unknown.returncode, 2)
        self.assertIn("--fast", unknown.stderr)

    def test_says_what_is_missing(self):
        without_gpu = self.run_script()
        self.assertEqual(without_gpu.returncode, 1)
        self.assertIn("nvidia-smi shows no GPU", without_gpu.stderr)
        self.machine({})
        without_nvcc = self.run_script()
        self.assertEqual(without_nvcc.returncode, 1)
        self.assertIn("no nvcc", without_nvcc.stderr)
        without_tests = self.run_checks()
        self.assertEqual(without_tests.returncode, 1)
        self.assertIn("no tests for GPUs", without_tests.stderr)

    def test_runs_everything_once(self):
        self.machine({"a_cuda_b_test": PASSES, "c_cuda_d_test": PASSES, "plain_test": "exit 1"})
        done = self.run_checks()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("compute-sanitizer: not installed", done.stdout)
        ran = [call.split()[0] for call in self.calls()]
        for name in (*BENCHES, "a_cuda_b_test", "c_cuda_d_test"):
            self.assertEqual(ran.count(name), 1, name)
        self.assertNotIn("plain_test", ran)
        self.assertTrue(any("demo.py" in call for call in self.calls()))

    def test_writes_json_under_the_name(self):
        self.machine({"a_cuda_b_test": PASSES})
        self.assertEqual(self.run_checks("--commit", "abc").returncode, 0)
        for name in ("kernels", "decode", "device", "device_hit"):
            self.assertTrue((self.folder / f"output/{name}.json").read_text().startswith("crumb-"))
        self.assertIn("crumb-kernel-bench --json --commit abc", self.calls())

    def test_what_fails(self):
        for tests, bench, named in (
                ({"a_cuda_b_test": "exit 1"}, "true", "failed: a_cuda_b_test"),
                ({"a_cuda_b_test": skips("needs a CUDA device")}, "true",
                 "failed: a_cuda_b_test (skipped)"),
                ({"a_cuda_b_test": PASSES}, "exit 3", "failed: crumb-kernel-bench")):
            self.machine(tests)
            self.program("programs/bin/crumb-kernel-bench", bench)
            done = self.run_checks()
            self.assertEqual(done.returncode, 1, named)
            self.assertIn(named, done.stdout)
            # Whatever fails, the rest is run.
            self.assertIn("crumb-device-hit-bench ", self.calls())

    def test_what_a_machine_may_lack(self):
        for reason in ("needs two CUDA devices", "needs compute capability 9.0, for clusters"):
            self.machine({"a_cuda_b_test": skips(reason)})
            done = self.run_checks()
            self.assertEqual(done.returncode, 0, done.stdout)
            self.assertIn(reason, done.stdout)

    def test_the_sanitizer_counts(self):
        self.machine({"a_cuda_b_test": PASSES})
        self.program("path/compute-sanitizer", "[[ $2 != racecheck ]] || exit 9")
        self.assertEqual(self.run_checks("--quick").returncode, 0)
        done = self.run_checks()
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: racecheck decode", done.stdout)
        self.assertNotIn("failed: memcheck", done.stdout)


if __name__ == "__main__":
    unittest.main()
