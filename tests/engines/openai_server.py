# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server in a process group of its own, and a client that streams."""

import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

START_SECONDS = 1200
REQUEST_SECONDS = 300
STOP_SECONDS = 60
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def connector(**config):
    """The value of --kv-transfer-config."""
    return json.dumps({"kv_connector": "CrumbConnector", "kv_connector_module_path": "crumb.vllm",
                       "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                       "kv_connector_extra_config": config})


class OpenAiServer:
    """A server of one model on a free port of 127.0.0.1, which is ready when this returns."""

    def __init__(self, python, model, *flags, environment=None):
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))
            self.port = place.getsockname()[1]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
             "--served-model-name", "small", "--host", "127.0.0.1", "--port", str(self.port),
             "--dtype", "bfloat16", "--enforce-eager", "--enable-prompt-tokens-details",
             *map(str, flags)],
            stdout=self.log, stderr=self.log, process_group=0,
            env={**(environment or os.environ), **ENVIRONMENT})
        deadline = time.monotonic() + START_SECONDS
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                log = self.tail()
                self.stop()
                raise AssertionError(f"the server did not start:\n{log}")
            time.sleep(0.5)

    def healthy(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def tail(self):
        self.log.seek(0)
        return self.log.read()[-6000:]

    def metrics(self):
        """The counters and gauges of vLLM and Crumb: name -> sum over labels."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        values = {}
        for line in lines:
            if line.startswith("vllm:"):
                name = line.split("{")[0].split(" ")[0]
                values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return values

    def choose(self, tokens, max_tokens):
        """Generates greedily; returns {"tokens": [...], "margins": [...]}: by how much each token
        was more likely than the next one, as logarithms."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(
                {"model": "small", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0,
                 "ignore_eos": True, "logprobs": 2, "return_tokens_as_token_ids": True}).encode(),
            {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            found = json.loads(response.read())["choices"][0]["logprobs"]
        best = [sorted(step.values(), reverse=True) for step in found["top_logprobs"]]
        return {"tokens": [int(token.removeprefix("token_id:")) for token in found["tokens"]],
                "margins": [step[0] - step[1] for step in best]}

    def stream(self, tokens, max_tokens, chunks_max=None):
        """Streams a completion; returns (text, prompt tokens that were cached). With chunks_max the
        connection is closed after so many chunks, and the second value is None."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
        try:
            connection.request("POST", "/v1/completions", json.dumps(
                {"model": "small", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0,
                 "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}),
                {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            text, cached, chunks = "", None, 0
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                chunk = json.loads(line[len(b"data: "):])
                text += "".join(choice["text"] for choice in chunk["choices"])
                if chunk.get("usage"):
                    details = chunk["usage"].get("prompt_tokens_details") or {}
                    cached = details.get("cached_tokens") or 0
                chunks += 1
                if chunks == chunks_max:
                    return text, None
            return text, cached
        finally:
            connection.close()

    def stop(self):
        """Ends the server and the processes that it has started."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own group
        except ProcessLookupError:
            pass
        self.process.wait()
        self.log.close()
