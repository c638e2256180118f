# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The blocks that vLLM allocates for a request: history blocks as it grows, and a fixed number of
blocks for the BF16 rows of the sink and of the recent window.

All three kinds have the same bytes, so that any block of the pool serves any of them. A block of 64
tokens of history has an INT2 tile for each layer and KV head.
"""

import dataclasses
from typing import Any, List, Sequence, Tuple

from vllm.v1.core.single_type_kv_cache_manager import (FullAttentionManager,
                                                       SingleTypeKVCacheManager)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheConfig
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from crumb.vllm_native.model import BLOCK_TOKENS

# The registry adds vLLM's own kinds only while it is empty: they must be there before ours.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Content:
    """state_content_bytes, the bytes of a token and KV head, for versions whose AttentionSpec
    derives them from the data type alone."""

    state_content_bytes: int = 0

    @property
    def real_page_size_bytes(self) -> int:
        spec: Any = self
        return int(spec.block_size * spec.num_kv_heads * self.state_content_bytes)


class _NoContent:
    """In place of _Content for versions that have state_content_bytes."""


#: Whether specifications have the bytes of a token (vLLM 0.32; 0.26 has not).
SPECS_HAVE_CONTENT = "state_content_bytes" in AttentionSpec.__dataclass_fields__
_ContentOf: Any = _NoContent if SPECS_HAVE_CONTENT else _Content


class HistoryManager(FullAttentionManager):
    """Blocks of INT2 history, of which a prefix hit never supplies the recent window."""

    def __init__(self, kv_cache_spec: Any, **arguments: Any) -> None:
        super().__init__(kv_cache_spec, **arguments)
        self._record_new_block_ids = False  # tiles are written before they are read

    @classmethod
    def find_longest_cache_hit(cls, block_hashes: Any, max_length: int, *arguments: Any,
                               **named: Any) -> Any:
        # vLLM leaves out the last token. Of the last recent_tokens, BF16 rows are needed.
        spec = named["kv_cache_spec"]
        return super().find_longest_cache_hit(
            block_hashes, max(0, max_length + 1 - spec.recent_tokens), *arguments, **named)


@register_kv_cache_spec(manager_class=HistoryManager, uniform_type_base_spec=FullAttentionSpec)
@dataclasses.dataclass(frozen=True, kw_only=True)
class HistorySpec(_ContentOf, FullAttentionSpec):
    """INT2 tiles of one layer. recent_tokens: the least length of the BF16 window."""

    recent_tokens: int = 256

    @classmethod
    def merge(cls, specs: List[Any]) -> Any:
        if any(spec != specs[0] for spec in specs):
            raise AssertionError("layers of one group must have equal specifications")
        return specs[0]


class RowsManager(SingleTypeKVCacheManager):
    """A fixed number of blocks for every request."""

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int,
                                   new_computed_blocks: Sequence[Any], *arguments: Any,
                                   **named: Any) -> int:
        held = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        missing: int = max(0, self.kv_cache_spec.request_blocks - held)
        return missing + int(self._get_num_evictable_blocks(new_computed_blocks))

    def allocate_new_blocks(self, request_id: str, num_tokens: int,
                            num_tokens_main_model: int) -> List[Any]:
        blocks = self.req_to_blocks[request_id]
        missing = self.kv_cache_spec.request_blocks - len(blocks)
        if missing <= 0:
            return []
        new = self.block_pool.get_new_blocks(missing)
        if not blocks and self._record_new_block_ids:
            self.new_block_ids.append(new[0].block_id)
        blocks.extend(new)
        return list(new)

    def allocate_external_computed_blocks(self, request_id: str, num_local_computed_tokens: int,
                                          num_external_computed_tokens: int,
                                          record_for_zeroing: bool = True) -> None:
        self.allocate_new_blocks(request_id, 0, 0)

    def add_local_computed_blocks(self, request_id: str, new_computed_blocks: Sequence[Any],
                                  num_local_computed_tokens: int,
                                  num_external_computed_tokens: int) -> None:
        self.block_pool.touch(new_computed_blocks)
        self.req_to_blocks[request_id].extend(new_computed_blocks)

    @classmethod
    def find_longest_cache_hit(cls, block_hashes: Any, max_length: int,
                               kv_cache_group_ids: List[int], *arguments: Any,
                               **named: Any) -> Tuple[Tuple[List[Any], ...], int]:
        return tuple([] for _ in kv_cache_group_ids), 0

    def cache_blocks(self, request: Any, num_tokens: int, *arguments: Any, **named: Any) -> None:
        return

    def remove_skipped_blocks(self, *arguments: Any, **named: Any) -> None:
        return

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return 0

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0  # no kernel attends the rows of several requests at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsSpec(_ContentOf, AttentionSpec):
    """BF16 rows of one layer in blocks of the same size as a history block.

    request_blocks: blocks of a request, whatever its length.
    """

    request_blocks: int

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return int(self.request_blocks * self.page_size_bytes)

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        # vLLM maps positions to slots in every table and reads an entry for every 64 tokens.
        return max(self.request_blocks, -(-max_len // BLOCK_TOKENS))

    def is_uniform_with_collection(self, kv_cache_specs: Any) -> bool:
        return all(type(spec) is type(self) for spec in kv_cache_specs.values())

    @property
    def uses_slot_mapping(self) -> bool:
        return False


class RecentManager(RowsManager):
    """Blocks that no other request can use, and that a prefix hit therefore does not need."""

    def __init__(self, kv_cache_spec: Any, **arguments: Any) -> None:
        super().__init__(kv_cache_spec, **arguments)
        self._record_new_block_ids = True  # vLLM fills recorded blocks with zeros

    @classmethod
    def find_longest_cache_hit(cls, block_hashes: Any, max_length: int,
                               kv_cache_group_ids: List[int], *arguments: Any,
                               **named: Any) -> Tuple[Tuple[List[Any], ...], int]:
        return tuple([] for _ in kv_cache_group_ids), max_length


@register_kv_cache_spec(manager_class=RecentManager)
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecentSpec(RowsSpec):
    """Rows of the recent window, which no other request can use. The first block of a new request
    is filled with zeros by vLLM."""

    @property
    def prefix_cacheable(self) -> bool:
        return False


class SinkManager(RowsManager):
    """Blocks of a request's first 64 tokens, which requests with the same first tokens share."""

    def __init__(self, kv_cache_spec: Any, **arguments: Any) -> None:
        super().__init__(kv_cache_spec, **arguments)
        self._record_new_block_ids = False

    @staticmethod
    def _names(block_hash: bytes, blocks: int) -> List[Any]:
        """A name for each sink block, from the hash of the first 64 tokens."""
        return [block_hash + index.to_bytes(2, "big") for index in range(blocks)]

    @classmethod
    def find_longest_cache_hit(cls, block_hashes: Any, max_length: int,
                               kv_cache_group_ids: List[int], *arguments: Any,
                               **named: Any) -> Tuple[Tuple[List[Any], ...], int]:
        spec, pool = named["kv_cache_spec"], named["block_pool"]
        found: Tuple[List[Any], ...] = tuple([] for _ in kv_cache_group_ids)
        if max_length < BLOCK_TOKENS or len(block_hashes) == 0:
            return found, 0
        for name in cls._names(block_hashes[0], spec.request_blocks):
            blocks = pool.get_cached_block(name, kv_cache_group_ids)
            if not blocks:
                return tuple([] for _ in kv_cache_group_ids), 0
            for group, block in zip(found, blocks):
                group.append(block)
        return found, max_length

    def cache_blocks(self, request: Any, num_tokens: int, *arguments: Any, **named: Any) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        blocks = self.req_to_blocks.get(request.request_id, ())
        if num_tokens < BLOCK_TOKENS or not blocks or blocks[0].block_hash is not None:
            return
        names = self._names(request.block_hashes[0], len(blocks))
        for name, block in zip(names, blocks):
            self.block_pool._insert_block_hash(
                make_block_hash_with_group_id(name, self.kv_cache_group_id), block,
                num_tokens=BLOCK_TOKENS)


@register_kv_cache_spec(manager_class=SinkManager)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkSpec(RowsSpec):
    """Rows of the first 64 tokens."""


def _fill_recent_blocks_with_zeros() -> None:
    """Lets vLLM 0.26 fill new blocks with zeros, which it does for models with Mamba layers only.
    Later versions do it for every cache of bytes."""
    given: Any = KVCacheConfig.needs_kv_cache_zeroing

    def needed(config: Any) -> bool:
        rows = (isinstance(group.kv_cache_spec, RowsSpec) for group in config.kv_cache_groups)
        return bool(given.fget(config)) or any(rows)

    KVCacheConfig.needs_kv_cache_zeroing = property(needed)


if not SPECS_HAVE_CONTENT:
    _fill_recent_blocks_with_zeros()
