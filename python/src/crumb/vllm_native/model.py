# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Describes vLLM's model by the names that Crumb uses, and refuses unsupported features."""

import pathlib
from typing import Any, Dict, Mapping, Optional

from crumb import _engines
from crumb.blocks import BlockGeometry, block_geometry
from crumb.errors import InvalidArgument
from crumb.worker import Model, Rank, WorkerSettings

RECENT_TOKENS = 256
BLOCK_TOKENS = 64  # tokens in a history block
# Names in --additional-config '{"crumb": {...}}'.
OPTIONS = ("rotation", "model", "weights")


def options_of(vllm_config: Any) -> Mapping[str, Any]:
    """The options under "crumb" in --additional-config."""
    given = vllm_config.additional_config
    options: Dict[str, Any] = dict(given.get("crumb") or {}) if isinstance(given, dict) else {}
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise InvalidArgument(f"--additional-config has unknown options under \"crumb\": "
                              f"{', '.join(unknown)}; there are {', '.join(OPTIONS)}")
    return options


def geometry_of(head_size: int) -> BlockGeometry:
    """How a request's cache fills blocks, which depends on the size of heads only."""
    return block_geometry(
        Model("geometry", "none", layers=1, kv_heads=1, q_heads=1, head_dim=head_size,
              rotation="identity"), WorkerSettings(recent_tokens=RECENT_TOKENS))


def drafts_max(head_size: int) -> int:
    """The most draft tokens of a step for which the recent blocks have room: the row
    of a rejected draft has replaced an older row, and the token that is computed in its place still
    needs up to RECENT_TOKENS + BLOCK_TOKENS - 2 rows before its own."""
    geometry = geometry_of(head_size)
    rows = geometry.recent_blocks * geometry.rows_per_block - 1  # the first row is a header
    return rows - (RECENT_TOKENS + BLOCK_TOKENS - 2)


def rank_of(vllm_config: Any) -> Rank:
    """This process's part of the model."""
    parallel = vllm_config.parallel_config
    return Rank(parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size)


def model_of(vllm_config: Any) -> Model:
    """The model that blocks belong to."""
    config, options = vllm_config.model_config, options_of(vllm_config)
    return Model(
        model=str(options.get("model") or pathlib.Path(str(config.model)).name),
        weights=str(options.get("weights") or "not published"),
        layers=config.get_total_num_hidden_layers(),
        kv_heads=config.get_total_num_kv_heads(),
        q_heads=config.hf_text_config.num_attention_heads,
        head_dim=config.get_head_size(),
        rotation=str(options.get("rotation") or "hadamard"),
        rope=_engines.rope_of(config.hf_text_config))


def _unsupported_drafts(vllm_config: Any, head_size: int) -> Dict[str, bool]:
    """Returns, for each reason to refuse speculative decoding, whether it is there."""
    given = vllm_config.speculative_config
    if given is None:
        return {}
    most = drafts_max(head_size)
    return {
        "speculative decoding on a GPU": vllm_config.device_config.device_type != "cpu",
        "speculative decoding by another method than ngram": given.method != "ngram",
        f"more than {most} draft tokens (num_speculative_tokens)":
            given.num_speculative_tokens > most,
    }


def check_supported(vllm_config: Any, *, head_size: int, num_heads: int, num_kv_heads: int,
                    sliding_window: Optional[int], alibi_slopes: Any, attn_type: str,
                    shared_layer: Optional[str], more: Mapping[str, Any]) -> None:
    """Raises InvalidArgument with one sentence that names the unsupported feature.

    head_size, num_heads, num_kv_heads: of a layer, on this process's rank.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    of_model = (model.get_head_size(), model.get_num_attention_heads(parallel),
                model.get_num_kv_heads(parallel))
    reasons = {
        "a device that is neither a CPU nor a CUDA GPU":
            vllm_config.device_config.device_type not in ("cpu", "cuda"),
        "a data type other than bfloat16 (start vLLM with --dtype bfloat16)":
            str(model.dtype) != "torch.bfloat16",
        "a quantized KV cache of vLLM (leave --kv-cache-dtype auto)":
            vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16"),
        "heads of other sizes than 64, 128 and 256": head_size not in (64, 128, 256),
        "layers whose heads differ in number or size":
            (head_size, num_heads, num_kv_heads) != of_model,
        "layers with a sliding window": sliding_window is not None,
        "ALiBi": alibi_slopes is not None,
        "attention sinks": more.get("sinks") is not None,
        "encoders": attn_type != "decoder",
        "layers that share a KV cache": shared_layer is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1,
        "a KV connector other than CrumbConnector":
            getattr(vllm_config.kv_transfer_config, "kv_connector", None)
            not in (None, "CrumbConnector"),
        **_unsupported_drafts(vllm_config, head_size),
        "--disable-hybrid-kv-cache-manager":
            bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
    }
    for what, present in reasons.items():
        if present:
            raise InvalidArgument(f"Crumb's attention backend does not support {what}")
