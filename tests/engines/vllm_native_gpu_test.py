#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM on a GPU with Crumb's attention backend and the project's small model:
vllm_native_gpu_test.py [--python PYTHON]

PYTHON (default: this one) must import vLLM and crumb, a build with CUDA; exit code 77 without vLLM
or a CUDA device. References are vLLM with its own attention, and
crumb.transformers on the CPU with one token in a pass. Engines run eagerly, compiled, with CUDA
graphs, and with both.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE)]
import vllm_native_cases as cases  # noqa: E402
from engine_process import Engine, EngineProcess, output_of, require_gpu  # noqa: E402

OPTIONS = argparse.Namespace()
TEXT = []  # tokens of the licence
# Prints the tokens of the text on standard input.
PREPARE = """
import crumb, json, sys, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
print(json.dumps(tokenizer.encode(sys.stdin.read()).ids))
"""
LLM_OPTIONS = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 4096,
               "gpu_memory_utilization": 0.1,  # checked at the start only
               "max_num_batched_tokens": 2048, "max_num_seqs": 16}
CUSTOM = {**LLM_OPTIONS, **cases.CUSTOM}
# By default vLLM compiles the model and replays graphs. These do one of both.
COMPILED = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}}
GRAPHS = {"enforce_eager": False,
          "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


class VllmNativeGpuTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.model = cases.model_folder(folder.name)
        options = {"plain": LLM_OPTIONS, "eager": CUSTOM,
                   "graphs": {**CUSTOM, "enforce_eager": False},
                   "compiled, no graphs": {**CUSTOM, **COMPILED},
                   "graphs alone": {**CUSTOM, **GRAPHS},
                   "small": {**LLM_OPTIONS, **cases.SMALL}}
        cls.engines = {name: Engine(OPTIONS.python, cls.model, None, given, ready=False)
                       for name, given in options.items()}  # all start at once
        cls.oracle = EngineProcess([OPTIONS.python, HERE / "vllm_native_oracle.py", cls.model])
        for process in (*cls.engines.values(), cls.oracle):
            cls.addClassCleanup(process.close)
        cls.about = {name: engine.ready() for name, engine in cls.engines.items()}
        print(cls.about, flush=True)

    def test_layers_have_the_backend_that_the_user_chose(self):
        self.assertNotIn("CUSTOM", self.about["plain"]["attention"])
        for name in self.engines.keys() - {"plain"}:
            self.assertEqual(self.about[name]["attention"], ["CUSTOM"], name)

    def test_scores_are_those_of_the_references(self):
        text = TEXT[:cases.SCORED_TOKENS]
        plain = self.engines["plain"].request(score=text)["scores"]
        stored = self.oracle.request(score=text)["scores"]
        for name in ("eager", "graphs", "small"):
            found = self.engines[name].request(score=text)["scores"]
            cases.check_scores(self, name, found, plain, stored)

    def test_short_contexts_are_decoded_as_by_vllm(self):
        cases.check_short_contexts(self, TEXT, self.engines["plain"],
                                   {name: self.engines[name] for name in ("eager", "graphs")})

    def decoded(self, engine, prompts, expected, case):
        """Checks that a batch's tokens are the expected ones, up to the first that is as likely as
        another one but for rounding."""
        found = engine.request(batch=prompts, max_tokens=cases.LONG_DECODED)["tokens"]
        same = total = 0
        for tokens, wanted in zip(found, expected):
            sure = cases.sure_tokens(wanted)
            self.assertEqual(tokens[:sure], wanted["tokens"][:sure], case)
            same += sum(x == y for x, y in zip(tokens, wanted["tokens"]))
            total += len(tokens)
        print(f"{case}: {same} of {total} tokens are those of each request alone", flush=True)

    def test_graphs_compute_the_same_bits(self):
        """Graphs compute the bits of the same kernels without them: alone, in a batch of a captured
        size, and in one that is padded. A compiled model is compared with a compiled one: torch.compile rounds
        otherwise than the eager model, which changes tokens of vLLM's own attention, too."""
        prompts = cases.batch_prompts(TEXT)
        prompts += [TEXT[750 + 150 * i:][:tokens] for i, tokens in enumerate((250, 640, 800))]
        for name, other in (("eager", "graphs alone"), ("compiled, no graphs", "graphs")):
            for batch in (prompts[:1], prompts[:5], prompts):
                found = []
                for engine in (self.engines[name], self.engines[other]):
                    self.assertEqual(engine.request(reset=True), {"reset": True})
                    made = engine.request(batch=batch, max_tokens=cases.LONG_DECODED, margins=True)
                    found.append([made["tokens"], made["chosen"], made["margins"]])
                self.assertEqual(*found, (name, other, len(batch)))

    def test_batches_chunks_and_preemption_change_nothing(self):
        prompts = cases.batch_prompts(TEXT)
        eager = self.engines["eager"]
        alone = []
        for prompt in prompts:
            self.assertEqual(eager.request(reset=True), {"reset": True})
            alone.append(eager.request(tokens=prompt, max_tokens=cases.LONG_DECODED, margins=True))
        self.assertEqual(eager.request(reset=True), {"reset": True})
        self.decoded(eager, prompts, alone, "batch")
        small = self.engines["small"]
        self.decoded(small, prompts, alone, "chunks, preemption")
        self.assertGreater(small.request(metrics=True)["vllm:num_preemptions"], 0)
        small.request(batch=prompts, max_tokens=cases.LONG_DECODED, cancel=[0, 3])
        self.decoded(small, prompts, alone, "behind cancelled requests")

    def test_decoded_tokens_are_as_likely_as_in_a_prompt(self):
        """Decode kernels, in CUDA graphs or not, against prefill kernels over the same tokens."""
        for name in ("eager", "graphs"):
            engine = self.engines[name]
            for begin, tokens in ((0, 600), (300, 383), (700, 449)):
                prompt = TEXT[begin:begin + tokens]
                self.assertEqual(engine.request(reset=True), {"reset": True})
                decoded = engine.request(tokens=prompt, max_tokens=150, margins=True)
                scores = engine.request(score=prompt + decoded["tokens"])["scores"][tokens - 1:]
                error = cases.mean_difference(decoded["chosen"], scores)
                print(f"{name}: mean |difference| of log probabilities of 150 tokens behind "
                      f"{tokens}: {error:.4f}", flush=True)
                self.assertLess(error, 0.03, (name, tokens))

    def test_prefixes_are_shared_up_to_the_recent_window(self):
        engine = self.engines["graphs"]
        first, second = TEXT[:900], TEXT[:640] + TEXT[1000:1300]
        self.assertEqual(engine.request(reset=True), {"reset": True})
        cold = engine.generate(first)
        other = engine.generate(second)
        self.assertEqual((cold["cached"], other["cached"]), (0, 640))
        warm = engine.generate(first)
        self.assertEqual(warm["cached"], (900 - 256) // 64 * 64)
        self.assertEqual(warm["tokens"], engine.generate(first)["tokens"])
        # In one step: the second request hits blocks that the first one completes in this step.
        engine.request(reset=True)
        both = engine.request(batch=[first, second], max_tokens=24)
        same = sum(x == y for a, b in zip(both["tokens"], [cold["tokens"], other["tokens"]])
                   for x, y in zip(a, b))
        print(f"shared in one step: {same} of 48 tokens are those of requests one by one")
        self.assertEqual([tokens[0] for tokens in both["tokens"]],
                         [cold["tokens"][0], other["tokens"][0]])
        self.assertEqual(engine.generate(first, salt="another tenant's")["cached"], 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    _, rest = parser.parse_known_args(namespace=OPTIONS)
    require_gpu(OPTIONS.python)
    TEXT.extend(json.loads(output_of(OPTIONS.python, PREPARE, cases.TINY_LM,
                                     text=(ROOT / "LICENSE").read_text(encoding="utf-8"))))
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)


if __name__ == "__main__":
    main()
