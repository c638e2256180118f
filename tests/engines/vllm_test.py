#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM with CrumbConnector and the project's small model, on the CPU: vllm_test.py --build DIR

Needs build/engines (tests/engines/install.sh); exit code 77 without it. Every engine is a process of
its own, and its own prefix cache is emptied before a hit is expected, so that what it has cached
comes from crumbd.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests/deploy"))
from services import Crumbd  # noqa: E402

OPTIONS = argparse.Namespace()
VENV = ROOT / "build/engines/venv"
SKIPPED = 77
START_SECONDS = 600  # vLLM's import alone takes minutes on a busy machine
PROMPT = [(i * 7919 + i // 64 * 31) % 4000 + 8 for i in range(1100)]
BLOCK = 128  # tokens of a block of vLLM on the CPU


class Engine:
    """A process with vLLM."""

    def __init__(self, model, config=None):
        command = [VENV / "bin/python", HERE / "vllm_engine.py", model]
        if config is not None:
            command.append(json.dumps(config))
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([str(part) for part in command], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log)
        self.read()

    def read(self):
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line[len("RESULT "):])
        self.log.seek(0)
        raise AssertionError(f"the engine ended:\n{self.log.read()[-4000:]}")

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.read()

    def generate(self, tokens, max_tokens=24, salt=None):
        return self.ask(tokens=tokens, max_tokens=max_tokens, salt=salt)

    def close(self):
        self.process.stdin.close()
        self.process.wait(120)
        self.log.close()


class VllmTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.install_wheel()
        cls.model = cls.folder / "model"
        shutil.copytree(ROOT / "models/data/tiny-lm", cls.model)
        (cls.model / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}')
        plain = Engine(cls.model)
        cls.addClassCleanup(plain.close)
        cls.expected = plain.generate(PROMPT)["tokens"]
        cls.salted = plain.generate(PROMPT[:700])["tokens"]

    @classmethod
    def install_wheel(cls):
        wheel = subprocess.run(["bash", ROOT / "deploy/build_wheel.sh", "--build", OPTIONS.build,
                                "--to", cls.folder / "wheel"], check=True, capture_output=True,
                               text=True, timeout=600).stdout.strip()
        subprocess.run([VENV / "bin/pip", "--disable-pip-version-check", "install", "-q",
                        "--no-index", "--no-deps", "--force-reinstall", wheel], check=True,
                       timeout=300)

    def crumbd(self):
        folder = tempfile.mkdtemp(dir=self.folder)  # short, for paths of sockets have 107 bytes
        crumbd = Crumbd(pathlib.Path(OPTIONS.build) / "bin", folder)
        self.addCleanup(crumbd.stop)
        crumbd.start()
        return crumbd, folder

    def engine(self, folder, **config):
        engine = Engine(self.model, {"socket_dir": folder, "load": "always", "deadline": 5,
                                     **config})
        self.addCleanup(engine.close)
        return engine

    def hit(self, engine, tokens, cached, **options):
        """Generates when all pages are published; the hit must come from crumbd."""
        deadline = time.monotonic() + 60
        while True:
            self.assertEqual(engine.ask(reset=True), {"reset": True})
            result = engine.generate(tokens, **options)
            if result["cached"] >= cached or time.monotonic() > deadline:
                return result

    def test_exact_pages_give_the_same_answers_in_another_process_and_after_a_restart(self):
        crumbd, folder = self.crumbd()
        writer = self.engine(folder, history="bf16")
        cold = writer.generate(PROMPT)
        self.assertEqual(cold["cached"], 0)
        self.assertEqual(cold["tokens"], self.expected)
        self.assertEqual(self.hit(writer, PROMPT, 1024)["tokens"], self.expected)

        reader = self.engine(folder, history="bf16")
        warm = reader.generate(PROMPT)
        self.assertEqual(warm["cached"], 1024)
        self.assertEqual(warm["tokens"], self.expected)
        other_salt = reader.generate(PROMPT[:700], salt="another tenant's")
        self.assertEqual(other_salt["cached"], 0)
        self.assertEqual(other_salt["tokens"], self.salted)

        crumbd.stop()  # requests go on without it
        reader.ask(reset=True)
        alone = reader.generate(PROMPT)
        self.assertEqual((alone["cached"], alone["tokens"]), (0, self.expected))
        crumbd.start()  # and hit again, now from SSD
        again = self.hit(reader, PROMPT, 1024)
        self.assertEqual((again["cached"], again["tokens"]), (1024, self.expected))

    def test_int2_pages_are_hit_behind_the_recent_window(self):
        _, folder = self.crumbd()
        writer = self.engine(folder)
        self.assertEqual(writer.generate(PROMPT)["tokens"], self.expected)
        reader = self.engine(folder)
        warm = self.hit(reader, PROMPT, 768)
        self.assertEqual(warm["cached"], (len(PROMPT) - 256) // BLOCK * BLOCK)
        # Pages of the other method are others.
        self.assertEqual(self.engine(folder, history="bf16").generate(PROMPT)["cached"], 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=str(ROOT / "build/release"))
    parser.parse_known_args(namespace=OPTIONS)
    OPTIONS.build = str(pathlib.Path(OPTIONS.build).resolve())
    if not (ROOT / "build/engines/pinned").exists():
        print("skipped: vLLM is not installed; tests/engines/install.sh installs it")
        sys.exit(SKIPPED)
    unittest.main(argv=[sys.argv[0]], verbosity=2)


if __name__ == "__main__":
    main()
