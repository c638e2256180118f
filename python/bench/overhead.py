#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Time that Python adds to a decode call: append and attend of one layer.

    python3 python/bench/overhead.py [--json]

The sequence is the smallest there is (one layer, one KV head of 64, one token held), so that nearly
all of a call is Python, ctypes and the C interface. "arithmetic" is the time of the same two calls
with addresses at hand, which is what no wrapper can go below. Prints microseconds of processor
time of an append and an attend together: the least and the median of several runs.
"""

import argparse
import json
import platform
import statistics
import sys
import time

import crumb
from crumb import _library

RUNS, CALLS = 15, 2000


def measure(call):
    """Microseconds of processor time of one call: least and median of RUNS runs of CALLS calls."""
    times = []
    for _ in range(RUNS):
        begin = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time_ns() - begin) / CALLS / 1000)
    return {"least": round(min(times), 2), "median": round(statistics.median(times), 2)}


def pairs(worker, kind):
    """A sequence that holds one token, rows of the next one, and an output."""
    sequence = worker.begin([1])
    one = [kind("rows") for _ in range(3)]
    sequence.append(0, one[0], one[1])
    sequence.advance([1])
    out = kind("out")
    return sequence, one, out


def methods(worker, kind):
    sequence, (k, v, q), out = pairs(worker, kind)

    def call():
        sequence.append(0, k, v)
        sequence.attend(0, q, out)
        sequence.advance(())

    def drop():
        sequence.advance(())

    return call, drop


def addresses(worker, kind):
    sequence, (k, v, q), out = pairs(worker, kind)
    places = [t.__array_interface__["data"][0] for t in (k, v, q, out)]
    append, attend = _library.c.crumb_sequence_append, _library.c.crumb_sequence_attend
    handle = sequence._handle

    def call():
        append(handle, 0, 1, places[0], places[1])
        attend(handle, 0, 1, places[2], places[3])
        sequence.advance(())

    def drop():
        sequence.advance(())

    call.held = (sequence, k, v, q, out)
    return call, drop


def operators(worker, kind):
    import torch
    import crumb.ops
    sequence, (k, v, q), _ = pairs(worker, kind)
    handle = crumb.ops.register(sequence)

    def call():
        torch.ops.crumb.attend(handle, 0, q, torch.ops.crumb.append(handle, 0, k, v))
        sequence.advance(())

    def drop():
        sequence.advance(())

    return call, drop


def cases():
    try:
        import numpy as np
        make = {"rows": lambda: np.zeros((1, 1, 64), "uint16"),
                "out": lambda: np.zeros((1, 1, 64), "float32")}
        yield "arithmetic", addresses, lambda what: make[what]()
        yield "numpy", methods, lambda what: make[what]()
    except ImportError:
        pass
    try:
        import torch
        tensors = {"rows": lambda: torch.zeros(1, 1, 64, dtype=torch.bfloat16),
                   "out": lambda: torch.zeros(1, 1, 64)}
        yield "torch", methods, lambda what: tensors[what]()
        yield "torch operators", operators, lambda what: tensors[what]()
    except ImportError:
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = crumb.Model("overhead", "1", layers=1, kv_heads=1, q_heads=1, head_dim=64)
    results = {}
    with crumb.Worker(None, model) as worker:
        for name, make, kind in cases():
            call, drop = make(worker, kind)
            # An advance of no tokens takes the pass back; its own time is taken off.
            both, alone = measure(call), measure(drop)
            results[name] = {key: round(both[key] - alone[key], 2) for key in both}
    if options.json:
        json.dump({"python": platform.python_version(), "machine": platform.machine(),
                   "unit": "us per append and attend", "results": results}, sys.stdout, indent=1)
        print()
        return
    for name, times in results.items():
        print(f"{name:16} least {times['least']:6.2f} us   median {times['median']:6.2f} us")


if __name__ == "__main__":
    main()
