#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang with CrumbLinker, on the CPU: the package's tests over SGLang's own caches, and then its
engine with the project's small model: sglang_test.py --build DIR

Needs build/sglang (tests/engines/install_sglang.sh); exit code 77 without it. Every engine is a
process of its own, and its own cache is emptied before a hit is expected, so that cached
tokens come from crumbd.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests/deploy")]
from engine_process import EngineProcess, run_tests  # noqa: E402
from services import Crumbd  # noqa: E402

OPTIONS = argparse.Namespace()
PYTHON = ROOT / "build/sglang/venv/bin/python"
PACKAGE_TESTS = ("sglang_linker_test", "sglang_hostile_test", "sglang_ranks_test")
PROMPT = [(i * 7919 + i // 64 * 31) % 4000 + 8 for i in range(1100)]
PAGE = 64


def start_engine(package, model, config=None):
    """A process with SGLang; config: of CrumbLinker, None for an engine without it."""
    command = [PYTHON, HERE / "sglang_engine.py", model]
    if config is not None:
        command.append(json.dumps(config))
    return EngineProcess(command, {**os.environ, "PYTHONPATH": str(package)})


class SglangTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.package = cls.folder / "package"
        subprocess.run([sys.executable, ROOT / "python/tools/develop.py", "--build", OPTIONS.build,
                        "--to", cls.package], check=True)
        cls.model = cls.folder / "model"
        shutil.copytree(ROOT / "models/data/tiny-lm", cls.model)
        (cls.model / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}')

    def test_the_linker_over_sglangs_caches(self):
        for name in PACKAGE_TESTS:
            with self.subTest(name):
                done = subprocess.run(
                    [PYTHON, ROOT / f"python/tests/{name}.py"], check=False, capture_output=True,
                    text=True, timeout=1200, env={**os.environ, "PYTHONPATH": str(self.package)})
                self.assertEqual(done.returncode, 0, done.stderr[-6000:])
                self.assertNotIn("skipped", done.stderr)

    def crumbd(self):
        folder = tempfile.mkdtemp(dir=self.folder)  # short, for paths of sockets have 107 bytes
        crumbd = Crumbd(pathlib.Path(OPTIONS.build) / "bin", folder)
        self.addCleanup(crumbd.stop)
        crumbd.start()
        return crumbd, folder

    def engines(self, *configs):
        """An engine for each config, None for one without linker. They start side by side."""
        engines = []
        for config in configs:
            options = config and {"deadline": 5, "after_flush": "shared", **config}
            engines.append(start_engine(self.package, self.model, options))
            self.addCleanup(engines[-1].close)
        for engine in engines:
            self.assertEqual(engine.read(), {"ready": True})
        return engines

    def test_requests_hit_what_another_process_has_computed(self):
        crumbd, folder = self.crumbd()
        bf16 = {"socket_dir": folder, "history": "bf16"}
        last = len(PROMPT) // PAGE * PAGE
        plain, writer = self.engines(None, bf16)
        expected = plain.generate(PROMPT)["tokens"]
        salted = plain.generate(PROMPT[:700], salt="another tenant's")["tokens"]
        plain.close()
        cold = writer.generate(PROMPT)
        self.assertEqual((cold["cached"], cold["tokens"]), (0, expected))
        again = writer.hit(PROMPT, last)
        self.assertEqual((again["cached"], again["tokens"]), (last, expected))
        writer.close()

        reader, int2 = self.engines(bf16, {"socket_dir": folder})
        warm = reader.generate(PROMPT)
        self.assertEqual((warm["cached"], warm["tokens"]), (last, expected))
        other = reader.generate(PROMPT[:700], salt="another tenant's")
        self.assertEqual((other["cached"], other["tokens"]), (0, salted))
        # Pages of the other method are others, and end in front of the recent window.
        self.assertEqual(int2.generate(PROMPT)["cached"], 0)
        most = (len(PROMPT) - 1) // PAGE * PAGE - 4 * PAGE
        self.assertEqual(int2.hit(PROMPT, most)["cached"], most)

        crumbd.stop(signal.SIGKILL)  # requests go on without it
        self.assertEqual(reader.request(reset=True), {"reset": True})
        alone = reader.generate(PROMPT)
        self.assertEqual((alone["cached"], alone["tokens"]), (0, expected))
        crumbd.start()  # and hit again, now from SSD
        again = reader.hit(PROMPT, last)
        self.assertEqual((again["cached"], again["tokens"]), (last, expected))


if __name__ == "__main__":
    run_tests("SGLang", "sglang", "install_sglang.sh", OPTIONS, __doc__)
