#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a model of transformers over INT2 history on real text, beside DynamicCache:

    transformers_quality.py MODEL [--gguf FILE] --text FILE [--tokens N] [--prompt N] [--json F]

The model reads the first `--prompt` tokens of the text at once and the rest one by one, as if it
had generated them, once with each cache. The distributions after the prompt, all of which attend
INT2 history if the prompt has 384 tokens or more, are compared: how often the most likely token is
the same, and the Kullback-Leibler divergence in nats. Then both caches generate `--generate` tokens
greedily behind the text. `--rotation FILE` takes a file of `crumb calibrate`; with `--history bf16`
the caches differ by rounding to BF16 only. Needs accelerate for a GGUF file.
"""

import argparse
import json
import pathlib
import sys
import time

import torch
import transformers

from crumb.transformers import CrumbCache

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import run_facts  # noqa: E402


def logits_after_prompt(model, ids, prompt, cache):
    """(log-probabilities [tokens - prompt, vocabulary], seconds of a step) with this cache."""
    rows = []
    with torch.no_grad():
        model(ids[:, :prompt - 1], past_key_values=cache, use_cache=True)
        begin = time.perf_counter()
        for token in ids[:, prompt - 1:-1].split(1, 1):
            out = model(token, past_key_values=cache, use_cache=True)
            rows.append(out.logits[0, -1].float().log_softmax(-1))
    return torch.stack(rows), (time.perf_counter() - begin) / len(rows)


def compare(expected, found, targets):
    """Figures of two sets of distributions over the same text."""
    divergence = (expected.exp() * (expected - found)).sum(-1)
    losses = [-float(rows.gather(1, targets[:, None]).mean()) for rows in (expected, found)]
    return {"positions": len(expected),
            "same_most_likely": float((expected.argmax(-1) == found.argmax(-1)).float().mean()),
            "mean_kl": float(divergence.mean()), "kl_p99": float(divergence.quantile(0.99)),
            "loss_dynamic": losses[0], "loss_crumb": losses[1]}


def generated(model, ids, tokens, cache):
    out = model.generate(ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False,
                         attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=None)
    return out[0, ids.shape[1]:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--gguf")
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=48)
    parser.add_argument("--rotation", default="hadamard")
    parser.add_argument("--history", default="int2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    source = {"gguf_file": options.gguf} if options.gguf else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, **source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), **source).eval()
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    ids = ids[:, :options.tokens]
    settings = {"rotation": options.rotation, "history": options.history}

    expected, dynamic_seconds = logits_after_prompt(model, ids, options.prompt,
                                                    transformers.DynamicCache())
    with CrumbCache(model, ids[:, :options.prompt - 1], **settings) as cache:
        found, crumb_seconds = logits_after_prompt(model, ids, options.prompt, cache)
    targets = ids[0, options.prompt:]
    figures = {"model": options.model, "dtype": options.dtype, **settings, "tokens": ids.shape[1],
               "prompt": options.prompt,
               **run_facts.of_run("cpu", ["torch", "transformers"]),
               "seconds_a_step": {"dynamic": dynamic_seconds, "crumb": crumb_seconds},
               "decode": compare(expected, found, targets)}
    plain = generated(model, ids, options.generate, transformers.DynamicCache())
    with CrumbCache(model, **settings) as cache:
        ours = generated(model, ids, options.generate, cache)
    same = (plain == ours).long()
    figures["generated"] = {"tokens": len(plain), "same": int(same.sum()),
                            "leading_same": int(same.cumprod(0).sum()),
                            "dynamic": tokenizer.decode(plain), "crumb": tokenizer.decode(ours)}
    text = json.dumps(figures, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
