# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in this process, which answers requests that come on standard input:
vllm_engine.py MODEL [CONNECTOR_CONFIG]

CONNECTOR_CONFIG is the JSON of kv_connector_extra_config; without it vLLM runs without connector.
Each line of input is JSON: {"tokens": [...], "max_tokens": n, "salt": text or null, "logprobs": n}
and gets one line: {"tokens": [...], "cached": n, "seconds": x}. {"reset": true} empties vLLM's own
prefix cache. Lines of output begin with "RESULT ", because vLLM prints to the same stream.
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


def answer(value):
    print("RESULT " + json.dumps(value), flush=True)


def main():
    options = {}
    if len(sys.argv) > 2:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="CrumbConnector", kv_connector_module_path="crumb.vllm",
            kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config=json.loads(sys.argv[2]))
    engine = LLM(model=sys.argv[1], enforce_eager=True, dtype="bfloat16", seed=0, **options)
    answer({"ready": True})
    for line in sys.stdin:
        wanted = json.loads(line)
        if wanted.get("reset"):
            answer({"reset": engine.reset_prefix_cache()})
            continue
        prompt = {"prompt_token_ids": wanted["tokens"]}
        if wanted.get("salt"):
            prompt["cache_salt"] = wanted["salt"]
        begin = time.monotonic()
        result = engine.generate(
            [prompt], SamplingParams(max_tokens=wanted["max_tokens"], temperature=0,
                                     ignore_eos=True), use_tqdm=False)[0]
        answer({"tokens": list(result.outputs[0].token_ids), "cached": result.num_cached_tokens,
                "seconds": time.monotonic() - begin})


if __name__ == "__main__":
    main()
