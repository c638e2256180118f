# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""`Backend` is vLLM's own CPU backend, or Crumb's with --attention-backend CUSTOM.

vLLM reads the attribute when it creates an attention layer.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config_or_none

    from crumb.vllm_native import chosen

    if chosen(get_current_vllm_config_or_none()):
        from crumb.vllm_native.backend import CrumbAttentionBackend
        return CrumbAttentionBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    return CPUAttentionBackend
