# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The model as SGLang's configuration describes it and Crumb names it, and its KV cache."""

import pathlib
from typing import Any, Dict, Mapping, Optional

import torch

from crumb import _checkpoints, _engines
from crumb.client import PAGE_TOKENS
from crumb.errors import InvalidArgument
from crumb.transfer import PagedCache, PagedRows
from crumb.worker import Model, Rank

# Options of the linker and their defaults.
OPTIONS: Dict[str, Any] = {
    "socket_dir": None, "token_file": None, "tenant": None, "model": None, "weights": None,
    "history": "int2", "rotation": "hadamard", "deadline": 0.2, "after_flush": "private",
    "leases_max": 256, "offloads_max": 256}


def options_of(given: Optional[Mapping[str, Any]]) -> Dict[str, Any]:
    """`linker_extra_config` with its defaults. Raises InvalidArgument for an unknown option."""
    options = dict(given or {})
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise InvalidArgument(f"CrumbLinker has no option {', '.join(unknown)}; it has "
                              f"{', '.join(OPTIONS)}")
    if options.get("after_flush", "private") not in ("private", "shared"):
        raise InvalidArgument('"after_flush" is "private" or "shared"')
    return {**OPTIONS, **options}


def check_supported(config: Any, params: Any, components: Any) -> None:
    """Raises InvalidArgument with one sentence that names the unsupported feature.

    config: SGLang's ModelConfig. params: its CacheInitParams. components: of its cache.
    """
    kinds = sorted(getattr(component, "name", str(component)) for component in components)
    if kinds != ["FULL"]:
        raise InvalidArgument("CrumbLinker serves models in which every layer has full attention; "
                              f"the cache of this one has the components {', '.join(kinds)}")
    if getattr(config, "sliding_window_size", None) or getattr(config, "attention_chunk_size",
                                                               None):
        raise InvalidArgument("CrumbLinker serves full attention, and this model's layers have a "
                              "sliding window or chunked attention")
    if getattr(config, "is_multimodal", False):
        raise InvalidArgument("CrumbLinker serves text models, and this one takes images or sound")
    if params.page_size != PAGE_TOKENS:
        raise InvalidArgument(f"CrumbLinker needs pages of {PAGE_TOKENS} tokens, and these have "
                              f"{params.page_size}: start SGLang with --page-size {PAGE_TOKENS}")
    if params.is_eagle or params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise InvalidArgument("CrumbLinker does not store the KV cache of a draft model: start "
                              "SGLang without speculative decoding")
    if params.pp_size > 1 or params.attn_cp_size > 1:
        raise InvalidArgument("CrumbLinker supports neither pipeline nor context parallelism")


def model_of(config: Any, options: Mapping[str, Any],
             download_dir: Optional[str] = None) -> Model:
    """The model that pages belong to. config: SGLang's ModelConfig. download_dir: where SGLang
    keeps weight files of the Hub; None: in the default cache."""
    return Model(
        model=str(options["model"] or pathlib.Path(str(config.model_path)).name),
        weights=str(options["weights"] or _engines.weights_digest(
            str(config.model_path), config.revision, "linker_extra_config", download_dir)),
        layers=config.num_hidden_layers,
        kv_heads=config.get_total_num_kv_heads(),
        q_heads=config.get_total_num_attention_heads(),
        head_dim=config.head_dim,
        history=str(options["history"]),
        rotation=str(options["rotation"]),
        rope=rope_of(config),
        tenant=options["tenant"],
        # Pages are found by SGLang's own hashes of them: linker.py.
        fields={**_engines.keyspace_fields(config.quantization), "keys": "sglang",
                **_engines.override_fields(getattr(config, "model_override_args", None),
                                           "--json-model-override-args")})


def rope_of(config: Any) -> str:
    """The RoPE that SGLang computes, as text. It applies the long factors of LongRoPE to all tokens
    of a batch that has one beyond the length which the short ones are meant for, so that the keys
    of a page depend on other requests: such pages cannot be shared. config: SGLang's ModelConfig.
    """
    tokens = _engines.longrope_tokens(config.hf_text_config)
    if tokens is None:
        return _engines.rope_of(config.hf_text_config)
    if config.context_len > tokens:
        raise InvalidArgument(
            f"the model has LongRoPE, whose factors SGLang chooses for each batch if sequences may "
            f"be longer than {tokens} tokens: start SGLang with --context-length {tokens}")
    return _engines.rope_of(config.hf_text_config, "short")


def adapters_of(server_args: Any) -> Dict[str, Optional[bytes]]:
    """Digests of the LoRA adapters of --lora-paths, which SGLang has read at its start, by the id
    that SGLang derives from an adapter's name and path; None: its files are not in this machine's
    folders and caches. An adapter that is loaded later gets a random id, which no other server has.
    """
    adapters = {}
    for adapter in getattr(server_args, "lora_paths", None) or ():
        digest = _checkpoints.adapter_digest(str(adapter.lora_path))
        adapters[str(adapter.lora_id)] = bytes.fromhex(digest) if digest is not None else None
    return adapters


def rank_of(params: Any) -> Rank:
    """This process's part of the KV heads."""
    distributed = torch.distributed
    group = params.attn_tp_cache_group or params.tp_cache_group
    if not distributed.is_available() or not distributed.is_initialized() or group is None:
        return Rank()
    return Rank(distributed.get_rank(group=group), distributed.get_world_size(group=group))


def paged_cache_of(pool: Any) -> PagedCache:
    """SGLang's MHATokenToKVPool as a PagedCache. Raises InvalidArgument for any other pool.

    K and V of a layer are tensors [slots, heads, head_dim], or [pages, heads, page tokens,
    head_dim] in the layout HND. A page is PAGE_TOKENS slots in a row; page 0 takes the writes of
    padding.
    """
    layout = getattr(pool, "kv_cache_layout", type(pool).__name__)
    if layout not in ("nhd", "hnd") or not hasattr(pool, "k_buffer"):
        raise InvalidArgument(f"CrumbLinker knows the layouts NHD and HND of MHATokenToKVPool, and "
                              f"this KV cache is a {type(pool).__name__} of layout {layout}")
    if pool.store_dtype != torch.bfloat16:
        raise InvalidArgument(f"CrumbLinker reads a BF16 KV cache, and this one is "
                              f"{pool.store_dtype}: start SGLang with --dtype bfloat16 and "
                              "--kv-cache-dtype auto")
    if not pool.k_buffer:
        raise InvalidArgument("CrumbLinker found a KV cache without layers")
    if pool.k_buffer[0].device.type != "cpu":
        raise InvalidArgument("CrumbLinker moves pages of a KV cache in host memory so far, and "
                              f"this one is on {pool.k_buffer[0].device}")
    if (getattr(pool, "requires_physical_write_loc", False) or
            getattr(pool, "host_transfer_translate", None) is not None):
        raise InvalidArgument("CrumbLinker needs a KV cache whose slots have fixed places: start "
                              "SGLang without --enable-unified-memory")
    dims = "bthd" if layout == "nhd" else "bhtd"
    layers = [(PagedRows.of(_pages(k, layout), dims), PagedRows.of(_pages(v, layout), dims))
              for k, v in zip(pool.k_buffer, pool.v_buffer)]
    blocks = int(_pages(pool.k_buffer[0], layout).shape[0])
    return PagedCache(layers, blocks, PAGE_TOKENS)


def _pages(buffer: Any, layout: str) -> Any:
    """A layer's K or V with a dimension of pages in front."""
    if layout == "hnd":
        return buffer.view(-1, *buffer.shape[-3:])
    if buffer.dim() != 3 or buffer.shape[0] % PAGE_TOKENS:
        raise InvalidArgument(f"CrumbLinker cannot divide a KV cache of the shape "
                              f"{tuple(buffer.shape)} into pages of {PAGE_TOKENS} tokens")
    return buffer.view(-1, PAGE_TOKENS, *buffer.shape[1:])
