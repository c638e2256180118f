# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in this process, which answers requests that come on standard input:
vllm_engine.py MODEL [CONNECTOR_CONFIG [OPTIONS]]

CONNECTOR_CONFIG is the JSON of kv_connector_extra_config; null: vLLM runs without connector.
OPTIONS are arguments of vLLM's LLM as JSON. Each line of input is JSON: {"tokens": [...],
"max_tokens": n, "salt": text or null, "lora": folder or null} and gets one line: {"tokens": [...],
"cached": n, "seconds": x}. {"batch": [[...], ...], "max_tokens": n} generates for several prompts at once and gets
{"seconds": x, "cached": [n, ...]}. {"reset": true} empties vLLM's own prefix cache, {"reset": "all"} resets the connector, too. Lines of output
begin with "RESULT ", because vLLM prints to the same stream.
"""

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
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402


def answer(value):
    print("RESULT " + json.dumps(value), flush=True)


def generate(engine, prompts, max_tokens, lora=None):
    begin = time.monotonic()
    results = engine.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0,
                                                      ignore_eos=True, detokenize=False),
                              use_tqdm=False, lora_request=lora)
    return results, time.monotonic() - begin


def adapter(folder, numbers):
    """The LoRA adapter in a folder; `numbers` has those that were named before."""
    return LoRARequest(folder, numbers.setdefault(folder, len(numbers) + 1), folder)


def main():
    options = {"enforce_eager": True, "dtype": "bfloat16", "seed": 0}
    options.update(json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
    if len(sys.argv) > 2 and json.loads(sys.argv[2]) is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="CrumbConnector", kv_connector_module_path="crumb.vllm",
            kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config=json.loads(sys.argv[2]))
    engine = LLM(model=sys.argv[1], **options)
    answer({"ready": True, "block_tokens": engine.llm_engine.vllm_config.cache_config.block_size})
    adapters = {}
    for line in sys.stdin:
        wanted = json.loads(line)
        if wanted.get("reset"):
            answer({"reset": engine.reset_prefix_cache(reset_connector=wanted["reset"] == "all")})
            continue
        if "batch" in wanted:
            results, seconds = generate(engine, [{"prompt_token_ids": tokens}
                                                 for tokens in wanted["batch"]],
                                        wanted["max_tokens"])
            answer({"seconds": seconds, "cached": [result.num_cached_tokens for result in results]})
            continue
        prompt = {"prompt_token_ids": wanted["tokens"]}
        if wanted.get("salt"):
            prompt["cache_salt"] = wanted["salt"]
        lora = adapter(wanted["lora"], adapters) if wanted.get("lora") else None
        (result,), seconds = generate(engine, [prompt], wanted["max_tokens"], lora)
        answer({"tokens": list(result.outputs[0].token_ids), "cached": result.num_cached_tokens,
                "seconds": seconds})


if __name__ == "__main__":
    main()
