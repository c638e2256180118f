# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""One SGLang engine on the CPU, which serves requests that come on standard input:
sglang_engine.py MODEL [LINKER_CONFIG]

LINKER_CONFIG is the JSON of linker_extra_config; without it SGLang runs without linker. Each line
of input is JSON: {"tokens": [...], "max_tokens": n, "salt": text or null} and gets one line:
{"tokens": [...], "cached": n, "seconds": x}. {"reset": true} empties SGLang's own cache. Lines of
output begin with "RESULT ", because SGLang prints to the same stream.
"""

import json
import os
import sys
import time

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sglang  # noqa: E402
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402


def write_result(value):
    print("RESULT " + json.dumps(value), flush=True)


def linker_options(config):
    return {"enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "unified_cache_external_linker_config": {
                "linker": "CrumbLinker", "linker_module_path": "crumb.sglang",
                "linker_extra_config": json.loads(config)}}


def main():
    options = linker_options(sys.argv[2]) if len(sys.argv) > 2 else {}
    engine = sglang.Engine(
        model_path=sys.argv[1], device="cpu", dtype="bfloat16", page_size=64,
        attention_backend="torch_native", sampling_backend="pytorch", grammar_backend="none",
        skip_tokenizer_init=True, max_total_tokens=8192, mem_fraction_static=0.3,
        watchdog_timeout=3000, log_level="warning", **options)
    write_result({"ready": True})
    for line in sys.stdin:
        wanted = json.loads(line)
        if wanted.get("reset"):
            write_result({"reset": bool(engine.flush_cache().success)})
            continue
        begin = time.monotonic()
        request = GenerateReqInput(
            input_ids=wanted["tokens"], cache_salt=wanted.get("salt"),
            sampling_params={"max_new_tokens": wanted["max_tokens"], "temperature": 0,
                             "ignore_eos": True})
        result = engine.loop.run_until_complete(
            engine.tokenizer_manager.generate_request(request, None).__anext__())
        write_result({"tokens": list(result["output_ids"]),
                      "cached": result["meta_info"]["cached_tokens"],
                      "seconds": time.monotonic() - begin})
    engine.shutdown()


if __name__ == "__main__":
    main()
