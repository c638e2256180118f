#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Decode speed and memory of a model of Qwen3-8B's shapes by cache: transformers_decode.py

The model has random weights in BF16. Each way gets the same random prompts, computes them, and then
decodes greedily, with nothing else on the GPU:

    dynamic          transformers' loop over DynamicCache with sdpa by the kernel that torch takes
    dynamic cudnn    the same by cuDNN's kernel
    quanto           the same over QuantizedCache, 4 bits, if optimum-quanto is installed
    crumb            the same over CrumbCache
    generate         crumb.generate with a CUDA graph
    generate eager   crumb.generate without one

ms a step is the mean of --steps steps behind --warm-up of them. The host waits for the device at
the end of each; crumb.generate waits for the step before. GB of cache is the memory of the prompts' keys
and values; peak GB is the device's memory in use while decoding, weights included: torch's peak
and the memory outside torch. With --tiny a small model runs on whatever device
there is, to try the script.
"""

import argparse
import gc
import json
import pathlib
import sys
import time

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

import crumb
from crumb import transformers as of_crumb
from crumb.transformers import _generate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import run_facts  # noqa: E402

WAYS = ("generate", "generate eager", "crumb", "dynamic", "dynamic cudnn", "quanto")


def model_of(tiny, device):
    if tiny:
        sizes = dict(vocab_size=500, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    else:
        sizes = dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288,
                     num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
                     head_dim=128)
    config = transformers.Qwen3Config(**sizes, max_position_embeddings=131072, eos_token_id=None,
                                      bos_token_id=None, pad_token_id=0)
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return transformers.Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


class Memory:
    """Device memory in GB: of torch's tensors, and outside torch since the start."""

    def __init__(self, on_gpu):
        self._on_gpu = on_gpu
        self._before = self._outside()
        self.weights = self.tensors()

    def _outside(self):
        if not self._on_gpu:
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / 1e9

    def outside(self):
        return self._outside() - self._before

    def tensors(self):
        return torch.cuda.memory_allocated() / 1e9 if self._on_gpu else 0.0

    def begin_peak(self):
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak(self):
        held = torch.cuda.max_memory_allocated() / 1e9 if self._on_gpu else 0.0
        return held + self.outside()


def wait(on_gpu):
    if on_gpu:
        torch.cuda.synchronize()


def transformers_loop(model, ids, cache, options, memory):
    """Prompt and steps of transformers' loop, without its bookkeeping."""
    on_gpu = model.device.type == "cuda"
    wait(on_gpu)
    begin = time.perf_counter()
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    token = logits[:, -1:].argmax(-1)
    wait(on_gpu)
    prompt, steps = time.perf_counter() - begin, []
    del logits
    memory.begin_peak()
    for step in range(options.warm_up + options.steps):
        begin = time.perf_counter()
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        wait(on_gpu)
        if step >= options.warm_up:
            steps.append(time.perf_counter() - begin)
    return prompt, steps


def dynamic(model, ids, options, memory):
    cache = transformers.DynamicCache(config=model.config)
    prompt, steps = transformers_loop(model, ids, cache, options, memory)
    held = sum(rows.nbytes for layer in cache.layers for rows in (layer.keys, layer.values)) / 1e9
    return prompt, steps, held, memory.peak()


def dynamic_cudnn(model, ids, options, memory):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return dynamic(model, ids, options, memory)


def quanto(model, ids, options, memory):
    cache = transformers.QuantizedCache("quanto", model.config, nbits=4, axis_key=0, axis_value=0)
    before = memory.tensors()
    prompt, steps = transformers_loop(model, ids, cache, options, memory)
    return prompt, steps, memory.tensors() - before, memory.peak()


def crumb_cache(model, ids, options, memory):
    with of_crumb.CrumbCache(model, ids) as cache:
        prompt, steps = transformers_loop(model, ids, cache, options, memory)
        return prompt, steps, memory.outside(), memory.peak()


def generate(model, ids, options, memory, graphs=True):
    """crumb.generate, whose steps are timed where they end: where the host has read the tokens."""
    ends, held, peaks, original = [time.perf_counter()], [], [], _generate._Loop._step

    def step(loop):
        if len(ends) == 1:
            ends.append(time.perf_counter())  # prompts are enqueued
            held.append(memory.outside())
            memory.begin_peak()
        original(loop)
        ends.append(time.perf_counter())
        if len(ends) == options.warm_up + options.steps + 3:  # the last one
            peaks.append(memory.peak())

    _generate._Loop._step = step
    try:
        crumb.generate(model, ids.tolist(), max_new_tokens=options.warm_up + options.steps + 2,
                       batch=len(ids), graphs=graphs)
    finally:
        _generate._Loop._step = original
    steps = [b - a for a, b in zip(ends[2:], ends[3:])]
    # The first step waits for the prompts, whose computation it is therefore a part of.
    return ends[2] - ends[0], steps[options.warm_up:], held[0], peaks[-1]


def measure(way, model, ids, options):
    on_gpu = model.device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    model.set_attn_implementation("crumb" if way == "crumb" else "sdpa")
    memory = Memory(on_gpu)
    run = {"dynamic": dynamic, "dynamic cudnn": dynamic_cudnn, "quanto": quanto,
           "crumb": crumb_cache, "generate": generate,
           "generate eager": lambda *given: generate(*given, graphs=False)}[way]
    with torch.no_grad():
        prompt, steps, held, peak = run(model, ids, options, memory)
    mean = sum(steps) / len(steps)
    return {"prompt_s": round(prompt, 2), "ms_per_step": round(mean * 1e3, 2),
            "tokens_per_s": round(len(ids) / mean, 1), "cache_gb": round(held, 2),
            "peak_gb": round(peak, 2), "weights_gb": round(memory.weights, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", nargs="+", default=["1x100000", "8x16384"],
                        help="sequences x tokens")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=argparse.FileType("w"))
    parser.add_argument("--commit", default="", help="for the JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    of_run = run_facts.of_run(device, ["transformers", "optimum-quanto"],
                              commit_name=options.commit)
    model = model_of(options.tiny, device)
    results = []
    for context in options.contexts:
        sequences, tokens = map(int, context.split("x"))
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(1, model.config.vocab_size, (sequences, tokens), generator=generator)
        for way in options.ways:
            try:
                found = measure(way, model, ids.to(device), options)
            except (ImportError, RuntimeError) as error:  # not installed; out of memory
                found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300]}
            results.append({"context": context, "way": way, **found})
            print(json.dumps(results[-1]), flush=True)
    if options.json is not None:
        json.dump({"bench": "transformers_decode", **of_run, "torch": torch.__version__,
                   "results": results}, options.json, indent=1)
        options.json.write("\n")


if __name__ == "__main__":
    main()
