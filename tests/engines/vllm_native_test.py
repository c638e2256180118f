#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM on the CPU with Crumb's attention backend, whose pool holds INT2 blocks, and the project's
small model: vllm_native_test.py --build DIR

Needs build/engines (tests/engines/install.sh); exit code 77 without it. The package is staged in a
folder, and nothing is installed. References are vLLM with its own attention, and crumb.transformers
with one token in a pass.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE)]
from engine_process import Engine, EngineProcess  # noqa: E402

OPTIONS = argparse.Namespace()
VENV = ROOT / "build/engines/venv"
SKIPPED = 77
# vLLM prints the cache's capacity for requests of this length.
LONG = {"max_model_len": 32768, "hf_overrides": {"max_position_embeddings": 32768}}
CUSTOM = {"attention_backend": "CUSTOM"}
ROUNDING = 0.15  # differences of log probabilities that BF16 rounding causes, at most
EXACT_TOKENS = 318  # positions before which no token attends INT2 history


def mean_difference(found, expected):
    return sum(abs(x - y) for x, y in zip(found, expected, strict=True)) / len(found)


class VllmNativeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        package = pathlib.Path(folder.name) / "package"
        subprocess.run([sys.executable, ROOT / "python/tools/develop.py", "--build", OPTIONS.build,
                        "--to", package], check=True)
        cls.environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1",
                           "HF_HUB_OFFLINE": "1"}
        cls.model = pathlib.Path(folder.name) / "model"
        shutil.copytree(ROOT / "models/data/tiny-lm", cls.model)
        (cls.model / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}')
        cls.text = cls.tokens_of(ROOT / "LICENSE")
        cls.crumb = cls.engine({**LONG, **CUSTOM})

    @classmethod
    def tokens_of(cls, file):
        program = ("import pathlib, sys, tokenizers; print(tokenizers.Tokenizer.from_file("
                   "sys.argv[1]).encode(pathlib.Path(sys.argv[2]).read_text()).ids)")
        out = subprocess.run([VENV / "bin/python", "-c", program, cls.model / "tokenizer.json",
                              file], check=True, capture_output=True, text=True).stdout
        return [int(token) for token in out.strip()[1:-1].split(",")]

    @classmethod
    def engine(cls, options):
        """An engine, with what it says of itself as `about`."""
        engine = Engine(VENV / "bin/python", cls.model, None, options, cls.environment, ready=False)
        cls.addClassCleanup(engine.close)
        engine.about = engine.ready()
        return engine

    def test_capacity_short_contexts_and_agreement_with_the_references(self):
        plain = self.engine(LONG)
        bf16, int2 = plain.about["cache_tokens"], self.crumb.about["cache_tokens"]
        print(f"cache of 1 GiB at 32,768 tokens: BF16 {bf16} tokens, INT2 {int2}")
        self.assertLess(bf16 / int2, 0.18)

        # Contexts inside sink and recent window are attended in BF16.
        compared = 0
        for begin, tokens in ((0, 20), (500, 64), (900, 65), (300, 250), (0, 250), (1200, 200)):
            prompt = self.text[begin:begin + tokens]
            expected = plain.ask(tokens=prompt, max_tokens=24, margins=True)
            # Up to the first token that is as likely as the next one, but for rounding.
            sure = next((i for i, margin in enumerate(expected["margins"]) if margin < ROUNDING),
                        24)
            compared += sure
            self.assertEqual(self.crumb.generate(prompt)["tokens"][:sure],
                             expected["tokens"][:sure], (begin, tokens))

        print(f"{compared} tokens behind short prompts are those of vLLM's own attention")
        self.assertGreaterEqual(compared, 30)

        text = self.text[:900]
        expected, found = plain.ask(score=text)["scores"], self.crumb.ask(score=text)["scores"]
        oracle = EngineProcess([VENV / "bin/python", HERE / "vllm_native_oracle.py", self.model],
                               self.environment)
        self.addCleanup(oracle.close)
        stored = oracle.ask(score=text)["scores"]
        exact = slice(0, EXACT_TOKENS)
        history = slice(EXACT_TOKENS, None)
        short = mean_difference(found[exact], expected[exact])
        error = mean_difference(found[history], stored[history])
        quantization = mean_difference(found[history], expected[history])
        print(f"mean |difference| of log probabilities: {short:.4f} to vLLM without history; with "
              f"history {error:.4f} to crumb.transformers, {quantization:.4f} to vLLM")
        self.assertLess(short, 0.04)
        self.assertLess(error, 0.06)
        self.assertLess(error, quantization / 2)

    def test_chunks_batches_preemption_and_cancellation_change_nothing(self):
        prompts = [self.text[i * 150:i * 150 + n] for i, n in enumerate((700, 30, 384, 513, 900))]
        self.crumb.ask(reset=True)  # tokens behind a hit attend more of the prompt as INT2
        alone = [self.crumb.generate(prompt, 60)["tokens"] for prompt in prompts]
        # Chunks of 100 tokens, and a pool with room for three of these requests: the others wait,
        # and those that run are preempted when they grow.
        small = self.engine({**CUSTOM, "max_num_batched_tokens": 100, "max_num_seqs": 8,
                             "num_gpu_blocks_override": 151, "enable_prefix_caching": False,
                             "disable_log_stats": False})
        self.assertEqual(small.ask(score=self.text[:600]), self.crumb.ask(score=self.text[:600]))
        self.assertEqual(small.ask(batch=prompts, max_tokens=60)["tokens"], alone)
        self.assertGreater(small.ask(metrics=True)["vllm:num_preemptions"], 0)
        kept = [None if i in (0, 3) else tokens for i, tokens in enumerate(alone)]
        self.assertEqual(small.ask(batch=prompts, max_tokens=60, cancel=[0, 3])["tokens"], kept)
        self.assertEqual(small.ask(batch=prompts, max_tokens=60)["tokens"], alone)

    def test_prefixes_are_shared_up_to_the_recent_window(self):
        first, second = self.text[:900], self.text[:640] + self.text[1000:1300]
        self.assertEqual(self.crumb.ask(reset=True), {"reset": True})
        cold = self.crumb.generate(first)
        other = self.crumb.generate(second)
        self.assertEqual((cold["cached"], other["cached"]), (0, 640))
        warm = self.crumb.generate(first)
        self.assertEqual(warm["cached"], (900 - 256) // 64 * 64)
        # Tokens behind the hit attend all of it as INT2, the cold request's some of it as BF16.
        same = sum(x == y for x, y in zip(warm["tokens"], cold["tokens"]))
        print(f"{same} of {len(cold['tokens'])} tokens are those of the cold request")
        self.assertEqual(warm["tokens"], self.crumb.generate(first)["tokens"])
        # In one step: the second request hits blocks that the first one completes in this step.
        self.crumb.ask(reset=True)
        both = self.crumb.ask(batch=[first, second], max_tokens=24)
        self.assertEqual(both["tokens"], [cold["tokens"], other["tokens"]])
        self.assertEqual(self.crumb.generate(first, salt="another tenant's")["cached"], 0)
        self.assertEqual(self.crumb.generate(self.text[:300])["cached"], 0)

    def test_what_cannot_be_served_ends_the_start_with_a_sentence(self):
        engine = Engine(VENV / "bin/python", self.model, {}, CUSTOM, self.environment, ready=False)
        self.addCleanup(engine.close)
        with self.assertRaisesRegex(AssertionError, "does not support a KV connector"):
            engine.ready()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    _, rest = parser.parse_known_args(namespace=OPTIONS)
    if not (ROOT / "build/engines/pinned").exists():
        print("skipped: vLLM is not installed; tests/engines/install.sh installs it")
        sys.exit(SKIPPED)
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)


if __name__ == "__main__":
    main()
