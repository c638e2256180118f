#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM with CrumbConnector and the project's small model on a GPU: vllm_gpu_test.py [--python
PYTHON]

PYTHON (default: this one) must import vLLM and crumb, a build with CUDA; exit code 77 without vLLM
or a CUDA device. Every engine is a process of its own with CUDA graphs, and
its own prefix cache is emptied before a hit is expected, so that hits come from crumbd.
"""

import argparse
import json
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
from engine_process import Engine, output_of, require_gpu  # noqa: E402
from services import Crumbd  # noqa: E402

OPTIONS = argparse.Namespace()
TEXT = []  # tokens of the project's documentation
# Prints crumbd's path and the tokens of the text on standard input.
PREPARE = """
import crumb, json, sys, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
print(json.dumps([str(crumb.path_of("crumbd")), tokenizer.encode(sys.stdin.read()).ids]))
"""
# Length of a prompt: the same leading tokens are a hit in blocks of 16 and in pages of 64, so that
# a hit in vLLM's own prefix cache and one in crumbd compute the same tokens in the same steps. The
# rows of exact pages have the same bits, and so the tokens must be equal.
PROMPT_TOKENS, CACHED = 1482, 1472
DECODED = 80   # tokens; they complete the page behind the cached ones
LONGER, LONGER_CACHED = 1546, 1536
# The engines share the device. FULL graphs replay decode steps without calling per-layer hooks.
LLM_OPTIONS = {"kv_cache_memory_bytes": 256 << 20, "max_model_len": 4096, "enforce_eager": False,
               "max_num_batched_tokens": 512, "max_num_seqs": 16}

# FlashAttention has FP8 caches on some GPUs only.
FP8_OPTIONS = {"kv_cache_dtype": "fp8", "attention_backend": "TRITON_ATTN"}


class VllmGpuTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.model = cls.folder / "model"
        shutil.copytree(ROOT / "models/data/tiny-lm", cls.model)
        (cls.model / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}')
        # Room for the pages that all requests of a batch hold leased at once.
        cls.crumbd = Crumbd(pathlib.Path(OPTIONS.crumbd).parent, cls.folder, host_bytes="512MiB",
                            ssd_bytes="1GiB")
        cls.addClassCleanup(lambda: cls.crumbd.stop())
        cls.crumbd.start()
        given = {"socket_dir": folder.name, "load": "always", "deadline": 5,
                 "staging_bytes": 256 << 20}
        configs = {"plain": None, "writer": {**given, "history": "bf16"},
                   "reader": {**given, "history": "bf16"}, "int2": given,
                   "by layer": {**given, "history": "bf16", "load_by_layer": True}}
        cls.exact = configs["writer"]
        cls.engines = {}
        for name, config in configs.items():  # all start at once
            cls.engines[name] = Engine(OPTIONS.python, cls.model, config, LLM_OPTIONS, ready=False)
            cls.addClassCleanup(cls.engines[name].close)
        for name, engine in cls.engines.items():
            print(name, engine.ready(), flush=True)

    @staticmethod
    def prompt(number):
        """Tokens of the project's documentation, which the model knows, from a place of its own."""
        return TEXT[40 * number:40 * number + PROMPT_TOKENS]

    def own_hit(self, engine, tokens, cached, **options):
        """Returns the tokens over the engine's own prefix cache, which has the prompt."""
        result = engine.generate(tokens, **options)
        self.assertEqual(result["cached"], cached)
        return result["tokens"]

    def test_exact_pages_give_the_same_tokens_in_another_process_and_after_a_kill(self):
        writer, reader = self.engines["writer"], self.engines["reader"]
        prompt = self.prompt(0)
        cold = writer.generate(prompt, DECODED)
        self.assertEqual(cold["cached"], 0)
        expected = self.own_hit(writer, prompt, CACHED, max_tokens=DECODED)
        longer = (prompt + expected)[:LONGER]
        expected_longer = self.own_hit(writer, longer, LONGER_CACHED)
        for engine in (writer, reader):
            warm = engine.hit(prompt, CACHED, max_tokens=DECODED)
            self.assertEqual((warm["cached"], warm["tokens"]), (CACHED, expected))
            # The last page of this hit was computed by decode steps.
            warm = engine.hit(longer, LONGER_CACHED)
            self.assertEqual((warm["cached"], warm["tokens"]), (LONGER_CACHED, expected_longer))
        # Another salt is another tenant's.
        salted = reader.generate(prompt, DECODED, salt="another tenant's")
        self.assertEqual((salted["cached"], salted["tokens"]), (0, cold["tokens"]))

        self.flush()
        self.crumbd.stop(signal.SIGKILL)
        reader.request(reset=True)
        alone = reader.generate(prompt, DECODED)  # requests go on without it
        self.assertEqual((alone["cached"], alone["tokens"]), (0, cold["tokens"]))
        self.crumbd.start()
        from_ssd = reader.hit(prompt, CACHED, max_tokens=DECODED)
        self.assertEqual((from_ssd["cached"], from_ssd["tokens"]), (CACHED, expected))

    def test_pages_of_an_fp8_cache_give_its_tokens_in_another_process(self):
        writer, reader = engines = [Engine(OPTIONS.python, self.model, self.exact,
                                           {**LLM_OPTIONS, **FP8_OPTIONS}, ready=False)
                                    for _ in range(2)]
        for engine in engines:
            self.addCleanup(engine.close)
        for engine in engines:
            engine.ready()
        prompt = self.prompt(37)
        self.assertEqual(writer.generate(prompt, DECODED)["cached"], 0)
        expected = self.own_hit(writer, prompt, CACHED, max_tokens=DECODED)
        for engine in engines:
            warm = engine.hit(prompt, CACHED, max_tokens=DECODED)
            self.assertEqual((warm["cached"], warm["tokens"]), (CACHED, expected))

    def test_int2_pages_are_hit_behind_the_recent_window(self):
        engine, prompt = self.engines["int2"], self.prompt(1)
        most = (len(prompt) - 256) // 64 * 64
        cold = engine.generate(prompt, DECODED)
        self.assertEqual(cold["cached"], 0)
        warm = engine.hit(prompt, most, max_tokens=DECODED)
        self.assertEqual(warm["cached"], most)
        agreed = sum(a == b for a, b in zip(warm["tokens"], cold["tokens"]))
        print(f"INT2: {agreed} of {DECODED} tokens as without a hit", flush=True)

    def test_loads_of_many_requests_beside_steps_of_others(self):
        """Blocks go from one request to another while loads write them and steps read them. Behind
        the batch, requests hit the loaded blocks one by one in vLLM's own prefix cache, and
        give the tokens of pages that were loaded for them alone."""
        engine = self.engines["reader"]
        prompts = [self.prompt(number) for number in range(2, 26)]
        engine.request(batch=prompts, max_tokens=2)
        alone = [engine.hit(prompt, CACHED) for prompt in prompts]
        self.assertEqual([result["cached"] for result in alone], [CACHED] * len(prompts))
        for _ in range(3):
            self.assertEqual(engine.request(reset=True), {"reset": True})
            batch = engine.request(batch=prompts, max_tokens=DECODED)
            self.assertEqual(batch["cached"], [CACHED] * len(prompts))
            for prompt, result in zip(prompts, alone):
                behind = engine.generate(prompt)
                self.assertIn(behind["cached"], (0, CACHED))
                if behind["cached"] == CACHED:
                    self.assertEqual(behind["tokens"], result["tokens"])

    def test_loads_by_layer_give_the_tokens_of_a_hit_in_the_engines_own_cache(self):
        engine = self.engines["by layer"]
        for number in range(31, 37):
            prompt = self.prompt(number)
            self.engines["writer"].generate(prompt, 1)
            warm = engine.hit(prompt, CACHED, max_tokens=DECODED)
            self.assertEqual(warm["cached"], CACHED)
            self.assertEqual(self.own_hit(engine, prompt, CACHED, max_tokens=DECODED),
                             warm["tokens"])

    def test_an_engine_without_connector_gives_the_same_tokens(self):
        """The model is so sure of the tokens of this text that the rounding of other kernels and
        graphs does not change most of them."""
        prompt = self.prompt(30)
        ours = self.engines["writer"].generate(prompt, DECODED)["tokens"]
        theirs = self.engines["plain"].generate(prompt, DECODED)["tokens"]
        agreed = sum(a == b for a, b in zip(ours, theirs))
        print(f"without connector: {agreed} of {DECODED} tokens are the same", flush=True)
        self.assertEqual(ours[0], theirs[0])

    def flush(self):
        """Waits until all pages are on SSD."""
        subprocess.run([pathlib.Path(OPTIONS.crumbd).with_name("crumb"), "--socket-dir",
                        self.folder, "flush"], check=True, timeout=60)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.parse_known_args(namespace=OPTIONS)
    texts = "".join(path.read_text(encoding="utf-8")
                    for path in sorted((ROOT / "docs").glob("*.md")))
    require_gpu(OPTIONS.python)
    OPTIONS.crumbd, tokens = json.loads(output_of(
        OPTIONS.python, PREPARE, ROOT / "models/data/tiny-lm", text=texts[:40000]))
    TEXT.extend(tokens)
    unittest.main(argv=[sys.argv[0]], verbosity=2)


if __name__ == "__main__":
    main()
