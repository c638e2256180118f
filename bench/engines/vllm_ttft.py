#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Times to the first token of long prompts in vLLM on a GPU, with and without Crumb:
vllm_ttft.py [--python PYTHON] [--tokens N] [--load auto|always] [--by-layer] [--json FILE]

Runs a model of Qwen3-4B's shapes with random weights (times do not depend on the values) in two
engines: one without connector, one with CrumbConnector, for each format of history. Prompts are
random tokens, each engine's own prefix cache is emptied before each timing, and a time is that of a
request for one token:

  plain      the engine without connector computes the prompt
  cold       the engine with connector computes the prompt, misses, and stores its pages
  warm-host  the pages come from crumbd's memory
  own-cache  the engine's own prefix cache has as many tokens as the hit before, so this is the
             time of a hit whose loading takes none
  warm-ssd   the pages come from SSD: crumbd was killed and started again. With --load auto they
             are waited for at most `deadline` seconds, and not at all once that was slower than
             computing

Decode: tokens per second of a batch whose prompts are in the engine's own prefix cache, without and
with connector in turns. The connector stores the pages that decoding completes.
"""

import argparse
import json
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/engines", "tests/deploy", "bench")]
import run_facts  # noqa: E402
from engine_process import Engine  # noqa: E402
from services import Crumbd  # noqa: E402

MODEL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560,
         "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu",
         "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "bfloat16",
         "bos_token_id": 1, "eos_token_id": 2}
BATCH, CONTEXT, DECODED = 6, 8000, 256  # sizes of the decode measurement
LONG_SECONDS = 120
WARM_UP_TOKENS = 20000  # several prefill steps
PROBE_TOKENS = 1024  # length of a prompt that shows whether crumbd is reached


class Bench:
    def __init__(self, options, folder):
        self.options, self.folder = options, pathlib.Path(folder)
        self.rows = []
        self.of_run = run_facts.of_run("cuda", ["vllm", "torch"], commit_name=options.commit,
                                       python=options.python)
        self.random = random.Random(7)
        self.model = self.folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        programs = subprocess.run(
            [options.python, "-c", "import crumb; print(crumb.path_of('crumbd'))"], check=True,
            capture_output=True, text=True).stdout.strip()
        self.crumb = pathlib.Path(programs).with_name("crumb")
        self.crumbd = Crumbd(pathlib.Path(programs).parent, self.folder, host_bytes="22GiB",
                             slab_bytes="1GiB", ssd_bytes="30GiB",
                             extra="sessions:\n  staging_bytes_max: 1GiB\n")

    def engine(self, config):
        return Engine(self.options.python, self.model, config, {
            "enforce_eager": False, "load_format": "dummy", "skip_tokenizer_init": True,
            "max_model_len": self.options.tokens + 1024, "max_num_seqs": 64,
            "gpu_memory_utilization": 0.25,  # fraction that must be free at the start
            "kv_cache_memory_bytes": int(self.options.cache_gib * 2**30)}, ready=False)

    def prompt(self, tokens):
        return [self.random.randrange(1000, 150000) for _ in range(tokens)]

    def row(self, **row):
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.options.json:
            pathlib.Path(self.options.json).write_text(json.dumps(self.report(), indent=1) + "\n",
                                                       encoding="utf-8")

    def report(self):
        return {"bench": "vllm_ttft", **self.of_run, "rows": self.rows}

    def timed(self, engine, kind, history, prompts):
        """Times of one token for each prompt, in milliseconds."""
        times, cached = [], []
        for prompt in prompts:
            engine.request(reset=True)
            answer = engine.generate(prompt, max_tokens=1)
            times.append(round(1e3 * answer["seconds"], 1))
            cached.append(answer["cached"])
        self.row(op="ttft", kind=kind, history=history, tokens=len(prompts[0]), cached=cached,
                 ms=times, ms_median=statistics.median(times))

    def own_cache(self, engine, history, prompts):
        """Times of prompts whose beginning the engine's own prefix cache has."""
        times, cached = [], []
        for prompt in prompts:
            engine.request(reset=True)
            hit = engine.generate(prompt, max_tokens=1)["cached"]
            other = prompt[:hit] + self.prompt(len(prompt) - hit)
            answer = engine.generate(other, max_tokens=1)
            times.append(round(1e3 * answer["seconds"], 1))
            cached.append(answer["cached"])
        self.row(op="ttft", kind="own-cache", history=history, tokens=len(prompts[0]),
                 cached=cached, ms=times, ms_median=statistics.median(times))

    def stored(self, engine, prompts):
        """Waits until all pages of the prompts are hits and on SSD."""
        deadline = time.monotonic() + LONG_SECONDS
        for prompt in prompts:
            wanted = (len(prompt) - 256) // 64 * 64
            while time.monotonic() < deadline:
                engine.request(reset=True)
                if engine.generate(prompt, max_tokens=1)["cached"] >= wanted:
                    break
        subprocess.run([self.crumb, "--socket-dir", self.folder, "--timeout", str(LONG_SECONDS),
                        "flush"], check=False)

    def ttft(self, engine, history):
        count = self.options.prompts
        prompts = [self.prompt(self.options.tokens) for _ in range(count)]
        probe = self.prompt(PROBE_TOKENS)
        self.timed(engine, "cold", history, prompts)
        engine.generate(probe, max_tokens=1)
        self.stored(engine, [*prompts, probe])
        found = engine.hit(probe, PROBE_TOKENS // 2, max_tokens=1)["cached"]
        self.timed(engine, "warm-host", history, prompts)
        self.timed(engine, "warm-host", history, prompts)
        self.own_cache(engine, history, prompts)
        self.crumbd.stop(signal.SIGKILL)
        self.crumbd.start()
        engine.hit(probe, found, max_tokens=1)  # the clients have connected again
        self.timed(engine, "warm-ssd", history, prompts)

    def decode(self, engines, prompts):
        """Decode throughput, the engines in turns."""
        for engine in engines.values():
            engine.request(reset=True)
            engine.request(batch=prompts, max_tokens=DECODED)
        seconds = {name: [] for name in engines}
        for _ in range(self.options.rounds):
            for name, engine in engines.items():
                first = engine.request(batch=prompts, max_tokens=1)["seconds"]
                whole = engine.request(batch=prompts, max_tokens=DECODED)["seconds"]
                seconds[name].append(whole - first)
        for name, times in seconds.items():
            rates = [BATCH * (DECODED - 1) / value for value in times]
            self.row(op="decode", kind=name, batch=BATCH, context=CONTEXT, steps=DECODED - 1,
                     tokens_per_s=[round(rate, 1) for rate in rates],
                     tokens_per_s_median=round(statistics.median(rates), 1))

    def run(self):
        self.crumbd.start()
        given = {"socket_dir": str(self.folder), "weights": "random", "load": self.options.load,
                 "deadline": 30 if self.options.load == "always" else 0.2,
                 "staging_bytes": 3 << 30, "load_by_layer": self.options.by_layer}
        engines = {"plain": self.engine(None)}
        for history in self.options.history.split(","):
            engines[history] = self.engine({**given, "history": history})
        try:
            for engine in engines.values():
                engine.ready()
            for engine in engines.values():  # compiles and pins for the first requests
                engine.generate(self.prompt(WARM_UP_TOKENS), max_tokens=2)
            prompts = [self.prompt(self.options.tokens) for _ in range(self.options.prompts)]
            self.timed(engines["plain"], "plain", None, prompts)
            for history in self.options.history.split(","):
                self.ttft(engines[history], history)
            self.decode(engines, [self.prompt(CONTEXT) for _ in range(BATCH)])
        finally:
            for name, engine in engines.items():
                tail = [line for line in engine.tail().splitlines() if "crumb" in line.lower()]
                print(name, *tail[-5:], sep="\n  ", flush=True)
                engine.close()
            self.crumbd.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="imports vLLM and crumb")
    parser.add_argument("--tokens", type=int, default=32768, help="length of a prompt")
    parser.add_argument("--prompts", type=int, default=3, help="timings of each kind")
    parser.add_argument("--rounds", type=int, default=4, help="of the decode measurement")
    parser.add_argument("--history", default="int2,bf16", help="formats of history")
    parser.add_argument("--load", default="auto", choices=("auto", "always"))
    parser.add_argument("--by-layer", action="store_true", help="the connector's load_by_layer")
    parser.add_argument("--cache-gib", type=float, default=8, help="KV cache of each engine")
    parser.add_argument("--commit", default="", help="name of the measured commit")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Bench(options, folder).run()


if __name__ == "__main__":
    main()
