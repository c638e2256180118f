# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Describes vLLM's model by the names that Crumb uses, and finds its KV cache."""

import pathlib
from typing import Any, Dict, Iterable, List, Optional, Tuple

from crumb import _engines
from crumb.errors import InvalidArgument
from crumb.transfer import PagedCache, PagedRows
from crumb.worker import Model

# vLLM's names for a cache of FP8 elements (E4M3) with one factor for K and one for V of each layer.
FP8_CACHES = ("fp8", "fp8_e4m3")
# Factors (K, V) of a layer's FP8 elements.
Scales = Tuple[float, float]


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
    _check_dtype(vllm_config, spec)
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise InvalidArgument("CrumbConnector does not support pipeline parallelism yet")


def _check_dtype(vllm_config: Any, spec: Any) -> None:
    """Raises InvalidArgument unless the cache's elements are BF16, or FP8 with constant factors."""
    if has_fp8_cache(vllm_config):
        if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
            raise InvalidArgument("with --calculate-kv-scales the factors of an FP8 KV cache depend "
                                  "on an engine's first request, so that its pages are no other "
                                  "engine's: start vLLM without it")
        return
    dtype = str(spec.dtype).replace("torch.", "")
    if dtype != "bfloat16":
        name = getattr(getattr(vllm_config, "cache_config", None), "cache_dtype", "auto")
        raise InvalidArgument(f"CrumbConnector reads a KV cache of BF16 or FP8 (E4M3), and the "
                              f"elements of this one are {dtype} (--kv-cache-dtype {name}): start "
                              "vLLM with --dtype bfloat16, and --kv-cache-dtype auto or fp8")


def has_fp8_cache(vllm_config: Any) -> bool:
    """Whether the elements of vLLM's KV cache are FP8 (E4M3)."""
    cache = getattr(vllm_config, "cache_config", None)
    return getattr(cache, "cache_dtype", "auto") in FP8_CACHES


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
        fields={**_engines.keyspace_fields(config.quantization), **_override_fields(config),
                # Attention over FP8 rows gives other rows in the layers behind it.
                **({"kv_cache": "fp8_e4m3"} if has_fp8_cache(vllm_config) else {})})


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


def fp8_scales_of(vllm_config: Any, names: Iterable[str]) -> Dict[str, Scales]:
    """The factors of the FP8 elements of these layers, which vLLM has read from the checkpoint.
    Raises InvalidArgument if a layer has several for its K or V."""
    scales = {}
    for name in names:
        layer = vllm_config.compilation_config.static_forward_context[name]
        if layer._k_scale.numel() != 1 or layer._v_scale.numel() != 1:
            raise InvalidArgument(
                f"{name} has {layer._k_scale.numel()} factors of FP8 keys and "
                f"{layer._v_scale.numel()} of values, and Crumb knows one of each for a layer: use "
                "a checkpoint with factors for each tensor, or --kv-cache-dtype auto")
        scales[name] = (float(layer._k_scale), float(layer._v_scale))
    return scales


def paged_cache_of(kv_caches: Dict[str, Any], head_dim: int,
                   scales: Optional[Dict[str, Scales]] = None) -> Tuple[PagedCache, List[str]]:
    """vLLM's KV cache as a PagedCache, and the names of its layers in order.

    scales: of FP8 elements, which are bytes in vLLM's tensors; None: elements are BF16.

    A layer's tensor is [blocks, heads, tokens, 2 * head_dim]. On a GPU the last dimension is the
    token's K row and behind it its V row; the memory is token-major (NHD) or head-major (HND),
    which the strides show. vLLM's CPU kernels keep K of a block and head transposed, [head_dim,
    tokens], in the first half of the block's memory, and V [tokens, head_dim] in the second.
    """
    names = sorted(kv_caches, key=layer_number)
    layers = []
    for name in names:
        cache, (k_scale, v_scale) = kv_caches[name], (1.0, 1.0)
        if scales is not None:
            (k_scale, v_scale), cache = scales[name], cache.view(_fp8_type())
        known = cache.dim() == 4 and cache.shape[-1] == 2 * head_dim
        if not known or not (cache.is_cuda or cache[0, 0].is_contiguous()):
            raise InvalidArgument(f"the KV cache of {name} has the shape {tuple(cache.shape)} and "
                                  f"strides {cache.stride()}, which is no layout that Crumb knows")
        if cache.is_cuda:
            layers.append((PagedRows.of(cache[..., :head_dim], scale=k_scale),
                           PagedRows.of(cache[..., head_dim:], scale=v_scale)))
            continue
        tokens = cache.shape[2]
        planes = cache.view(cache.shape[0], cache.shape[1], 2 * tokens, head_dim)
        keys, values = planes.chunk(2, dim=2)
        layers.append((PagedRows(keys.data_ptr(), cache.stride(0), cache.stride(1), 1, tokens,
                                 scale=None if scales is None else k_scale),
                       PagedRows.of(values, scale=v_scale)))
    first = kv_caches[names[0]]
    return PagedCache(layers, first.shape[0], first.shape[2]), names


def _fp8_type() -> Any:
    import torch

    return torch.float8_e4m3fn


def check_cpu_layout(head_dim: int, block_tokens: int, fp8: bool = False) -> None:
    """Writes two rows with vLLM's own kernel and finds them where `paged_cache_of` says they lie:
    the layout is private to vLLM and depends on the CPU. fp8: the cache's elements are FP8. Raises
    InvalidArgument."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    heads, dtype = 2, "fp8_e4m3" if fp8 else "auto"
    cache = torch.zeros(2, heads, block_tokens, 2 * head_dim,
                        dtype=torch.uint8 if fp8 else torch.bfloat16)
    # Normal numbers of both types. An order of elements other than the expected one shows in some of
    # these hundreds of random ones.
    codes = torch.randint(0x08, 0x7f, (2, heads, head_dim), dtype=torch.uint8,
                          generator=torch.Generator().manual_seed(1))
    rows = codes.view(_fp8_type()).to(torch.bfloat16)
    keys, values = cache.view(2, heads, 2 * block_tokens, head_dim).chunk(2, dim=2)
    isa = cpu_attn._get_attn_isa(torch.bfloat16, block_tokens, head_dim,
                                 *((dtype,) if fp8 else ()))
    slots = torch.tensor([block_tokens + 3, block_tokens + 4], dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(rows, -rows, keys, values, slots, isa, k_scale=1.0, v_scale=1.0,
                                   kv_cache_dtype=dtype)
    if fp8:
        keys, values = (part.view(_fp8_type()).to(torch.bfloat16) for part in (keys, values))
    transposed = keys.as_strided((2, heads, block_tokens, head_dim),
                                 (keys.stride(0), keys.stride(1), 1, block_tokens))
    if not (torch.equal(transposed[1, :, 3:5].transpose(0, 1), rows) and
            torch.equal(values[1, :, 3:5].transpose(0, 1), -rows)):
        raise InvalidArgument(f"vLLM's CPU kernels ({isa}) keep keys in a layout that Crumb does "
                              "not know")
