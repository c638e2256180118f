#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Tests the files of examples/ against crumbd and against deploy/k8s: examples_test.py --bin DIR

tests/engines/vllm_serve_test.py runs the program of examples/vllm against vLLM.
"""

import argparse
import http.server
import json
import pathlib
import re
import subprocess
import sys
import threading
import unittest

import yaml

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import kustomize
from services import ROOT

OPTIONS = argparse.Namespace()
VLLM = ROOT / "examples/vllm"
K8S = ROOT / "deploy/k8s/overlays"


def crumbd(*arguments):
    return subprocess.run([OPTIONS.bin / "crumbd", *arguments], capture_output=True, text=True,
                          timeout=60, check=False)


def flags(arguments):
    """--name=value as a dictionary."""
    return dict(argument.removeprefix("--").split("=", 1) for argument in arguments)


def engine_of(overlay):
    """vLLM's container in an overlay of deploy/k8s."""
    documents = kustomize.render(K8S / overlay)
    return documents["Deployment", "worker"]["spec"]["template"]["spec"]["containers"][0]


class Completions(http.server.BaseHTTPRequestHandler):
    """Streams as vLLM does. The second request of a prompt's beginning hits."""

    requests = []

    def log_message(self, *unused):
        pass

    def do_GET(self):
        self.send(b'{"data": [{"id": "small"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        cached = 64 if len(self.requests) > 1 else 0
        chunks = [{"choices": [{"text": text}]} for text in (" A", " text")]
        chunks.append({"choices": [], "usage": {
            "prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": cached}}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        self.send("".join(lines).encode())

    def send(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class ExamplesTest(unittest.TestCase):
    def setUp(self):
        self.compose = yaml.safe_load((VLLM / "compose.yaml").read_text())
        self.crumbd, self.vllm = (self.compose["services"][name] for name in ("crumbd", "vllm"))

    def mounts(self, service):
        """Folder or file of the container -> volume or file of the machine."""
        return {entry.split(":")[1]: entry.split(":")[0] for entry in service["volumes"]}

    def test_crumbd_takes_its_flags_and_configuration(self):
        known = set(re.findall(r"--[a-z-]+", crumbd("--help").stdout))
        given = [argument for argument in self.crumbd["command"] if argument.startswith("--")]
        self.assertLessEqual(set(given), known)
        place = self.crumbd["command"][self.crumbd["command"].index("--config") + 1]
        file = VLLM / self.mounts(self.crumbd)[place]
        done = crumbd("--config", file, "--check-config")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_the_services_find_each_other(self):
        done = crumbd("--config", VLLM / "crumbd.yaml", "--print-config")
        settings = yaml.safe_load(done.stdout)
        socket_dir, ssd = settings["listen"]["socket_dir"], settings["store"]["ssd"]["path"]
        transfer = json.loads(flags(self.vllm["command"])["kv-transfer-config"])
        self.assertEqual(transfer["kv_connector_extra_config"]["socket_dir"], socket_dir)
        self.assertEqual(self.mounts(self.vllm)[socket_dir], self.mounts(self.crumbd)[socket_dir])
        self.assertTrue(any(ssd.startswith(f"{folder}/") for folder in self.mounts(self.crumbd)))
        named = {place for service in (self.crumbd, self.vllm)
                 for place in self.mounts(service).values() if not place.startswith(".")}
        self.assertEqual(named, set(self.compose["volumes"]))
        for service, port in ((self.crumbd, settings["admin"]["listen"].rpartition(":")[2]),
                              (self.vllm, flags(self.vllm["command"])["port"])):
            self.assertEqual(service["ports"], [f"127.0.0.1:{port}:{port}"])
        grace = int(re.fullmatch(r"(\d+)s", settings["stop_grace"])[1])
        self.assertGreater(int(self.crumbd["stop_grace_period"].removesuffix("s")), 2 * grace)

    def test_the_flags_are_those_of_the_overlay(self):
        engine = engine_of("vllm")
        ours, theirs = flags(self.vllm["command"]), flags(engine["args"])
        self.assertEqual(set(ours), set(theirs))
        self.assertEqual(json.loads(ours["kv-transfer-config"]),
                         json.loads(theirs["kv-transfer-config"]))
        self.assertEqual(self.vllm["image"], engine["image"])

    def test_the_native_overlay_has_the_flag_of_the_backend(self):
        native, transfer = engine_of("vllm-native"), engine_of("vllm")
        ours, theirs = flags(native["args"]), flags(transfer["args"])
        self.assertEqual(ours.pop("attention-backend"), "CUSTOM")
        del theirs["kv-transfer-config"]
        self.assertEqual((ours, native["image"]), (theirs, transfer["image"]))
        # vLLM finds the backend by an entry point of the wheel that is in the image.
        project = (ROOT / "python/pyproject.toml").read_text()
        self.assertIn('entry-points."vllm.general_plugins"', project)

    def test_the_program_shows_hits(self):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Completions)
        self.addCleanup(server.server_close)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.shutdown)
        done = subprocess.run(
            [sys.executable, VLLM / "prefix_hits.py", "--url",
             f"http://127.0.0.1:{server.server_port}", "--document", ROOT / "README.md"],
            capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(re.findall(r"; (\d+ of \d+) tokens", done.stdout),
                         ["0 of 100", "64 of 100"])
        self.assertEqual(done.stdout.count("\n  A text\n"), 2)
        first, second = (request["prompt"] for request in Completions.requests)
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        self.assertTrue(first.startswith(readme) and second.startswith(readme) and first != second)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin")
    _, rest = parser.parse_known_args(namespace=OPTIONS)
    unittest.main(argv=[sys.argv[0], *rest])
