# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in this process, which serves requests that come on standard input:
vllm_engine.py MODEL [CONNECTOR_CONFIG [OPTIONS]]

CONNECTOR_CONFIG is the JSON of kv_connector_extra_config; null: vLLM runs without connector.
OPTIONS are arguments of vLLM's LLM as JSON. The first line of output is {"ready": true} with the
cache's sizes and "attention", the backends that vLLM chose for the model's layers. Each line of
input is JSON: {"tokens": [...], "max_tokens": n, "salt": text or null, "lora": folder or null} and
gets one line: {"tokens": [...], "cached": n, "seconds": x}; with "margins": true it has "margins",
too, by how much each token was more likely than the next one, and "chosen", the logarithms of its
tokens' probabilities. Other lines:

{"batch": [[...], ...], "max_tokens": n} generates for several prompts at once and gets {"seconds":
x, "cached": [n, ...], "tokens": [[...], ...]}; with "margins": true it has "margins" and "chosen" of
each prompt, too; with "cancel": [i, ...] these prompts are cancelled after 20 steps, and have no
tokens. {"score": [...]} gets the logarithms of the probabilities of
these tokens but the first as {"scores": [...]}. {"metrics": true} gets vLLM's counters as {"name":
value} (with "disable_log_stats": false in OPTIONS). {"events": true} gets the KV events since the
last such line (with "kv_events_config" in OPTIONS). {"distributions": [[...], ...], "to": file}
writes the logarithms of the probabilities of all tokens behind each of these prompts to a file, as
rows of 32-bit floats, and gets {"cached": [n, ...]}. {"reset": true} empties vLLM's own prefix
cache, {"reset": "all"} resets the connector, too.

Lines of output begin with "RESULT ", because vLLM prints to the same stream.
"""

import array
import itertools
import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVEventsConfig, KVTransferConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

CANCELLED_AFTER_STEPS = 20
DISTRIBUTIONS_MAX = 8  # bound on distributions in memory: one of a large vocabulary takes some 10 MB in vLLM


def respond(value):
    print("RESULT " + json.dumps(value), flush=True)


def generate(engine, prompts, max_tokens, lora=None, logprobs=None):
    begin = time.monotonic()
    results = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0,
                                                      ignore_eos=True, detokenize=False,
                                                      logprobs=logprobs),
                              use_tqdm=False, lora_request=lora)
    return results, time.monotonic() - begin


def generate_some(engine, prompts, wanted):
    """The tokens of each prompt, None for those that are cancelled."""
    inner, tokens = engine.llm_engine, [None] * len(prompts)
    for number, prompt in enumerate(prompts):
        inner.add_request(str(number), prompt, SamplingParams(
            max_tokens=wanted["max_tokens"], temperature=0, ignore_eos=True, detokenize=False))
    for step in itertools.count():
        if not inner.has_unfinished_requests():
            return tokens
        if step == CANCELLED_AFTER_STEPS:
            inner.abort_request([str(number) for number in wanted["cancel"]])
        for output in inner.step():
            if output.finished and int(output.request_id) not in wanted["cancel"]:
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)


def margins(result):
    """By how much each generated token is more likely than the next one, as logarithms."""
    best = [sorted((of.logprob for of in step.values()), reverse=True)
            for step in result.outputs[0].logprobs]
    return [first - second for first, second in best]


def chosen(result):
    """The logarithm of the probability of each generated token."""
    return [step[token].logprob for token, step in zip(result.outputs[0].token_ids,
                                                       result.outputs[0].logprobs)]


def scores(engine, tokens):
    (result,) = engine.generate(
        [{"prompt_token_ids": tokens}],
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False),
        use_tqdm=False)
    return [of[token].logprob for of, token in zip(result.prompt_logprobs[1:], tokens[1:])]


def adapter(folder, numbers):
    """The LoRA adapter in a folder; `numbers` has those that were named before."""
    return LoRARequest(folder, numbers.setdefault(folder, len(numbers) + 1), folder)


def distributions(engine, prompts, to):
    """Writes the logarithms of the probabilities of all tokens behind each prompt; returns how many
    of its tokens were cached."""
    cached = []
    with open(to, "wb") as file:
        for begin in range(0, len(prompts), DISTRIBUTIONS_MAX):
            some = [{"prompt_token_ids": tokens}
                    for tokens in prompts[begin:begin + DISTRIBUTIONS_MAX]]
            for result in generate(engine, some, 1, logprobs=-1)[0]:
                (step,) = result.outputs[0].logprobs
                array.array("f", (step[token].logprob for token in range(len(step)))).tofile(file)
                cached.append(result.num_cached_tokens)
    return cached


def record_events(engine):
    """The KV events that the engine publishes from now on, as dictionaries."""
    recorded = []
    publisher = engine.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher

    def publish(batch):
        for event in batch.events:
            shown = {name: getattr(event, name) for name in event.__struct_fields__}
            shown["event"] = type(event).__name__
            recorded.append(shown)

    publisher.publish = publish
    return recorded


def attention_of(config):
    """Names of the attention backends of the model's layers, with the version of FlashAttention."""
    names = set()
    for layer in config.compilation_config.static_forward_context.values():
        version = getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None)
        if hasattr(layer, "impl"):
            names.add(layer.get_attn_backend().get_name() + (f" {version}" if version else ""))
    return sorted(names)


def main():
    options = {"enforce_eager": True, "dtype": "bfloat16", "seed": 0}
    options.update(json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
    if len(sys.argv) > 2 and json.loads(sys.argv[2]) is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="CrumbConnector", kv_connector_module_path="crumb.vllm",
            kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config=json.loads(sys.argv[2]))
    if "kv_events_config" in options:
        options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
    engine = LLM(model=sys.argv[1], **options)
    events = record_events(engine) if "kv_events_config" in options else []
    cache = engine.llm_engine.vllm_config.cache_config
    respond({"ready": True, "block_tokens": cache.block_size, "blocks": cache.num_gpu_blocks,
            "cache_tokens": getattr(cache, "kv_cache_size_tokens", None),
            "attention": attention_of(engine.llm_engine.vllm_config)})
    adapters = {}
    for line in sys.stdin:
        wanted = json.loads(line)
        if wanted.get("reset"):
            respond({"reset": engine.reset_prefix_cache(reset_connector=wanted["reset"] == "all")})
            continue
        if "batch" in wanted:
            prompts = [{"prompt_token_ids": tokens} for tokens in wanted["batch"]]
            if wanted.get("cancel"):
                respond({"tokens": generate_some(engine, prompts, wanted)})
                continue
            results, seconds = generate(engine, prompts, wanted["max_tokens"],
                                        logprobs=2 if wanted.get("margins") else None)
            respond({"seconds": seconds, "cached": [result.num_cached_tokens for result in results],
                    "tokens": [list(result.outputs[0].token_ids) for result in results],
                    **({"margins": [margins(result) for result in results],
                        "chosen": [chosen(result) for result in results]}
                       if wanted.get("margins") else {})})
            continue
        if wanted.get("metrics"):
            respond({metric.name: metric.value for metric in engine.get_metrics()
                    if hasattr(metric, "value")})
            continue
        if wanted.get("events"):
            # Hashes are bytes.
            print("RESULT " + json.dumps({"events": events}, default=bytes.hex), flush=True)
            events.clear()
            continue
        if "distributions" in wanted:
            respond({"cached": distributions(engine, wanted["distributions"], wanted["to"])})
            continue
        if "score" in wanted:
            respond({"scores": scores(engine, wanted["score"])})
            continue
        prompt = {"prompt_token_ids": wanted["tokens"]}
        if wanted.get("salt"):
            prompt["cache_salt"] = wanted["salt"]
        lora = adapter(wanted["lora"], adapters) if wanted.get("lora") else None
        (result,), seconds = generate(engine, [prompt], wanted["max_tokens"], lora,
                                      2 if wanted.get("margins") else None)
        respond({"tokens": list(result.outputs[0].token_ids), "cached": result.num_cached_tokens,
                "seconds": seconds,
                **({"margins": margins(result), "chosen": chosen(result)}
                   if wanted.get("margins") else {})})


if __name__ == "__main__":
    main()
