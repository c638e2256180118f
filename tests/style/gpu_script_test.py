#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""tests/gpu.sh with made-up programs and GPUs: the programs that it runs, and the failures it reports."""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

TESTS = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = TESTS / "gpu.sh"
sys.path.insert(0, str(TESTS))
import gpu_programs  # noqa: E402  pylint: disable=wrong-import-position

TOOLS = ("bash cut dirname echo grep head mkdir mktemp paste realpath sed sleep sort tr").split()
BENCHES = ("crumb-decode-bench", "crumb-device-bench", "crumb-device-hit-bench", "crumb-kernel-bench")
LISTS = "case \"$*\" in *--gtest_list_tests*) printf 'A.\\n  B\\n  C\\n  D\\n'; exit;; esac\n"
# GoogleTest's output of a shard's share of three tests.
PASSES = LISTS + """ran=0
for test in 0 1 2; do
  (( test % ${GTEST_TOTAL_SHARDS:-1} != ${GTEST_SHARD_INDEX:-0} )) || ran=$((ran + 1))
done
echo "[==========] $ran tests from 1 test suite ran. (0 ms total)"
"""
FAILS = PASSES + "echo '[  FAILED  ] A.C'; (( ${GTEST_SHARD_INDEX:-0} != 1 ))"


def skips(reason):
    return PASSES + f"printf 'a_test.cc:7: Skipped\\n{reason}\\n\\n[  SKIPPED ] A.B (0 ms)\\n'"


def has_ended(process):
    """Returns whether it runs no more; it may be a zombie."""
    try:
        os.readlink(f"/proc/{process}/cwd")
    except OSError:
        return True
    return False


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("waited for a minute")
        time.sleep(0.01)


class GpuScriptTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="crumb-gpu-script-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = self.folder / "path"
        self.path.mkdir()
        for tool in TOOLS:
            (self.path / tool).symlink_to(shutil.which(tool))

    def program(self, name, body, prints=""):
        """A program that writes down its call."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        call = f"{file.name} $* [${{CUDA_VISIBLE_DEVICES:-}}]"
        file.write_text(f"#!/bin/bash\necho \"{call}\" >>{self.folder / 'calls'}\n{prints}\n{body}\n")
        file.chmod(0o755)

    def machine(self, tests, gpus=1, capability="9.0"):
        listed = "".join(f"{i}, {capability}, 143771, NVIDIA H200, 580.1\\n" for i in range(gpus))
        self.program("path/nvidia-smi", f"printf '{listed}'")
        self.program("path/python3",
                     f"[[ $1 != tests/gpu_programs.py ]] || exec {sys.executable} \"$@\"")
        for name in BENCHES:
            self.program(f"programs/bin/{name}", "echo '{\"rows\": []}'")
        for name, body in tests.items():
            self.program(f"programs/tests/{name}", body)

    def run_script(self, *arguments):
        return subprocess.run([self.path / "bash", SCRIPT, *arguments], capture_output=True,
                              text=True, timeout=100, check=False, env=self.environment())

    def environment(self):
        return {"PATH": str(self.path), "CUDA_HOME": str(self.folder),
                "PYTHONDONTWRITEBYTECODE": "1"}

    def run_programs(self, *arguments):
        return self.run_script("--programs", self.folder / "programs", "--output",
                               self.folder / "output", *arguments)

    def calls(self, name):
        """Arguments and GPUs of each call that was to run something."""
        calls = [line.split(" ", 1) for line in (self.folder / "calls").read_text().splitlines()]
        return [rest for called, rest in calls if called == name and "--gtest_list" not in rest]

    def test_help_and_unknown_arguments(self):
        shown = self.run_script("--help")
        self.assertEqual(shown.returncode, 0)
        for option in ("--programs", "--output", "--commit", "--only"):
            self.assertIn(option, shown.stdout)
        self.assertNotIn("set -uo", shown.stdout)
        unknown = self.run_script("--fast")
        self.assertEqual(unknown.returncode, 2)
        self.assertIn("--fast", unknown.stderr)
        self.machine({"a_cuda_b_test": PASSES})
        section = self.run_programs("--only", "checks,speed")
        self.assertEqual(section.returncode, 2)
        self.assertIn("'speed'", section.stderr)

    def test_says_what_is_missing(self):
        without_gpu = self.run_script()
        self.assertEqual(without_gpu.returncode, 1)
        self.assertIn("nvidia-smi shows no GPU", without_gpu.stderr)
        self.machine({})
        without_nvcc = self.run_script()
        self.assertEqual(without_nvcc.returncode, 1)
        self.assertIn("no nvcc", without_nvcc.stderr)
        without_tests = self.run_programs()
        self.assertEqual(without_tests.returncode, 1)
        self.assertIn("no tests for GPUs", without_tests.stderr)

    def test_runs_everything_once(self):
        self.machine({"a_cuda_b_test": PASSES, "c_cuda_d_test": PASSES, "plain_test": "exit 1"})
        done = self.run_programs()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("compute-sanitizer: not installed", done.stdout)
        self.assertIn("3 parts", done.stdout)
        for name in ("a_cuda_b_test", "c_cuda_d_test"):
            self.assertEqual(self.calls(name), [" [0]"] * 3, name)
        self.assertEqual(self.calls("plain_test"), [])
        for name in ("crumb-decode-bench", "crumb-device-bench", "crumb-kernel-bench"):
            self.assertEqual(len(self.calls(name)), 1, name)
        self.assertEqual(self.calls("crumb-device-hit-bench"), [" [0]", "--cold [0]"])
        for name in ("deploy/demo.py", "c_api_test.py"):
            self.assertEqual(sum(name in call for call in self.calls("python3")), 1, name)

    def test_the_c_program_needs_a_gpu_too(self):
        self.machine({"a_cuda_b_test": PASSES})
        self.program("path/python3", f"[[ $1 != tests/gpu_programs.py ]] || exec {sys.executable} "
                     "\"$@\"\n[[ $* != *c_api_test* ]] || echo 'OK (skipped=1)'")
        done = self.run_programs("--only", "checks")
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: client_c_api_test (skipped)", done.stdout)

    def test_takes_all_gpus(self):
        self.machine({"a_cuda_b_test": PASSES, "c_cuda_d_test": PASSES,
                      "client_cuda_pools_test": PASSES}, gpus=2)
        done = self.run_programs()
        self.assertEqual(done.returncode, 0, done.stdout)
        gpus = self.calls("a_cuda_b_test") + self.calls("c_cuda_d_test")
        self.assertEqual(set(gpus), {" [0]", " [1]"})
        self.assertLessEqual(set(self.calls("client_cuda_pools_test")), {" [0,1]", " [1,0]"})
        self.assertEqual(self.calls("crumb-kernel-bench"), [" [0]"])
        self.assertIn("--peer 1 [0,1]", self.calls("crumb-device-hit-bench"))

    def test_sections_by_name(self):
        self.machine({"a_cuda_b_test": PASSES})
        self.assertEqual(self.run_programs("--only", "timings").returncode, 0)
        self.assertEqual(self.calls("a_cuda_b_test"), [])
        self.assertEqual(len(self.calls("crumb-kernel-bench")), 1)

    def test_writes_json_under_the_name(self):
        self.machine({"a_cuda_b_test": PASSES}, gpus=2)
        done = self.run_programs("--only", "timings", "--commit", "abc")
        self.assertEqual(done.returncode, 0, done.stdout)
        for name in ("kernels", "decode", "device", "device_hit", "device_hit_cold",
                     "device_peer_hit"):
            self.assertIn("rows", (self.folder / f"output/{name}.json").read_text())
        self.assertEqual(self.calls("crumb-kernel-bench"), ["--json --commit abc [0]"])
        self.program("programs/bin/crumb-device-bench", "echo '{\"rows\": ['")
        done = self.run_programs("--only", "timings", "--commit", "abc")
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: device (its JSON is none", done.stdout)

    def test_what_fails(self):
        lost = LISTS + "echo '[==========] 0 tests from 0 test suites ran. (0 ms total)'"
        for body, bench, named in (
                (FAILS, "true", "failed: a_cuda_b_test (exit code 1"),
                (skips("needs a CUDA device"), "true", "failed: a_cuda_b_test (skipped)"),
                (lost, "true", "failed: a_cuda_b_test (3 tests were to run)"),
                (PASSES, "exit 3", "failed: kernels (exit code 3)")):
            self.machine({"a_cuda_b_test": body})
            self.program("programs/bin/crumb-kernel-bench", bench)
            done = self.run_programs()
            self.assertEqual(done.returncode, 1, named)
            self.assertIn(named, done.stdout)
            # Whatever fails, the rest is run.
            self.assertEqual(len(self.calls("crumb-device-hit-bench")), 2)
            (self.folder / "calls").unlink()

    def test_what_a_machine_may_lack(self):
        two, hopper = "needs two CUDA devices", "needs compute capability 9.0, for clusters"
        for reason, gpus, capability, allowed in ((two, 1, "9.0", True), (two, 2, "9.0", False),
                                                  (hopper, 1, "8.0", True),
                                                  (hopper, 1, "9.0", False),
                                                  (hopper, 1, "10.0", False)):
            self.machine({"a_cuda_b_test": skips(reason)}, gpus, capability)
            done = self.run_programs("--only", "checks")
            self.assertEqual(done.returncode, 0 if allowed else 1, done.stdout)
            self.assertIn(f"skipped: {reason}", done.stdout)

    def sanitizer(self, version, body=""):
        self.program("path/compute-sanitizer",
                     f"[[ $1 != --version ]] || {{ echo 'Version {version}'; exit; }}\n"
                     f"[[ $1 != --help ]] || {{ echo '--max-connections N'; exit; }}\n"
                     f"{body}\n\"${{@: -2}}\"")

    def test_the_sanitizer_counts(self):
        self.machine({f"kernels_cuda_{name}_test": PASSES for name in gpu_programs.SANITIZED})
        self.sanitizer("2025.3.1", "[[ $2 != racecheck || $* != *decode_test* ]] || exit 9")
        done = self.run_programs("--only", "sanitizers")
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: racecheck.decode", done.stdout)
        self.assertNotIn("failed: memcheck", done.stdout)
        self.assertIn("clusters left out of racecheck", done.stdout)
        calls = self.calls("compute-sanitizer")
        self.assertTrue(all("--max-connections" in call for call in calls if "--tool" in call))
        without = [call for call in calls if "-*/clusters" in call]
        self.assertTrue(without)
        self.assertTrue(all("racecheck" in call and "decode_test" in call for call in without))
        (self.folder / "calls").unlink()
        self.sanitizer("2026.4.0")
        self.assertEqual(self.run_programs("--only", "sanitizers").returncode, 0)
        self.assertFalse([c for c in self.calls("compute-sanitizer") if "-*/clusters" in c])

    def test_a_sanitizer_over_nothing_has_failed(self):
        programs = {f"kernels_cuda_{name}_test": PASSES for name in gpu_programs.SANITIZED}
        programs["kernels_cuda_fetch_test"] = (
            "case \"$*\" in *--gtest_list_tests*) exit;; esac\n"
            "echo '[==========] 0 tests from 0 test suites ran. (0 ms total)'")
        self.machine(programs)
        self.sanitizer("2026.4.0")
        done = self.run_programs("--only", "sanitizers")
        self.assertEqual(done.returncode, 1)
        self.assertIn("failed: memcheck.fetch", done.stdout)


    def test_ends_with_all_that_it_started_on_a_signal(self):
        child = self.folder / "child"
        self.machine({"a_cuda_b_test": LISTS + f"sleep 600 & echo $! >{child}; wait"})
        with subprocess.Popen([self.path / "bash", SCRIPT, "--programs", self.folder / "programs",
                               "--output", self.folder / "output"], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, env=self.environment()) as script:
            wait_until(lambda: child.exists() and child.read_text().endswith("\n"))
            script.terminate()
            script.communicate(timeout=60)
        self.assertEqual(script.returncode, 143)
        wait_until(lambda: has_ended(child.read_text().strip()))


class MachineTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="crumb-gpu-programs-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.machine = gpu_programs.Machine(argparse.Namespace(
            gpus="0,1", capability=9.0, output=self.folder, programs=self.folder, per_gpu=2))

    def job(self, name, *command, seconds=60):
        return gpu_programs.Job(name, name, list(command), seconds)

    def test_what_hangs_ends_with_all_that_it_started(self):
        child = self.folder / "child"
        job = self.job("hangs", "bash", "-c", f"sleep 600 & echo $! >{child}; wait", seconds=3)
        self.assertEqual(self.machine.run(job, time.monotonic() + 60).code, 124)
        self.assertIn("not done after", job.text())
        wait_until(lambda: has_ended(child.read_text().strip()))

    def test_a_section_has_an_end(self):
        job = self.job("late", "true")
        self.assertEqual(self.machine.run(job, time.monotonic() - 1).code, 124)
        self.assertIn("not started", job.text())

    def test_what_is_not_there_has_failed(self):
        job = self.job("absent", str(self.folder / "absent"))
        self.assertEqual(self.machine.run(job, time.monotonic() + 60).code, 127)
        self.assertIn("cannot run", job.text())


if __name__ == "__main__":
    unittest.main()
