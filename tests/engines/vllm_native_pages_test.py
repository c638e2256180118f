#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM on the CPU with Crumb's attention backend, whose INT2 blocks CrumbConnector publishes and
loads, and the project's small model: vllm_native_pages_test.py --build DIR

Needs build/engines (tests/engines/install.sh); exit code 77 without it. Every engine is a process
of its own. The blocks that a hit from crumbd gives are compared bit by bit with those of a hit
in vLLM's own prefix cache.
"""

import argparse
import pathlib
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests/deploy")]
import vllm_native_cases as cases  # noqa: E402
from engine_process import Engine, run_tests  # noqa: E402
from services import Crumbd  # noqa: E402

OPTIONS = argparse.Namespace()
VENV = ROOT / "build/engines/venv"
PROMPT = [(i * 7919 + i // 64 * 31) % 4000 + 8 for i in range(1100)]
HIT = (len(PROMPT) - 256) // 64 * 64
LONGER = PROMPT + [(i * 4919) % 4000 + 8 for i in range(400)]


class VllmNativePagesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.environment = cases.environment(OPTIONS.build, cls.folder)
        cls.model = cases.model_folder(cls.folder)
        # An engine alone, which hits its own prefix cache.
        local = cls.engine(None)
        cls.cold = local.generate(PROMPT, margins=True)
        cls.warm = local.generate(PROMPT, margins=True)
        local.close()

    @classmethod
    def engine(cls, socket_dir, native=True, options=None, **config):
        extra = None if socket_dir is None else {
            "socket_dir": str(socket_dir), "load": "always", "deadline": 5, **config}
        engine = Engine(VENV / "bin/python", cls.model, extra,
                        (options or cases.CUSTOM) if native else {}, cls.environment)
        cls.addClassCleanup(engine.close)
        return engine

    def crumbd(self):
        folder = tempfile.mkdtemp(dir=self.folder)
        crumbd = Crumbd(pathlib.Path(OPTIONS.build) / "bin", folder)
        self.addCleanup(crumbd.stop)
        crumbd.start()
        return crumbd, folder

    def assert_same(self, found, expected):
        for name in ("tokens", "chosen", "margins", "cached"):
            self.assertEqual(found[name], expected[name], name)

    def test_blocks_are_hits_in_another_process_and_after_a_restart(self):
        self.assertEqual((self.cold["cached"], self.warm["cached"]), (0, HIT))
        crumbd, folder = self.crumbd()
        writer = self.engine(folder)
        self.assert_same(writer.generate(PROMPT, margins=True), self.cold)
        self.assertEqual(writer.hit(PROMPT, HIT)["cached"], HIT)

        reader = self.engine(folder)
        self.assert_same(reader.generate(PROMPT, margins=True), self.warm)
        salted = reader.generate(PROMPT, salt="another tenant's", margins=True)
        self.assert_same(salted, self.cold)

        # Blocks of the engine's own prefix cache, and behind them pages from crumbd.
        writer.generate(LONGER)
        end = (len(LONGER) - 256) // 64 * 64
        self.assertEqual(writer.hit(LONGER, end)["cached"], end)
        self.assertEqual(reader.generate(LONGER)["cached"], end)

        crumbd.stop()  # requests go on without it
        reader.request(reset=True)
        self.assert_same(reader.generate(PROMPT, margins=True), self.cold)
        crumbd.start()  # and hit again, now from SSD
        self.assert_same(reader.hit(PROMPT, HIT, margins=True), self.warm)

    def test_rejected_drafts_are_in_no_block(self):
        """An engine with drafts publishes the pages that one without drafts computes."""
        _, folder = self.crumbd()
        writer = self.engine(folder, options=cases.DRAFTS)
        output = writer.generate(PROMPT[:320], 200)["tokens"]
        longer = PROMPT[:320] + output + PROMPT[:300]
        metrics = writer.request(metrics=True)
        self.assertGreater(metrics["vllm:spec_decode_num_draft_tokens"],
                           metrics["vllm:spec_decode_num_accepted_tokens"])
        reader = self.engine(folder)
        pages = (320 + 200 - 1) // 64  # the last token that was generated is not computed
        warm = reader.hit(longer, 64 * pages, margins=True)
        self.assertEqual(warm["cached"], 64 * pages)
        # Another engine computes the same tokens without drafts, and hits its own prefix cache.
        other = self.engine(None)
        other.generate(longer[:64 * pages + 256])
        expected = other.generate(longer, margins=True)
        self.assertEqual(expected["cached"], 64 * pages)
        self.assertLess(cases.mean_difference(warm["chosen"], expected["chosen"]), 0.03)
        sure = cases.sure_tokens(expected)
        self.assertEqual(warm["tokens"][:sure], expected["tokens"][:sure])

    def test_engines_with_rows_and_with_blocks_share_pages(self):
        _, folder = self.crumbd()
        blocks = self.engine(folder)
        blocks.generate(PROMPT)
        self.assertEqual(blocks.hit(PROMPT, HIT)["cached"], HIT)
        rows = self.engine(folder, native=False)
        found = rows.generate(PROMPT)
        # Blocks of vLLM's own attention have 128 tokens here.
        self.assertEqual(found["cached"], HIT // 128 * 128)
        self.assertEqual(len(found["tokens"]), 24)

        rows.generate(LONGER[64:])
        end = (len(LONGER) - 64 - 256) // 128 * 128
        self.assertEqual(rows.hit(LONGER[64:], end)["cached"], end)
        found = blocks.generate(LONGER[64:])
        self.assertEqual(found["cached"], (len(LONGER) - 64 - 256) // 64 * 64)
        self.assertEqual(len(found["tokens"]), 24)

    def test_other_rotations_and_exact_pages_are_refused(self):
        _, folder = self.crumbd()
        for config in ({"history": "bf16"}, {"rotation": "identity"}):
            with self.subTest(config=config), self.assertRaisesRegex(AssertionError,
                                                                     "leave .* out"):
                self.engine(folder, **config)


if __name__ == "__main__":
    run_tests("vLLM", "engines", "install.sh", OPTIONS, __doc__)
