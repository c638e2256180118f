#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Times torch's scaled-dot-product attention on dense BF16 KV.

For the prefill rows of crumb-kernel-bench: fresh tokens over a dense BF16 prefix, and causally over
themselves. The prefix and the causal part are timed apart and added; merging the two is left out,
in the library's favour. With --decode, for the bf16 rows of crumb-decode-bench: one token of each
sequence over --context tokens, a CUDA graph of several layers, time of one layer. Run it in the
same session on the same GPU as the program it is compared with.

  python3 bench/kernels/baseline.py [--heads 32] [--kv-heads 8] [--dim 128]
  python3 bench/kernels/baseline.py --decode 1,4 [--context 102367] [--json]
"""

import argparse
import json
import statistics

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


def decode(a):
    rows = []
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION),
                          ("flash", SDPBackend.FLASH_ATTENTION)):
        for batch in (int(b) for b in a.decode.split(",")):
            us = decode_us(backend, a.heads, a.kv_heads, a.dim, batch, a.context)
            size = 4 * batch * a.kv_heads * a.context * a.dim
            rows.append({"library": name, "query_heads": a.heads, "kv_heads": a.kv_heads,
                         "batch": batch, "context": a.context, "us": us,
                         "tbps": size / us * 1e-6})
            if not a.json:
                print(f"{name} batch {batch} over {a.context}: {us:.1f} us a layer, "
                      f"{size / us * 1e-6:.2f} TB/s", flush=True)
    if a.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                          "cudnn": torch.backends.cudnn.version(), "rows": rows}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--decode", help="batches of decode attention, instead of prefill")
    parser.add_argument("--context", type=int, default=102367)
    parser.add_argument("--json", action="store_true", help="with --decode: one JSON object")
    a = parser.parse_args()
    if a.decode:
        decode(a)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"cuDNN {torch.backends.cudnn.version()}")
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION),
                          ("flash", SDPBackend.FLASH_ATTENTION)):
        for fresh, cached in ((4096, 32768), (4096, 102400)):
            prefix = attention_us(backend, a.heads, a.kv_heads, a.dim, fresh, cached, False)
            own = attention_us(backend, a.heads, a.kv_heads, a.dim, fresh, fresh, True)
            flop = 4 * a.dim * a.heads * fresh * (cached + fresh / 2)
            print(f"{name} {fresh} over {cached}: {prefix + own:.0f} us, "
                  f"{flop / (prefix + own) * 1e-6:.0f} TFLOPS", flush=True)


if __name__ == "__main__":
    main()
