#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Times the parts of a transfer of pages between crumbd and a paged cache on a GPU:
transfer_speed.py [--pages N] [--history int2,bf16] [--json FILE]

The cache has the shape of Qwen3-4B's in vLLM (36 layers, 8 KV heads, head_dim 128, blocks of 16
tokens, token-major) and random rows. No engine takes part. Rows of output, in milliseconds:

  copy   a copy from pinned host memory to the device, the bound of a load, in GB/s
  store  enqueue: the host's time; device: the engine's stream until work behind the store may run;
         publish: from the end of the call until other processes hit the pages
  load   fetch: until the pages are checked and leased to this process; enqueue: the host's time;
         device: on the stream of the load; all: from the call to the last row

`percent` is the bandwidth of a load (stored bytes over `all`) as a fraction of the copy's bandwidth.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import crumb
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/deploy"), str(ROOT / "bench")]
import run_facts  # noqa: E402
from services import Crumbd  # noqa: E402

LAYERS, HEADS, DIM, BLOCK = 36, 8, 128, 16
TILE_BYTES = {"int2": 64 * 72, "bf16": 64 * 512}
CONNECTED_SECONDS = 30
PINNED_SECONDS = 60  # bound on the time until crumbd's memory is pinned


def milliseconds(seconds):
    return round(1e3 * seconds, 2)


class Cache:
    """A paged cache and the block table of one sequence in it."""

    def __init__(self, pages):
        blocks = 64 * pages // BLOCK
        self.table = torch.randperm(blocks).tolist()
        shape = (blocks, BLOCK, HEADS, 2 * DIM)
        self.layers = [torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                       for _ in range(LAYERS)]

    def view(self):
        rows = [layer.permute(0, 2, 1, 3) for layer in self.layers]
        return crumb.PagedCache([(crumb.PagedRows.of(layer[..., :DIM]),
                                  crumb.PagedRows.of(layer[..., DIM:])) for layer in rows],
                                self.layers[0].shape[0], BLOCK)


class Span:
    """Time of work on a stream."""

    def __init__(self, stream):
        self.stream = stream
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.begin.record(stream)

    def seconds(self):
        self.end.record(self.stream)
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3


class Bench:
    def __init__(self, options, client):
        self.options, self.client = options, client
        self.rows = []
        self.stream = torch.cuda.Stream()
        self.copy_gbs = 0.0

    def row(self, **row):
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def copy(self):
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        device = torch.empty_like(host, device="cuda")
        rates = []
        for _ in range(5):
            span = Span(self.stream)
            with torch.cuda.stream(self.stream):
                device.copy_(host, non_blocking=True)
            rates.append((1 << 30) / span.seconds() / 1e9)
        self.copy_gbs = statistics.median(rates)
        self.row(op="copy", gb_per_s=round(self.copy_gbs, 1))

    def history(self, history):
        pages = self.options.pages
        bytes_stored = LAYERS * HEADS * (TILE_BYTES["bf16"] +
                                         (pages - 1) * TILE_BYTES[history])
        model = crumb.Model("made-up", history, layers=LAYERS, kv_heads=HEADS, q_heads=32,
                            head_dim=DIM, history=history)
        cache = Cache(pages)
        with crumb.Transfer(self.client, model) as transfer:
            transfer.use_cache(cache.view(), bytes_stored + (64 << 20))
            keyspace = transfer.keyspace()
            for number in range(self.options.rounds):
                tokens = [(number * 7919 + i * 104729) % 150000 for i in range(64 * pages)]
                keys = transfer.keys(keyspace, tokens)
                self.store(transfer, keyspace, keys, cache, history)
            deadline = time.monotonic() + PINNED_SECONDS
            for number in range(2 * self.options.rounds):
                seconds = self.load(transfer, keyspace, keys, cache, history, bytes_stored, number)
                if seconds * self.copy_gbs * 1e9 > 4 * bytes_stored and (
                        time.monotonic() < deadline):
                    time.sleep(1.0)  # memory that is not pinned yet is copied by the host

    def store(self, transfer, keyspace, keys, cache, history):
        torch.cuda.synchronize()
        span, begin = Span(self.stream), time.monotonic()
        for first in range(0, len(keys), 64):
            parent = keys[first - 1] if first else bytes(32)
            with transfer.store(keyspace, keys[first:first + 64], first, cache.table,
                                parent) as store:
                store.enqueue(self.stream.cuda_stream)
                store.finish()
        enqueued = time.monotonic()
        device = span.seconds()
        transfer.wait_published(60)
        self.row(op="store", history=history, pages=len(keys),
                 enqueue_ms=milliseconds(enqueued - begin), device_ms=milliseconds(device),
                 publish_ms=milliseconds(time.monotonic() - enqueued))

    def load(self, transfer, keyspace, keys, cache, history, stored, number):
        torch.cuda.synchronize()
        with transfer.acquire(keyspace, keys, 5.0) as lease:
            begin = time.monotonic()
            with transfer.load(lease.token, keys, 0, lease.pages, cache.table, 5.0) as load:
                fetched = time.monotonic()
                span = Span(self.stream)
                load.enqueue(self.stream.cuda_stream)
                enqueued = time.monotonic()
                load.wait()
                end = time.monotonic()
                self.row(op="load", history=history, number=number, pages=load.pages,
                         fetch_ms=milliseconds(fetched - begin),
                         enqueue_ms=milliseconds(enqueued - fetched),
                         device_ms=milliseconds(span.seconds()), all_ms=milliseconds(end - begin),
                         percent=round(100 * stored / (end - begin) / 1e9 / self.copy_gbs, 1))
        return end - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--history", default="int2,bf16")
    parser.add_argument("--commit", default="", help="name of the measured commit")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    of_run = run_facts.of_run("cuda", ["torch"], commit_name=options.commit)
    with tempfile.TemporaryDirectory() as folder:
        crumbd = Crumbd(pathlib.Path(crumb.path_of("crumbd")).parent, folder, host_bytes="20GiB",
                        slab_bytes="1GiB", ssd_bytes="1GiB",
                        extra="sessions:\n  staging_bytes_max: 1GiB\n")
        crumbd.start()
        try:
            with crumb.Client(folder) as client:
                client.wait_connected(CONNECTED_SECONDS)
                bench = Bench(options, client)
                bench.copy()
                for history in options.history.split(","):
                    bench.history(history)
        finally:
            crumbd.stop()
    if options.json:
        report = {"bench": "transfer_speed", **of_run, "rows": bench.rows}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n",
                                              encoding="utf-8")


if __name__ == "__main__":
    main()
