#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Tests deploy/build.py, and deploy/quickstart.sh with stand-ins for the programs that it calls."""

import io
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy"))

import build  # noqa: E402


class CudaOptionsTest(unittest.TestCase):
    def test_without_a_gpu_cuda_is_not_built(self):
        options, explanation = build.cuda_options("release", False, [], True)
        self.assertEqual(options, ["-DCRUMB_CUDA=OFF"])
        self.assertIn("--cuda", explanation)

    def test_a_gpu_is_built_for_alone(self):
        options, _ = build.cuda_options("release", False, ["90a-real"], True)
        self.assertEqual(options, ["-DCRUMB_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90a-real"])

    def test_a_gpu_without_nvcc_is_explained(self):
        options, explanation = build.cuda_options("dev", False, ["80-real"], False)
        self.assertEqual(options, ["-DCRUMB_CUDA=OFF"])
        self.assertIn("nvcc", explanation)

    def test_cuda_can_be_requested(self):
        self.assertEqual(build.cuda_options("release", True, [], True)[0], ["-DCRUMB_CUDA=ON"])
        self.assertRaises(ValueError, build.cuda_options, "release", True, [], False)
        self.assertRaises(ValueError, build.cuda_options, "asan", True, [], True)

    def test_other_presets_decide_by_themselves(self):
        self.assertEqual(build.cuda_options("asan", False, ["90a-real"], True)[0], [])


class ProgressTest(unittest.TestCase):
    def test_text(self):
        self.assertEqual(build.progress_text(120, 480, 90),
                         "build: 120 of 480 steps, about 4:30 min left")
        self.assertEqual(build.progress_text(480, 480, 361), "build: 480 of 480 steps, 6:01 min")

    def test_a_log_has_few_lines_and_all_messages(self):
        times = iter([0, 1, 31, 32, 40])
        out = io.StringIO()
        build.follow(["@1/4@ a\n", "@2/4@ b\n", "warning: c\n", "@3/4@ d\n", "@4/4@ e\n"],
                     out, False, lambda: next(times))
        self.assertEqual(out.getvalue().splitlines(),
                         ["build: 2 of 4 steps, about 0:31 min left", "warning: c",
                          "build: 4 of 4 steps, 0:40 min"])


class QuickstartTest(unittest.TestCase):
    """Runs deploy/quickstart.sh with stand-ins on PATH, and looks at the arguments of cmake."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.bin = pathlib.Path(folder.name)
        self.log = self.bin / "log"
        self.program("dpkg-query", 'echo "install ok installed"')
        self.program("cmake", f'echo "$*" >>"{self.log}"')
        self.program("python3", f'[[ "$1" == deploy/demo.py ]] || exec "{sys.executable}" "$@"')
        self.program("nvcc", "true")
        self.gpu("exit 9")

    def program(self, name, body):
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    def gpu(self, body):
        self.program("nvidia-smi", body)

    def configure_options(self, *arguments):
        path = f"{self.bin}:{os.environ['PATH']}"
        subprocess.run(["bash", str(ROOT / "deploy/quickstart.sh"), *arguments], check=True,
                       env=dict(os.environ, PATH=path), stdout=subprocess.DEVNULL)
        lines = self.log.read_text().splitlines()
        self.assertEqual(lines[1], "--build --preset release --target crumbd crumb crumb-tiny-lm")
        return lines[0].split()[2:]

    def test_without_a_gpu(self):
        self.assertEqual(self.configure_options(), ["-DCRUMB_CUDA=OFF"])

    def test_on_request(self):
        self.assertEqual(self.configure_options("--cuda"), ["-DCRUMB_CUDA=ON"])

    def test_for_the_gpu_of_the_machine(self):
        self.gpu("printf '9.0\\n9.0\\n'")
        self.assertEqual(self.configure_options(),
                         ["-DCRUMB_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90a-real"])


if __name__ == "__main__":
    unittest.main()
