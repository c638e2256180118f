# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Crumb in vLLM. One flag turns it on:

    vllm serve MODEL --dtype bfloat16 --kv-transfer-config '{"kv_connector": "CrumbConnector",
        "kv_connector_module_path": "crumb.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

docs/engines/vllm.md is the guide.
"""

from crumb.vllm.connector import CrumbConnector

__all__ = ["CrumbConnector"]
