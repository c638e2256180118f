#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server with CrumbConnector, as people run it, and a client that streams:
vllm_serve_test.py --build DIR

The servers run on the CPU with the project's small model. Their own prefix caching is off, so that
every hit comes from crumbd. Pages are exact (BF16), so that a hit has to give the completion of
a computed prompt. Needs build/engines (tests/engines/install.sh); exit code 77 without it.
"""

import argparse
import concurrent.futures
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests/deploy")]
from engine_process import flush, package_environment, run_tests  # noqa: E402
from openai_server import OpenAiServer, connector  # noqa: E402
from services import Crumbd, wait_for  # noqa: E402
from vllm_native_cases import sure_tokens  # noqa: E402

OPTIONS = argparse.Namespace()
VENV = ROOT / "build/engines/venv"
PROMPT_TOKENS, COMPLETION_TOKENS = 1100, 24
CACHED = 1024  # cached tokens of such a prompt, in blocks of 128
# Blocks of 128 tokens in the server's cache: three prompts take nine each, and ten with the 53rd token
# behind them, which do not fit.
BLOCKS, LONG_TOKENS = 28, 120
REQUESTS = (20, 22, 26)  # prompts; the model is sure of all tokens behind two of them
PUBLISHED_SECONDS = 60
COMPARED_MIN = 200  # sure tokens of preempted requests


def prompt(number):
    """Another prompt for each number."""
    return [(i * 7919 + i // 64 * 31 + number * 977) % 4000 + 8 for i in range(PROMPT_TOKENS)]


class VllmServeTest(unittest.TestCase):
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

    def setUp(self):
        self.sockets = tempfile.mkdtemp(dir=self.folder)
        self.crumbd = Crumbd(pathlib.Path(OPTIONS.build) / "bin", self.sockets)
        self.addCleanup(self.crumbd.stop)
        self.crumbd.start()

    def serve(self, *flags, **config):
        server = OpenAiServer(VENV / "bin/python", self.model, "--no-enable-prefix-caching",
                              "--max-model-len", 2048, "--kv-transfer-config",
                              connector(socket_dir=self.sockets, load="always", deadline=5,
                                        history="bf16", **config),
                              *flags, environment=self.environment)
        self.addCleanup(server.stop)
        return server

    def hit(self, server, tokens, cached=CACHED):
        """Streams until `cached` tokens are hits: pages are published in the background."""
        found = []

        def again():
            found[:] = server.stream(tokens, COMPLETION_TOKENS)
            return found[1] >= cached

        wait_for(f"a hit of {cached} tokens", again, PUBLISHED_SECONDS)
        return tuple(found)

    def warm(self, server):
        """Completions of prompts 0 and 1, which the server computes and stores."""
        texts = []
        for number in range(2):
            text, cached = server.stream(prompt(number), COMPLETION_TOKENS)
            self.assertEqual(cached, 0)
            self.assertEqual(self.hit(server, prompt(number)), (text, CACHED))
            texts.append(text)
        self.assertNotEqual(*texts)
        return texts

    def check_metrics(self, server):
        values = server.metrics()
        self.assertGreaterEqual(values["vllm:crumb_stored_pages_total"], 2 * PROMPT_TOKENS // 64)
        self.assertGreaterEqual(values["vllm:crumb_loaded_pages_total"], 2 * CACHED // 64)
        self.assertEqual(values["vllm:crumb_failed_pages_total"], 0)
        self.assertEqual(values["vllm:crumb_refused_stores_total"], 0)
        self.assertGreater(values["vllm:crumb_store_seconds_total"], 0)
        self.assertGreater(values["vllm:crumb_load_seconds_total"], 0)
        self.assertGreaterEqual(values["vllm:external_prefix_cache_hits_total"], 2 * CACHED)

    def check_abort(self, server, expected):
        """A client that goes away during its completion, and one during its load, leave nothing."""
        for tokens in (prompt(7), prompt(0)):
            server.stream(tokens, LONG_TOKENS, chunks_max=2)
        wait_for("aborted requests", lambda: server.metrics()["vllm:num_requests_running"] == 0)
        self.assertEqual(server.stream(prompt(0), COMPLETION_TOKENS), (expected, CACHED))

    def check_preemption(self, server):
        """The cache is too small for all requests: some are preempted, and complete as alone, up to
        the first token that is as likely as another one but for rounding, which depends on the
        other requests in a batch."""
        prompts = [prompt(number) for number in REQUESTS]
        alone = [server.choose(tokens, LONG_TOKENS) for tokens in prompts]
        before = server.metrics()["vllm:num_preemptions_total"]
        with concurrent.futures.ThreadPoolExecutor(len(REQUESTS)) as threads:
            together = list(threads.map(lambda tokens: server.choose(tokens, LONG_TOKENS), prompts))
        self.assertGreater(server.metrics()["vllm:num_preemptions_total"], before)
        compared = 0
        for expected, found in zip(alone, together):
            sure = sure_tokens(expected)
            compared += sure
            same = next((i for i, pair in enumerate(zip(expected["tokens"], found["tokens"]))
                         if pair[0] != pair[1]), LONG_TOKENS)
            print(f"preemption: {same} of {LONG_TOKENS} tokens are those of the request alone, of "
                  f"which {sure} are sure; margin of the next one "
                  f"{(expected['margins'] + [0.0])[same]:.4f}", flush=True)
            self.assertEqual(found["tokens"][:sure], expected["tokens"][:sure])
        self.assertGreaterEqual(compared, COMPARED_MIN)

    def run_example(self, server):
        """examples/vllm/prefix_hits.py, whose second prompt is a hit once pages are published."""
        document = self.folder / "document.md"
        document.write_text((ROOT / "docs/engines/vllm.md").read_text(encoding="utf-8")[:3000])

        def hits():
            done = subprocess.run(
                [sys.executable, ROOT / "examples/vllm/prefix_hits.py", "--url",
                 f"http://127.0.0.1:{server.port}", "--document", document, "--max-tokens", "4"],
                capture_output=True, text=True, timeout=120, check=True)
            return [int(count) for count in re.findall(r"; (\d+) of \d+ tokens", done.stdout)]

        wait_for("hits of the example", lambda: hits()[1] > 0, PUBLISHED_SECONDS)

    def crumbd_metric(self, name):
        """The value of a metric of crumbd."""
        for line in self.crumbd.get("/metrics").splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        return 0.0

    def damage(self):
        """Changes bytes all over crumbd's files on its SSD. REQUIRES: crumbd does not run."""
        changed = 0
        for path in sorted(pathlib.Path(self.sockets, "ssd").rglob("*")):
            if path.is_file() and "extent" in path.name:
                content = bytearray(path.read_bytes())
                for place in range(0, len(content), 997):
                    changed += content[place] != 0
                    content[place] ^= 0x55 if content[place] else 0
                path.write_bytes(content)
        self.assertGreater(changed, 0)

    def test_a_new_server_hits_what_another_one_has_computed_after_crumbd_was_killed(self):
        first = self.serve("--num-gpu-blocks-override", BLOCKS)
        texts = self.warm(first)
        self.check_metrics(first)
        self.check_abort(first, texts[0])
        self.check_preemption(first)
        flush(self.environment, self.sockets)
        self.crumbd.process.stop(signal.SIGKILL)
        self.assertEqual(first.stream(prompt(0), COMPLETION_TOKENS), (texts[0], 0))  # goes on
        self.crumbd.start()
        first.stop()

        second = self.serve()
        self.assertEqual(second.stream(prompt(0), COMPLETION_TOKENS), (texts[0], CACHED))
        self.assertEqual(second.metrics()["vllm:crumb_loaded_pages_total"], CACHED // 64)
        self.run_example(second)

        self.crumbd.process.stop(signal.SIGKILL)
        self.damage()
        self.crumbd.start()
        # The processes of the scheduler and of the worker find crumbd again.
        wait_for("sessions", lambda: self.crumbd_metric("crumb_sessions") >= 2)
        text, cached = second.stream(prompt(1), COMPLETION_TOKENS)
        self.assertLess(cached, CACHED)
        self.assertGreater(self.crumbd_metric('crumb_verify_failures_total{where="ssd"}'), 0)
        self.assertEqual(text, texts[1])
        # Pages that were computed again are stored again.
        self.assertEqual(self.hit(second, prompt(1)), (texts[1], CACHED))


if __name__ == "__main__":
    run_tests("vLLM", "engines", "install.sh", OPTIONS, __doc__)
