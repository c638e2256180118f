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
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE)]
import vllm_native_cases as cases  # noqa: E402
from engine_process import Engine, EngineProcess, run_tests  # noqa: E402

OPTIONS = argparse.Namespace()
VENV = ROOT / "build/engines/venv"
# vLLM prints the cache's capacity for requests of this length.
LONG = {"max_model_len": 32768, "hf_overrides": {"max_position_embeddings": 32768}}


class VllmNativeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.environment = cases.environment(OPTIONS.build, pathlib.Path(folder.name))
        cls.model = cases.model_folder(folder.name)
        cls.text = cls.tokens_of(ROOT / "LICENSE")
        cls.crumb = cls.engine({**LONG, **cases.CUSTOM})

    @classmethod
    def tokens_of(cls, file):
        program = ("import pathlib, sys, tokenizers; print(tokenizers.Tokenizer.from_file("
                   "sys.argv[1]).encode(pathlib.Path(sys.argv[2]).read_text()).ids)")
        out = subprocess.run([VENV / "bin/python", "-c", program, cls.model / "tokenizer.json",
                              file], check=True, capture_output=True, text=True).stdout
        return [int(token) for token in out.strip()[1:-1].split(",")]

    @classmethod
    def engine(cls, options):
        """An engine whose `about` is its description of itself."""
        engine = Engine(VENV / "bin/python", cls.model, None, options, cls.environment, ready=False)
        cls.addClassCleanup(engine.close)
        engine.about = engine.ready()
        return engine

    def test_capacity_short_contexts_and_agreement_with_the_references(self):
        plain = self.engine(LONG)
        bf16, int2 = plain.about["cache_tokens"], self.crumb.about["cache_tokens"]
        print(f"cache of 1 GiB at 32,768 tokens: BF16 {bf16} tokens, INT2 {int2}")
        self.assertLess(bf16 / int2, 0.18)

        self.assertEqual(self.crumb.about["attention"], ["CUSTOM"])
        self.assertNotIn("CUSTOM", plain.about["attention"])
        cases.check_short_contexts(self, self.text, plain, {"crumb": self.crumb})

        text = self.text[:cases.SCORED_TOKENS]
        oracle = EngineProcess([VENV / "bin/python", HERE / "vllm_native_oracle.py", self.model],
                               self.environment)
        self.addCleanup(oracle.close)
        cases.check_scores(self, "CPU", *(engine.request(score=text)["scores"]
                                          for engine in (self.crumb, plain, oracle)))

    def test_chunks_batches_preemption_and_cancellation_change_nothing(self):
        prompts, tokens = cases.batch_prompts(self.text), cases.LONG_DECODED
        self.crumb.request(reset=True)  # tokens behind a hit attend more of the prompt as INT2
        alone = [self.crumb.generate(prompt, tokens)["tokens"] for prompt in prompts]
        # Requests wait, and those that run are preempted when they grow.
        small = self.engine(cases.SMALL)
        self.assertEqual(small.request(score=self.text[:600]), self.crumb.request(score=self.text[:600]))
        self.assertEqual(small.request(batch=prompts, max_tokens=tokens)["tokens"], alone)
        self.assertGreater(small.request(metrics=True)["vllm:num_preemptions"], 0)
        kept = [None if i in (0, 3) else result for i, result in enumerate(alone)]
        self.assertEqual(small.request(batch=prompts, max_tokens=tokens, cancel=[0, 3])["tokens"], kept)
        self.assertEqual(small.request(batch=prompts, max_tokens=tokens)["tokens"], alone)

    def test_prefixes_are_shared_up_to_the_recent_window(self):
        first, second = self.text[:900], self.text[:640] + self.text[1000:1300]
        self.assertEqual(self.crumb.request(reset=True), {"reset": True})
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
        self.crumb.request(reset=True)
        both = self.crumb.request(batch=[first, second], max_tokens=24)
        self.assertEqual(both["tokens"], [cold["tokens"], other["tokens"]])
        self.assertEqual(self.crumb.generate(first, salt="another tenant's")["cached"], 0)
        self.assertEqual(self.crumb.generate(self.text[:300])["cached"], 0)

    def test_drafts_change_nothing(self):
        """Rejected drafts have replaced rows of the recent window and written tiles of windows."""
        engine = self.engine(cases.DRAFTS)
        for begin, tokens in cases.DRAFTED:
            prompt = self.text[begin:begin + tokens]
            self.crumb.request(reset=True)
            self.assertEqual(engine.generate(prompt, cases.DRAFTED_TOKENS)["tokens"],
                             self.crumb.generate(prompt, cases.DRAFTED_TOKENS)["tokens"])
        metrics = engine.request(metrics=True)
        drafted, accepted = (metrics[f"vllm:spec_decode_num_{name}_tokens"]
                             for name in ("draft", "accepted"))
        print(f"drafts: {accepted} of {drafted} accepted", flush=True)
        self.assertGreater(accepted, 0)
        self.assertGreater(drafted, accepted)

    def test_what_cannot_be_served_ends_the_start_with_a_sentence(self):
        connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        engine = Engine(VENV / "bin/python", self.model, None,
                        {**cases.CUSTOM, "kv_transfer_config": connector}, self.environment,
                        ready=False)
        self.addCleanup(engine.close)
        with self.assertRaisesRegex(AssertionError,
                                    "does not support a KV connector other than CrumbConnector"):
            engine.ready()


if __name__ == "__main__":
    run_tests("vLLM", "engines", "install.sh", OPTIONS, __doc__)
