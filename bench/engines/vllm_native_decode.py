#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Decode throughput of vLLM on a GPU with its own caches and with Crumb's attention backend:
vllm_native_decode.py [--python PYTHON] [--batch N] [--tokens N] [--json FILE]

Runs a model of Qwen3-4B's shapes with random weights (times do not depend on the values) in one
engine after the other, each with default settings (compiled, CUDA graphs) and a pool of the size
that it needs:

  bf16   vLLM's choice of a backend, BF16 cache
  fp8    the same with --kv-cache-dtype fp8
  crumb  --attention-backend CUSTOM

Every engine computes the batch's prompts once, which fills its prefix cache; then the batch is
generated with 1 token and with N, in turns. A rate is that of the tokens between. request_bytes is
the size of a request of this length in the engine's pool: the pool's bytes times the length, over
the tokens that vLLM says the pool has room for. attention names the backend that vLLM chose, with
the version of FlashAttention.
"""

import argparse
import functools
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/engines", "bench", "bench/engines")]
import run_facts  # noqa: E402
from engine_process import Engine  # noqa: E402
from vllm_ttft import MODEL  # noqa: E402

KINDS = {"bf16": {}, "fp8": {"kv_cache_dtype": "fp8"}, "crumb": {"attention_backend": "CUSTOM"}}
BLOCK_TOKENS = 64  # tokens of an INT2 block
FREE_TOKENS = 32 * 1024  # room in the pool beside the batch, for blocks that it computes again


@functools.lru_cache
def geometry_of(python):
    """Bytes of an INT2 tile (64 tokens of a KV head), and blocks that a request has beside its
    history."""
    program = ("import json\n"
               "from crumb.vllm_native.model import geometry_of\n"
               f"geometry = geometry_of({MODEL['head_dim']})\n"
               "print(json.dumps([geometry.tile_bytes, geometry.sink_blocks +"
               " geometry.recent_blocks]))")
    return json.loads(subprocess.run([python, "-c", program], capture_output=True, text=True,
                                     check=True).stdout)


def pool_bytes(options, kind):
    """A pool with room for the batch and FREE_TOKENS."""
    tile_bytes, row_blocks = geometry_of(options.python)
    own = BLOCK_TOKENS * row_blocks if kind == "crumb" else 0
    row = 2 * MODEL["head_dim"]  # elements of K and V
    token = {"bf16": 2 * row, "fp8": row, "crumb": tile_bytes // BLOCK_TOKENS}[kind]
    return ((options.batch * (options.tokens + own) + FREE_TOKENS) * token *
            MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"])


def start(options, kind, model):
    return Engine(options.python, model, None, {
        **KINDS[kind], "enforce_eager": False, "load_format": "dummy", "skip_tokenizer_init": True,
        "max_model_len": options.tokens, "max_num_seqs": max(2, options.batch),
        "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.3,  # checked at the start only
        "kv_cache_memory_bytes": pool_bytes(options, kind)}, ready=False)


def measure(options, kind, engine, prompts):
    """The row of one engine, while others wait."""
    about, steps, pool = engine.ready(), options.steps, pool_bytes(options, kind)
    capacity = about.get("cache_tokens")
    engine.request(batch=[[5] * 600] * 2, max_tokens=4)  # compiles the kernels of the first requests
    prefill = engine.request(batch=prompts, max_tokens=1)["seconds"]
    rates = []
    for _ in range(options.rounds):
        one = engine.request(batch=prompts, max_tokens=1)
        many = engine.request(batch=prompts, max_tokens=1 + steps)
        rates.append(len(prompts) * steps / (many["seconds"] - one["seconds"]))
    return {"kind": kind, "batch": len(prompts), "context": options.tokens, "steps": steps,
            "prefill_tokens_per_s": round(sum(map(len, prompts)) / prefill),
            "cached": many["cached"][0], "blocks": about.get("blocks"),
            "cache_tokens": capacity, "pool_bytes": pool,
            "request_bytes": round(pool * options.tokens / capacity) if capacity else None,
            "attention": about["attention"],
            "tokens_per_s": [round(rate, 1) for rate in rates],
            "tokens_per_s_median": round(statistics.median(rates), 1),
            "ms_per_step": round(1e3 * len(prompts) / statistics.median(rates), 3)}


def run_together(options, kinds, model, prompts):
    """Rows of engines that share the GPU's memory, measured one after the other."""
    engines, rows = {kind: start(options, kind, model) for kind in kinds}, []
    for kind, engine in engines.items():
        try:
            rows.append(measure(options, kind, engine, prompts))
        except AssertionError as error:  # the engine did not start
            rows.append({"kind": kind, "error": str(error)[-2000:]})
        print(json.dumps(rows[-1]), flush=True)
    for engine in engines.values():
        engine.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="imports vLLM and crumb")
    parser.add_argument("--kinds", default=",".join(KINDS),
                        help="in this order; those joined by + start at once and share the GPU")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a request at the end")
    parser.add_argument("--steps", type=int, default=128, help="timed tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="", help="name of the measured commit")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    chosen = random.Random(7)
    prompts = [[chosen.randrange(1000, 150000) for _ in range(options.tokens - options.steps - 2)]
               for _ in range(options.batch)]
    of_run = run_facts.of_run("cuda", ["vllm", "torch"], commit_name=options.commit,
                              python=options.python)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        for kinds in options.kinds.split(","):
            rows += run_together(options, kinds.split("+"), model, prompts)
            if options.json:
                pathlib.Path(options.json).write_text(
                    json.dumps({"bench": "vllm_native_decode", **of_run, "rows": rows},
                               indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
