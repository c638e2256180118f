#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The checks of the chat demo, with workers that are made up: each wrong result must end it."""

import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy"))
import chat_demo  # noqa: E402

RIGHT = f"The pass key is {chat_demo.PASSKEY}."


class MadeUpCrumbd:
    def __init__(self):
        self.calls = []

    def start(self):
        self.calls.append("start")

    def kill(self):
        self.calls.append("kill")

    def stop(self):
        self.calls.append("stop")


class MadeUpDemo:
    """Workers that count a token for every four characters, and hit all but 300 tokens."""

    def __init__(self, folder):
        self.folder = self.model = folder
        self.crumbd = MadeUpCrumbd()
        self.tool = "/bin/false"
        self.conversations = []
        self.changes = {}  # fields of an INT2 worker's report that are not as they should be
        self.exact_text = RIGHT
        (folder / "demo.rotation").write_text("made before")

    def run_worker(self, prompt, *options):
        if "--count-tokens" in options:
            return {"prompt_tokens": len(prompt) // 4}
        if "bf16" in options:
            return {"text": self.exact_text, "ttft_seconds": 2.0}
        self.conversations.append((self.folder / "messages.json").read_text())
        tokens = len(self.conversations[-1]) // 4
        tier = (None, "host", "ssd")[(len(self.conversations) - 1) % 3]
        hits = {name: tokens - 300 if name == tier else 0 for name in ("host", "ssd", "device")}
        return {"text": RIGHT, "ttft_seconds": 1.0, "prompt_tokens": tokens, "hit_tokens": hits,
                "computed_tokens": 300 if tier else tokens, "kl": 0.05, "top1": 0.9,
                "kept_bytes": 1, "bf16_bytes": 4, **self.changes}


class ChatDemoTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.demo = MadeUpDemo(pathlib.Path(folder.name))
        self.chat = chat_demo.Chat(self.demo, "A line of the document.\n" * 2000)

    def test_a_chat_that_goes_well(self):
        self.chat.run([])
        self.assertEqual(self.demo.crumbd.calls, ["start", "kill", "start", "stop"])
        first, second, third = self.demo.conversations
        self.assertIn(chat_demo.PASSKEY, first)
        self.assertTrue(second.startswith(first[:-1]) and third.startswith(second[:-1]))
        self.assertLessEqual(len(self.chat.document) // 4, chat_demo.DOCUMENT_TOKENS + 50)
        report = chat_demo.report(self.chat.rows)
        for _, question, _ in chat_demo.QUESTIONS:
            self.assertIn(question, report)

    def test_wrong_results_end_it(self):
        none = {"host": 0, "ssd": 0, "device": 0}
        for changes, message in (({"hit_tokens": {**none, "ssd": 5}}, "expected hits from nowhere"),
                                 ({"computed_tokens": 7}, "do not add up"),
                                 ({"kl": 0.31}, "KL 0.31"), ({"kl": float("nan")}, "KL nan"),
                                 ({"text": "I do not know."}, "BF16 finds the pass key")):
            with self.subTest(message):
                self.setUp()
                self.demo.changes = changes
                with self.assertRaisesRegex(chat_demo.ChatError, message):
                    self.chat.run([])
                self.assertEqual(self.demo.crumbd.calls[-1], "stop")

    def test_a_second_turn_without_hits_is_wrong(self):
        self.demo.changes = {"hit_tokens": {"host": 0, "ssd": 0}}
        with self.assertRaisesRegex(chat_demo.ChatError, "expected hits from host, got none"):
            self.chat.run([])

    def test_what_bf16_does_not_find_is_not_asked_of_int2(self):
        self.demo.exact_text = "I do not know."
        self.demo.changes = {"text": "Neither do I."}
        self.chat.run([])

    def test_a_failed_calibration_ends_it(self):
        (self.demo.model / "demo.rotation").unlink()
        with self.assertRaisesRegex(chat_demo.ChatError, "calibration failed"):
            self.chat.run([])

    def test_the_model_is_imported_once(self):
        folder = self.demo.folder / "model"
        package, chat_demo.PACKAGE = chat_demo.PACKAGE, "a_package_that_is_not_there"
        self.addCleanup(setattr, chat_demo, "PACKAGE", package)
        with self.assertRaisesRegex(chat_demo.ChatError, "pip install"):
            chat_demo.model_folder(ROOT, folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        self.assertEqual(chat_demo.model_folder(ROOT, folder), folder)


if __name__ == "__main__":
    unittest.main()
