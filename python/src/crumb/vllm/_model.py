# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Describes vLLM's model by the names that Crumb uses, and finds its KV cache."""

import pathlib
from typing import Any, Dict, List, Optional, Tuple

from crumb import _engines
from crumb.errors import InvalidArgument
from crumb.transfer import PagedCache, PagedRows
from crumb.worker import Model


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises InvalidArgument with one sentence that names the unsupported feature."""
    device = vllm_config.device_config.device_type
    if device not in ("cpu", "cuda"):
        raise InvalidArgument("CrumbConnector moves pages of a KV cache in host memory or in that "
                              f"of a CUDA device, and this one is on a {device} device")
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or kinds != ["FullAttentionSpec"]:
        raise InvalidArgument(
            "CrumbConnector serves models in which every layer has full attention; this one has "
            f"{len(groups)} KV cache groups of {', '.join(kinds)}")
    spec = groups[0].kv_cache_spec
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        raise InvalidArgument("CrumbConnector serves full attention, and this model's layers have "
                              "a sliding window or chunked attention")
    dtype = str(spec.dtype).replace("torch.", "")
    if dtype != "bfloat16":
        raise InvalidArgument(f"CrumbConnector reads a BF16 KV cache, and this one is {dtype}: "
                              "start vLLM with --dtype bfloat16 and --kv-cache-dtype auto")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise InvalidArgument("CrumbConnector does not support pipeline parallelism yet")


def model_of(vllm_config: Any, extra: Any, rotation: Optional[str] = None) -> Model:
    """The model that pages belong to. `extra(name, default)` reads kv_connector_extra_config.
    rotation: of the engine's own cache; None: `extra` names it."""
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    load_config = getattr(vllm_config, "load_config", None)
    return Model(
        model=str(extra("model", None) or pathlib.Path(str(config.model)).name),
        weights=str(extra("weights", None) or _engines.weights_digest(
            str(config.model), config.revision, "kv_connector_extra_config",
            getattr(load_config, "download_dir", None))),
        layers=config.get_total_num_hidden_layers()
        if hasattr(config, "get_total_num_hidden_layers") else config.get_num_layers(parallel),
        kv_heads=config.get_total_num_kv_heads(),
        q_heads=config.hf_text_config.num_attention_heads,
        head_dim=config.get_head_size(),
        history=str(extra("history", "int2")),
        rotation=rotation or str(extra("rotation", "hadamard")),
        rope=rope_of(config),
        tenant=extra("tenant", None),
        fields={**_engines.keyspace_fields(config.quantization), **_override_fields(config)})


def rope_of(config: Any) -> str:
    """The RoPE that vLLM computes, as text. Of LongRoPE it applies the long factors to all tokens
    if sequences may be longer than the short ones are meant for (--max-model-len).
    config: vLLM's ModelConfig."""
    tokens = _engines.longrope_tokens(config.hf_text_config)
    if tokens is None:
        return _engines.rope_of(config.hf_text_config)
    if getattr(config, "original_max_model_len", None) == -1:
        raise InvalidArgument("the model has LongRoPE, whose factors vLLM chooses by "
                              "--max-model-len before it fits that length to the memory: start "
                              "vLLM with a number as --max-model-len")
    return _engines.rope_of(config.hf_text_config,
                            "long" if config.max_model_len > tokens else "short")


def _override_fields(config: Any) -> Dict[str, str]:
    """Keyspace fields of options that replace the configuration of the checkpoint."""
    fields = _engines.override_fields(getattr(config, "hf_overrides", None), "--hf-overrides")
    other = getattr(config, "hf_config_path", None)
    if other not in (None, config.model):
        fields["config"] = _engines.config_digest(str(other), config.revision, "--hf-config-path")
    return fields


def layer_number(name: str) -> int:
    """model.layers.17.self_attn.attn -> 17"""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise InvalidArgument(f"the layer's name {name!r} does not have exactly one number")
    return numbers[0]


def paged_cache_of(kv_caches: Dict[str, Any], head_dim: int) -> Tuple[PagedCache, List[str]]:
    """vLLM's KV cache as a PagedCache, and the names of its layers in order.

    A layer's tensor is [blocks, heads, tokens, 2 * head_dim]. On a GPU the last dimension is the
    token's K row and behind it its V row; the memory is token-major (NHD) or head-major (HND),
    which the strides show. vLLM's CPU kernels keep K of a block and head transposed, [head_dim,
    tokens], in the first half of the block's memory, and V [tokens, head_dim] in the second.
    """
    names = sorted(kv_caches, key=layer_number)
    layers = []
    for name in names:
        cache = kv_caches[name]
        known = cache.dim() == 4 and cache.shape[-1] == 2 * head_dim
        if not known or not (cache.is_cuda or cache[0, 0].is_contiguous()):
            raise InvalidArgument(f"the KV cache of {name} has the shape {tuple(cache.shape)} and "
                                  f"strides {cache.stride()}, which is no layout that Crumb knows")
        if cache.is_cuda:
            layers.append((PagedRows.of(cache[..., :head_dim]),
                           PagedRows.of(cache[..., head_dim:])))
            continue
        tokens = cache.shape[2]
        planes = cache.view(cache.shape[0], cache.shape[1], 2 * tokens, head_dim)
        keys, values = planes.chunk(2, dim=2)
        layers.append((PagedRows(keys.data_ptr(), cache.stride(0), cache.stride(1), 1, tokens),
                       PagedRows.of(values)))
    first = kv_caches[names[0]]
    return PagedCache(layers, first.shape[0], first.shape[2]), names


def check_cpu_layout(head_dim: int, block_tokens: int) -> None:
    """Writes two rows with vLLM's own kernel and finds them where `paged_cache_of` says they lie:
    the layout is private to vLLM and depends on the CPU. Raises InvalidArgument."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    heads = 2
    cache = torch.zeros(2, heads, block_tokens, 2 * head_dim, dtype=torch.bfloat16)
    rows = torch.arange(2 * heads * head_dim).reshape(2, heads, head_dim).to(torch.bfloat16) + 1
    keys, values = cache.view(2, heads, 2 * block_tokens, head_dim).chunk(2, dim=2)
    isa = cpu_attn._get_attn_isa(torch.bfloat16, block_tokens, head_dim)
    slots = torch.tensor([block_tokens + 3, block_tokens + 4], dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(rows, -rows, keys, values, slots, isa, k_scale=1.0, v_scale=1.0,
                                   kv_cache_dtype="auto")
    transposed = keys.as_strided((2, heads, block_tokens, head_dim),
                                 (cache.stride(0), cache.stride(1), 1, block_tokens))
    if not (torch.equal(transposed[1, :, 3:5].transpose(0, 1), rows) and
            torch.equal(values[1, :, 3:5].transpose(0, 1), -rows)):
        raise InvalidArgument(f"vLLM's CPU kernels ({isa}) keep keys in a layout that Crumb does "
                              "not know")
