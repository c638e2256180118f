# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM attention over INT2 blocks in vLLM's own pool. One flag turns it on:

    python -m vllm.entrypoints.openai.api_server --model MODEL --dtype bfloat16 \\
        --attention-backend CUSTOM

vLLM finds this package by its entry point of the group vllm.general_plugins, and calls `register`
in each of its processes. docs/engines/vllm_native.md is the guide.
"""

from typing import Any

BACKEND = "crumb.vllm_native.backend.CrumbAttentionBackend"


def register() -> None:
    """Makes the backend known to vLLM. Nothing changes until a user selects CUSTOM.

    vLLM's CPU platform has one backend and does not look at the flag. There the name of its own
    backend is redirected to a choice, which is made when the engine starts.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        return  # a version of vLLM that has no such backends; an error here would end its start
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if not AttentionBackendEnum.CPU_ATTN.is_overridden():
        register_backend(AttentionBackendEnum.CPU_ATTN, "crumb.vllm_native.cpu_choice.Backend")


def chosen(vllm_config: Any) -> bool:
    """Returns whether the user selected this backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    return (vllm_config is not None and vllm_config.attention_config.backend == custom and
            custom.get_path() == BACKEND)
