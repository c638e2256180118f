#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Times torch's scaled-dot-product attention on dense BF16 KV.

For the prefill rows of crumb-kernel-bench: fresh tokens over a dense BF16 prefix, and causally over
themselves. The prefix and the causal part are timed apart and added; merging the two is left out,
in the library's favour. With --decode, for the bf16 rows of crumb-decode-bench: one token of each
sequence over --context tokens, a CUDA graph of several layers, time of one layer. Run it in the
same minutes on the same GPU as the program it is compared with; with --bench it runs
crumb-kernel-bench's prefill rows itself, before and after its own, so that one file has both.

  python3 bench/kernels/baseline.py [--heads 32] [--kv-heads 8] [--dim 64 128 256] [--json]
      [--bench build/release/bin/crumb-kernel-bench [--commit HASH]]
  python3 bench/kernels/baseline.py --decode 1,4 [--context 102367] [--json]
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def median_us(call, repeats=5):
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def attention_us(backend, heads, kv_heads, dim, queries, keys, causal):
    q, k, v = (torch.randn(1, h, n, dim, device="cuda", dtype=torch.bfloat16)
               for h, n in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(backend):
        try:
            return median_us(lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=True))
        except RuntimeError:  # no grouped heads in this backend
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            return median_us(lambda: sdpa(q, k, v, is_causal=causal))


def decode_us(backend, heads, kv_heads, dim, batch, context):
    layers = max(1, min(20, int(8e9 / (4 * batch * kv_heads * context * dim))))
    q = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
    keys = [torch.randn(2, batch, kv_heads, context, dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(layers)]

    def step():
        for k, v in keys:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with sdpa_kernel(backend):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()  # plans are made outside the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
    return median_us(graph.replay) / layers


LIBRARIES = (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION))


def driver_version():
    try:
        lines = subprocess.run(["nvidia-smi", "--query-gpu=driver_version",
                                "--format=csv,noheader"],
                               check=True, capture_output=True, text=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0] if lines else None


def environment():
    return {"device": torch.cuda.get_device_name(), "driver": driver_version(),
            "cuda": torch.version.cuda, "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(), "command": shlex.join(["python3"] + sys.argv)}


def print_json(head, rows):
    """One object, a line for each row."""
    print("{" + ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()) + ",")
    print(' "rows": [\n  ' + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]}")


def decode(a):
    rows = []
    for name, backend in LIBRARIES:
        for batch in (int(b) for b in a.decode.split(",")):
            us = decode_us(backend, a.heads, a.kv_heads, a.dim[0], batch, a.context)
            size = 4 * batch * a.kv_heads * a.context * a.dim[0]
            rows.append({"library": name, "query_heads": a.heads, "kv_heads": a.kv_heads,
                         "batch": batch, "context": a.context, "us": us,
                         "tbps": size / us * 1e-6})
            if not a.json:
                print(f"{name} batch {batch} over {a.context}: {us:.1f} us a layer, "
                      f"{size / us * 1e-6:.2f} TB/s", flush=True)
    if a.json:
        print_json(environment(), rows)


def crumb_prefill(a, when):
    """crumb-kernel-bench's prefill rows, as baseline rows are."""
    command = [a.bench, "--kernel", "prefill", "--json"]
    if a.commit:
        command += ["--commit", a.commit]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [{"library": "crumb", "when": when, "commit": result["commit"]} | row
            for row in result["rows"]]


def prefill(a):
    rows = crumb_prefill(a, "before") if a.bench else []
    for name, backend in LIBRARIES:
        for dim, fresh, cached in [(dim, 4096, cached) for dim in a.dim for cached in (32768, 102400)]:
            prefix = attention_us(backend, a.heads, a.kv_heads, dim, fresh, cached, False)
            own = attention_us(backend, a.heads, a.kv_heads, dim, fresh, fresh, True)
            flop = 4 * dim * a.heads * fresh * (cached + fresh / 2)
            rows.append({"library": name, "rows_type": "bf16", "query_heads": a.heads,
                         "kv_heads": a.kv_heads, "head_dim": dim, "fresh": fresh,
                         "cached": cached, "us": round(prefix + own, 1),
                         "prefix_us": round(prefix, 1), "causal_us": round(own, 1),
                         "tflops": round(flop / (prefix + own) * 1e-6, 1)})
    if a.bench:
        rows += crumb_prefill(a, "after")
    if a.json:
        print_json(environment(), rows)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"cuDNN {torch.backends.cudnn.version()}")
    for row in rows:
        print(f"{row['library']} {row.get('name', row['head_dim'])} {row['fresh']} over {row['cached']}: "
              f"{row['us']:.0f} us, {row['tflops']:.0f} TFLOPS")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, nargs="+", default=[128],
                        help="head_dims of prefill; decode takes the first")
    parser.add_argument("--decode", help="batches of decode attention, instead of prefill")
    parser.add_argument("--context", type=int, default=102367)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--bench", help="prefill: the crumb-kernel-bench to run beside")
    parser.add_argument("--commit", help="that crumb-kernel-bench was built from")
    a = parser.parse_args()
    if a.decode:
        decode(a)
    else:
        prefill(a)


if __name__ == "__main__":
    main()
