#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Time that Python adds to a decode call: append and attend of one layer.

    python3 python/bench/overhead.py [--json]

The sequence is the smallest there is (one layer, one KV head of 64, one token held), so that nearly
all of a call is Python, ctypes and the C interface. "arithmetic" is the time of the same two calls
with addresses at hand, a lower bound of every wrapper. Prints microseconds of processor
time of an append and an attend together: the least and the median of several runs.

"batch" is a Batch's append and attend on their way to a C function that does nothing, with tensors
on the CPU for those of a GPU: all of it is Python and ctypes. On a machine with a GPU, and with a
library that was built with CUDA, a Batch of a GpuWorker follows: its methods, with the launches;
the same with addresses at hand; and the share of Python and ctypes in the first.
"""

import argparse
import ctypes
import json
import pathlib
import platform
import statistics
import sys
import time
from unittest import mock

import crumb
from crumb import _abi, _library, gpu

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import run_facts  # noqa: E402

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


class NoLibrary:
    """Stands for the C library in crumb.gpu: opens handles, and appends and attends nothing."""

    HANDLE = 1 << 32  # abs() of its low half is CRUMB_OK

    def __init__(self):
        for name in ("append", "attend"):
            function = ctypes.CDLL(None)["abs"]
            function.restype, function.argtypes = _abi.FUNCTIONS["crumb_device_batch_" + name]
            setattr(self, "crumb_device_batch_" + name, function)

    def __getattr__(self, name):
        def call(*arguments):
            if name.endswith("_open"):
                arguments[-1]._obj.value = self.HANDLE
            return 0

        return call


def batch_without_library():
    """An append and an attend of a Batch that reach no library."""
    import torch
    model = crumb.Model("overhead", "1", layers=1, kv_heads=8, q_heads=32, head_dim=128)
    k, q = (torch.zeros(1, 1, heads, 128, dtype=torch.bfloat16) for heads in (8, 32))
    out = torch.empty_like(q)
    cpu = torch.device("cpu")
    with mock.patch.object(gpu, "c", NoLibrary()), \
            mock.patch.object(gpu, "torch_device", lambda ordinal: cpu), \
            crumb.GpuWorker(None, model) as worker, worker.batch(stream=0) as batch:
        batch.prepare([])

        def given_output():
            batch.append(0, k, k)
            batch.attend(0, q, out)

        def new_output():
            batch.append(0, k, k)
            batch.attend(0, q)

        return {"batch": measure(given_output), "batch, new output": measure(new_output)}


def batch_times():
    """Microseconds of processor time of an append and an attend of a Batch in a decode pass."""
    import torch
    model = crumb.Model("overhead", "1", layers=1, kv_heads=8, q_heads=32, head_dim=128)
    rows = {heads: torch.zeros(1, 1, heads, 128, dtype=torch.bfloat16, device="cuda")
            for heads in (8, 32)}
    k, q, out = rows[8], rows[32], torch.empty_like(rows[32])
    places = [rows.data_ptr() for rows in (k, k, q, out)]
    c = _library.c
    with crumb.GpuWorker(None, model) as worker, worker.begin([1]) as sequence, \
            worker.batch(prompts=True) as prompts, worker.batch() as batch:
        for one in (prompts, batch):
            one.prepare([(sequence, 1)])
            one.start()
            one.append(0, k, k)
            if one is prompts:
                one.advance([1], [1])
        handle = batch._handle

        def methods_of_batch():
            batch.append(0, k, k)
            batch.attend(0, q, out)

        def with_new_output():
            batch.append(0, k, k)
            batch.attend(0, q)

        def addresses_at_hand():
            c.crumb_device_batch_append(handle, 0, places[0], places[1])
            c.crumb_device_batch_attend(handle, 0, places[2], places[3])

        def two_empty_calls():
            c.crumb_device_close(None)
            c.crumb_device_close(None)

        results = {}
        for call in (methods_of_batch, with_new_output, addresses_at_hand, two_empty_calls):
            times = []
            for _ in range(RUNS * 10):
                torch.cuda.synchronize()  # a full queue would make the host wait
                begin = time.thread_time_ns()
                for _ in range(CALLS // 20):
                    call()
                times.append((time.thread_time_ns() - begin) / (CALLS // 20) / 1000)
            results[call.__name__] = {"least": round(min(times), 2),
                                      "median": round(statistics.median(times), 2)}
        batch.advance([], [0])
    results["python_of_methods"] = {
        key: round(results["methods_of_batch"][key] - results["addresses_at_hand"][key] +
                   results["two_empty_calls"][key], 2) for key in ("least", "median")}
    return results


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
    try:
        import torch
        results.update(batch_without_library())
        if torch.cuda.is_available():
            results.update(batch_times())
    except (ImportError, crumb.FailedPrecondition):  # no torch; a library without CUDA
        pass
    if options.json:
        beside = f" beside an {run_facts.gpu()}" if run_facts.gpu() else ""
        of_run = run_facts.of_run("cpu", ["torch", "numpy"])
        json.dump({**of_run, "machine": of_run["machine"] + beside,
                   "python": platform.python_version(), "unit": "us per append and attend",
                   "results": results}, sys.stdout, indent=1)
        print()
        return
    for name, times in results.items():
        print(f"{name:18} least {times['least']:6.2f} us   median {times['median']:6.2f} us")


if __name__ == "__main__":
    main()
