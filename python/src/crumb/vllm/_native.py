# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The cache of Crumb's own attention backend (crumb.vllm_native), as the connector sees it."""

from typing import Any, Dict, List

from crumb.blocks import BlockPool
from crumb.errors import InvalidArgument
from crumb.vllm._jobs import BlockLayout
from crumb.vllm._model import layer_number


def chosen(vllm_config: Any) -> bool:
    """Whether vLLM attends with Crumb's backend."""
    from crumb import vllm_native

    return vllm_native.chosen(vllm_config)


def check_supported(vllm_config: Any, extra: Any) -> None:
    """Raises InvalidArgument with one sentence that names the unsupported feature; the
    backend has refused the rest. `extra(name, default)` reads kv_connector_extra_config."""
    if vllm_config.device_config.device_type != "cpu":
        raise InvalidArgument("CrumbConnector publishes and loads INT2 blocks on the CPU only so "
                              "far")
    if extra("history", "int2") != "int2":
        raise InvalidArgument("INT2 blocks have no BF16 history: leave \"history\" out")
    if extra("load_by_layer", False):
        raise InvalidArgument("INT2 blocks are loaded as a whole: leave \"load_by_layer\" out")
    rotation = rotation_of(vllm_config)
    if str(extra("rotation", rotation)) != rotation:
        raise InvalidArgument(
            f"the attention backend has the rotation {rotation}, from --additional-config, and "
            f"kv_connector_extra_config names {extra('rotation', None)}: leave it out there")


def rotation_of(vllm_config: Any) -> str:
    """The rotation of the attention backend."""
    from crumb.vllm_native.model import options_of

    return str(options_of(vllm_config).get("rotation") or "hadamard")


def layout_of(kv_cache_config: Any) -> BlockLayout:
    """Finds the groups of vLLM that have the blocks of a request."""
    from crumb.vllm_native.blocks_of_requests import HistorySpec, SinkSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    history = [i for i, spec in enumerate(specs) if isinstance(spec, HistorySpec)]
    sink = [i for i, spec in enumerate(specs) if isinstance(spec, SinkSpec)]
    if len(history) != 1 or len(sink) != 1:
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise InvalidArgument(f"vLLM has {len(specs)} KV cache groups of {kinds}, and Crumb knows "
                              f"one group of history and one of sinks")
    return BlockLayout(specs[history[0]].block_size, history[0], sink[0],
                       specs[sink[0]].request_blocks)


def pools_of(kv_caches: Dict[str, Any]) -> List[BlockPool]:
    """The pool of each layer, in order."""
    history = {layer_number(name): cache for name, cache in kv_caches.items()
               if not name.startswith("crumb_")}
    pools = []
    for layer, number in enumerate(sorted(history)):
        cache, sink = history[number], kv_caches[f"crumb_sink.{layer}"]
        recent = kv_caches[f"crumb_recent.{layer}"]
        stride = cache.stride(0) * cache.element_size()
        if any(rows.stride(0) * rows.element_size() != stride or rows.shape[0] != cache.shape[0]
               for rows in (sink, recent)):
            raise InvalidArgument("vLLM's groups have blocks of different sizes")
        pools.append(BlockPool(cache.data_ptr(), sink.data_ptr(), recent.data_ptr(), stride,
                               cache.shape[0]))
    return pools
