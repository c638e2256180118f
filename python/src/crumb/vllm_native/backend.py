# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The attention backend: vLLM's pool holds INT2 tiles, and Crumb's kernels compute on them.

On a GPU a decode step is one CUDA graph. The first layer turns vLLM's tables, which stay in place
in device memory, into those of the kernels, inside the graph; nothing is prepared on the host.
"""

import dataclasses
from typing import Any, ClassVar, List, Optional, Tuple

import torch
import vllm.v1.kv_cache_interface as interface
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl,
                                       AttentionMetadataBuilder, AttentionType)

from crumb.blocks import BlockBatch, BlockPool, block_step, fresh_rows
from crumb.errors import InvalidArgument
from crumb.vllm_native.attention import attention_of
from crumb.vllm_native.blocks_of_requests import (SPECS_HAVE_CONTENT, HistorySpec, RecentSpec,
                                                  RowsSpec, SinkSpec)
from crumb.vllm_native.model import (BLOCK_TOKENS, RECENT_TOKENS, check_supported, geometry_of)


@dataclasses.dataclass
class GroupMetadata:
    """One step of one group: block tables, and which fresh tokens are whose."""

    requests: int
    tokens: int
    #: leading requests with one fresh token, and the most fresh tokens of one request
    decodes: int
    tokens_max: int
    query_start: torch.Tensor  # [requests + 1] int32
    lengths: torch.Tensor      # [requests] int32
    block_table: torch.Tensor  # [requests, entries] int32
    #: crumb_block_batch of the step, which the first layer makes
    batch: Optional[Any] = None

    def table(self) -> Tuple[int, int]:
        """Address and entries between two requests."""
        return self.block_table.data_ptr(), self.block_table.stride(0)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is on a GPU: a captured step reads it where it is."""
    if tensor.dtype == torch.int32 and tensor.stride(-1) == 1:
        return tensor
    if tensor.is_cuda:
        raise InvalidArgument(f"vLLM's tables are {tensor.dtype} of strides {tensor.stride()}, "
                              f"which is no layout that Crumb knows")
    return tensor.to(torch.int32).contiguous()


def _leading_decodes(starts: torch.Tensor, requests: int) -> int:
    """How many requests at the front have one fresh token."""
    for index, (begin, end) in enumerate(zip(starts.tolist(), starts[1:requests + 1].tolist())):
        if end - begin != 1:
            return index
    return requests


class GroupMetadataBuilder(AttentionMetadataBuilder[GroupMetadata]):
    """Makes the metadata of a group."""

    # Requests that decode come first, so that they have kernels of their own beside prompts.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any,
                 device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        layers = vllm_config.compilation_config.static_forward_context
        self._attention = getattr(getattr(layers.get(layer_names[0]), "impl", None), "attention",
                                  None)

    def build(self, common_prefix_len: int, common_attn_metadata: Any,
              fast_build: bool = False) -> GroupMetadata:
        common = common_attn_metadata
        if self._attention is not None:
            self._attention.raise_fault()
        longest = int(common.max_query_len)
        decodes = (common.num_reqs if longest == 1 else
                   _leading_decodes(common.query_start_loc_cpu, common.num_reqs))
        return GroupMetadata(common.num_reqs, common.num_actual_tokens, decodes, longest,
                             _integers(common.query_start_loc), _integers(common.seq_lens),
                             _integers(common.block_table_tensor))


class _BlocksBackend(AttentionBackend):
    """The common part of the backends of all three groups."""

    supported_dtypes: ClassVar[List[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[List[str]] = ["auto", "bfloat16"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> List[int]:
        return [BLOCK_TOKENS]

    @classmethod
    def get_supported_head_sizes(cls) -> List[int]:
        return [64, 128, 256]

    @classmethod
    def supported_kv_cache_layouts(cls) -> Tuple[Any, ...]:
        # A block is one contiguous fragment of all layers, with a tile for each KV head.
        return (interface.KVCacheLayout.BLHNC,)

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
                           cache_dtype_str: str = "auto") -> Tuple[int, ...]:
        # vLLM 0.26, where every layer has memory of its own.
        tile = geometry_of(head_size).tile_bytes
        return num_blocks, num_kv_heads, block_size, tile // BLOCK_TOKENS

    @staticmethod
    def get_builder_cls() -> type:
        return GroupMetadataBuilder


class RowsBackend(_BlocksBackend):
    """Names the groups of BF16 rows, over which no layer attends by itself."""

    @staticmethod
    def get_name() -> str:
        return "CRUMB_ROWS"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError


class Rows(AttentionLayerBase):
    """A layer of vLLM without attention, to which vLLM binds the memory of sink or recent rows.

    attention: that of the layer which attends these rows. Later layers find it here and share it.
    """

    def __init__(self, name: str, spec: RowsSpec, attention: Any) -> None:
        self.name, self._spec, self.attention = name, spec, attention
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> Any:
        return RowsBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> RowsSpec:
        return self._spec


class CrumbAttentionBackend(_BlocksBackend):
    """Attention over INT2 history and BF16 rows."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return CrumbAttentionImpl

    @classmethod
    def customize_spec(cls, spec: Any) -> HistorySpec:
        if isinstance(spec, HistorySpec):
            return spec
        content = geometry_of(spec.head_size).tile_bytes // BLOCK_TOKENS
        if SPECS_HAVE_CONTENT:
            history: HistorySpec = interface.replace_as(
                spec, HistorySpec, block_size=BLOCK_TOKENS, dtype=torch.uint8,
                state_content_bytes=content, recent_tokens=RECENT_TOKENS)
            return history
        return HistorySpec(block_size=BLOCK_TOKENS, num_kv_heads=spec.num_kv_heads,
                           head_size=spec.head_size, dtype=torch.uint8,
                           state_content_bytes=content, recent_tokens=RECENT_TOKENS)


class CrumbAttentionImpl(AttentionImpl[GroupMetadata]):
    """Attention of one layer."""

    def __init__(self, num_heads: int, head_size: int, scale: float,
                 num_kv_heads: Optional[int] = None, alibi_slopes: Optional[List[float]] = None,
                 sliding_window: Optional[int] = None, kv_cache_dtype: str = "auto",
                 logits_soft_cap: Optional[float] = None,
                 attn_type: str = AttentionType.DECODER,
                 kv_sharing_target_layer_name: Optional[str] = None, **more: Any) -> None:
        config = get_current_vllm_config()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        check_supported(config, head_size=head_size, num_heads=num_heads,
                        num_kv_heads=self.num_kv_heads, sliding_window=sliding_window,
                        alibi_slopes=alibi_slopes, attn_type=attn_type,
                        shared_layer=kv_sharing_target_layer_name, more=more)
        self.kv_cache_dtype = kv_cache_dtype
        self.attention = attention_of(config, self.scale, float(logits_soft_cap or 0))
        context = config.compilation_config.static_forward_context
        self._layer = sum(name.startswith("crumb_recent.") for name in context)
        geometry = geometry_of(head_size)
        # vLLM 0.26 gives memory the type of its specification; later versions look at the bytes,
        # and fill new blocks with zeros if groups have different types.
        rows_type = torch.bfloat16 if SPECS_HAVE_CONTENT else torch.uint8
        common = dict(block_size=BLOCK_TOKENS, num_kv_heads=self.num_kv_heads,
                      head_size=head_size, dtype=rows_type,
                      state_content_bytes=geometry.tile_bytes // BLOCK_TOKENS)
        self._recent = Rows(f"crumb_recent.{self._layer}",
                            RecentSpec(request_blocks=geometry.recent_blocks, **common),
                            self.attention)
        self._sink = Rows(f"crumb_sink.{self._layer}",
                          SinkSpec(request_blocks=geometry.sink_blocks, **common),
                          self.attention)
        for rows in (self._recent, self._sink):
            context[rows.name] = rows
        self._tile_bytes = geometry.tile_bytes
        self._pool: Any = None
        self._layers = context

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if SPECS_HAVE_CONTENT:
            return
        # vLLM 0.26 does not query the backend for the memory that a layer needs.
        for layer in self._layers.values():
            if getattr(layer, "impl", None) is self:
                given = layer.get_kv_cache_spec
                layer.get_kv_cache_spec = (
                    lambda config: CrumbAttentionBackend.customize_spec(given(config)))

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                kv_cache: torch.Tensor, attn_metadata: Optional[GroupMetadata],
                output: torch.Tensor, output_scale: Optional[torch.Tensor] = None,
                output_block_scale: Optional[torch.Tensor] = None) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise InvalidArgument("Crumb's attention writes BF16, not quantized output")
        if attn_metadata is None:  # vLLM measures memory
            return output
        if self._pool is None or self._pool.history != kv_cache.data_ptr():
            self._pool = self._pool_of(kv_cache)
        batch, step = self._batch_of(attn_metadata)
        given = query.contiguous() if query.is_cuda else query
        self.attention.attend(self._layer, self._pool, batch, step,
                              fresh_rows(*(_rows(x) for x in (given, key, value, output))))
        return output

    def _pool_of(self, history: torch.Tensor) -> Any:
        """crumb_block_pool of this layer."""
        wanted = (self.num_kv_heads, BLOCK_TOKENS, self._tile_bytes // BLOCK_TOKENS)
        inside = (self._tile_bytes, wanted[2], 1)
        for cache in (history, self._sink.kv_cache, self._recent.kv_cache):
            view = cache.view(torch.uint8)
            if tuple(view.shape[1:]) != wanted or view.stride()[1:] != inside:
                raise InvalidArgument(f"vLLM's cache has the shape {tuple(view.shape)} and strides "
                                      f"{view.stride()}, which is no layout that Crumb knows")
            if view.stride(0) != history.stride(0):
                raise InvalidArgument("vLLM's groups have blocks of different sizes")
        return BlockPool(history.data_ptr(), self._sink.kv_cache.data_ptr(),
                         self._recent.kv_cache.data_ptr(), history.stride(0),
                         history.shape[0]).struct()

    def _batch_of(self, history: GroupMetadata) -> Any:
        """crumb_block_batch and crumb_block_step of this step, which all layers share."""
        if history.batch is None:
            groups = get_forward_context().attn_metadata
            batch = BlockBatch(
                history.requests, history.query_start.data_ptr(), history.lengths.data_ptr(),
                history.table(), groups[self._sink.name].table(),
                groups[self._recent.name].table()).struct()
            history.batch = batch, block_step(history.decodes, history.tokens,
                                              history.tokens_max)
        return history.batch


def _rows(tensor: torch.Tensor) -> Tuple[int, int]:
    """Address and elements between two tokens of [tokens, heads, head_dim] or [tokens, heads *
    head_dim]."""
    inner = tensor[0] if tensor.shape[0] else tensor
    if tensor.dtype != torch.bfloat16 or not inner.is_contiguous():
        raise InvalidArgument(f"rows must be BF16 with adjacent heads, not {tensor.dtype} of "
                              f"strides {tensor.stride()}")
    return tensor.data_ptr(), tensor.stride(0)
