#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM with CrumbConnector and the project's small model, on the CPU: vllm_test.py --build DIR

Needs build/engines (tests/engines/install.sh); exit code 77 without it. Every engine is a process
of its own, and its own prefix cache is emptied before a hit is expected, so that cached
tokens come from crumbd.
"""

import argparse
import json
import pathlib
import shutil
import signal
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests/deploy")]
from engine_process import Engine, flush, package_environment, run_tests  # noqa: E402
from services import Crumbd  # noqa: E402

OPTIONS = argparse.Namespace()
VENV = ROOT / "build/engines/venv"
PROMPT = [(i * 7919 + i // 64 * 31) % 4000 + 8 for i in range(1100)]
BLOCK = 128  # tokens of a block of vLLM on the CPU


class VllmTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.environment = package_environment(OPTIONS.build, cls.folder)
        cls.model = cls.folder / "model"
        shutil.copytree(ROOT / "models/data/tiny-lm", cls.model)
        (cls.model / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}')
        plain = Engine(VENV / "bin/python", cls.model)
        cls.addClassCleanup(plain.close)
        cls.expected = plain.generate(PROMPT)["tokens"]
        cls.salted = plain.generate(PROMPT[:700])["tokens"]

    def crumbd(self):
        folder = tempfile.mkdtemp(dir=self.folder)  # short, for paths of sockets have 107 bytes
        crumbd = Crumbd(pathlib.Path(OPTIONS.build) / "bin", folder)
        self.addCleanup(crumbd.stop)
        crumbd.start()
        return crumbd, folder

    def engine(self, folder, options=None, **config):
        engine = Engine(VENV / "bin/python", self.model, {
            "socket_dir": folder, "load": "always", "deadline": 5, **config}, options,
            environment=self.environment)
        self.addCleanup(engine.close)
        return engine

    def test_exact_pages_give_the_same_tokens_in_another_process_and_after_a_restart(self):
        crumbd, folder = self.crumbd()
        writer = self.engine(folder, history="bf16")
        cold = writer.generate(PROMPT)
        self.assertEqual(cold["cached"], 0)
        self.assertEqual(cold["tokens"], self.expected)
        self.assertEqual(writer.hit(PROMPT, 1024)["tokens"], self.expected)

        reader = self.engine(folder, history="bf16", load_by_layer=True)
        warm = reader.generate(PROMPT)
        self.assertEqual(warm["cached"], 1024)
        self.assertEqual(warm["tokens"], self.expected)
        other_salt = reader.generate(PROMPT[:700], salt="another tenant's")
        self.assertEqual(other_salt["cached"], 0)
        self.assertEqual(other_salt["tokens"], self.salted)

        crumbd.stop()  # requests go on without it
        reader.request(reset=True)
        alone = reader.generate(PROMPT)
        self.assertEqual((alone["cached"], alone["tokens"]), (0, self.expected))
        crumbd.start()  # and hit again, now from SSD
        again = reader.hit(PROMPT, 1024)
        self.assertEqual((again["cached"], again["tokens"]), (1024, self.expected))

    @unittest.skipUnless(" avx512f " in pathlib.Path("/proc/cpuinfo").read_text(),
                         "vLLM's FP8 cache on the CPU needs AVX-512")
    def test_pages_of_an_fp8_cache_give_its_tokens_in_another_process(self):
        _, folder = self.crumbd()
        options = {"kv_cache_dtype": "fp8"}
        writer = self.engine(folder, options, history="bf16")
        expected = writer.generate(PROMPT)["tokens"]
        reader = self.engine(folder, options, history="bf16")
        warm = reader.hit(PROMPT, 1024)
        self.assertEqual((warm["cached"], warm["tokens"]), (1024, expected))
        # Rows of a BF16 cache are others.
        self.assertEqual(self.engine(folder, history="bf16").generate(PROMPT)["cached"], 0)

    def test_int2_pages_are_hit_behind_the_recent_window(self):
        _, folder = self.crumbd()
        writer = self.engine(folder)
        self.assertEqual(writer.generate(PROMPT)["tokens"], self.expected)
        reader = self.engine(folder)
        warm = reader.hit(PROMPT, 768)
        self.assertEqual(warm["cached"], (len(PROMPT) - 256) // BLOCK * BLOCK)
        # Pages of the other method are others.
        self.assertEqual(self.engine(folder, history="bf16").generate(PROMPT)["cached"], 0)

    def test_stored_and_loaded_pages_are_announced_with_their_tier_and_salt(self):
        """KV events for routers, beside those of vLLM's own cache."""
        crumbd, folder = self.crumbd()
        options = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
        writer = self.engine(folder, options, history="bf16")
        writer.generate(PROMPT, salt="s")
        own, stored = self.events(writer)
        blocks = len(PROMPT) // BLOCK
        self.assertEqual(sum(len(event["block_hashes"]) for event in stored), blocks)
        self.assertEqual({(event["medium"], event["locality"], event["block_size"])
                          for event in stored}, {("CPU", "LOCAL", BLOCK)})
        # Blocks have the names that vLLM gives them, and inputs other than tokens.
        self.assertEqual([name for event in stored for name in event["block_hashes"]],
                         [name for event in own for name in event["block_hashes"]][:blocks])
        self.assertEqual([key for event in stored for key in event["extra_keys"]],
                         [["s"]] + [None] * (blocks - 1))
        self.assertEqual([token for event in stored for token in event["token_ids"]],
                         PROMPT[:blocks * BLOCK])
        self.assertEqual(writer.hit(PROMPT, 1024, salt="s")["cached"], 1024)
        flush(self.environment, folder)
        crumbd.process.stop(signal.SIGKILL)
        crumbd.start()

        reader = self.engine(folder, options, history="bf16")
        self.assertEqual(reader.hit(PROMPT, 1024, salt="s")["cached"], 1024)
        _, loaded = self.events(reader)
        self.assertIn("STORAGE", {event["medium"] for event in loaded})
        self.assertEqual({name for event in loaded if event["medium"] == "STORAGE"
                          for name in event["block_hashes"]},
                         {name for event in stored for name in event["block_hashes"]})

    def events(self, engine):
        """Blocks that were announced since the last call: of vLLM's own cache, and of crumbd."""
        stored = [event for event in engine.request(events=True)["events"]
                  if event["event"] == "BlockStored"]
        return ([event for event in stored if event["ownership"] != "crumb"],
                [event for event in stored if event["ownership"] == "crumb"])


if __name__ == "__main__":
    run_tests("vLLM", "engines", "install.sh", OPTIONS, __doc__)
