# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Positions of pages in their sequences, which SGLang's interface for linkers leaves out.

SGLang gives a linker the hashes of the pages that it looks up, loads or offloads, and nothing of
the pages before them. Crumb needs both: the first page of a sequence stays in BF16, positions
decide which node of a cluster has a page, and a lease covers a prefix from the first page on. The
class below is SGLang's own caller of linkers, which reads these hashes from the radix tree and
gives them to the linker right before each call.
"""

import abc
from typing import Any, Callable, List, Optional, Sequence

import torch
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (UnifiedCacheLinker,
                                                                     UnifiedCacheLinkerWrapper)

from crumb.errors import FailedPrecondition

Agree = Callable[[bool], bool]

# Methods of SGLang's class that are extended here: private to SGLang.
EXTENDED = ("_tail_hashes", "_offload_node", "release_request", "match")


class PositionedLinker(UnifiedCacheLinker):
    """A linker that learns the positions of pages."""

    @abc.abstractmethod
    def attach(self, agree: Agree) -> None:
        """Called once, before all other calls. agree(own): whether `own` is true on every rank;
        every rank must call it."""

    @abc.abstractmethod
    def begin_call(self, before: Sequence[str], namespace: Optional[str]) -> None:
        """`before` are the hashes of all pages of the sequence in front of those of the lookup or
        offload that follows. namespace: SGLang's extra_key of the sequence, which ends with the id
        of its LoRA adapter."""

    @abc.abstractmethod
    def forget(self, rid: str) -> None:
        """The request was aborted: it is not looked up again."""


class PositionedLinkerWrapper(UnifiedCacheLinkerWrapper):
    """Calls a linker as SGLang does, and a PositionedLinker's further methods."""

    def __init__(self, cache: Any, cache_linker: Any) -> None:
        super().__init__(cache, cache_linker)
        # A linker of another project (None) is called exactly as by SGLang's own class.
        self._positioned = cache_linker if isinstance(cache_linker, PositionedLinker) else None
        if self._positioned is not None:
            self._positioned.attach(self._all_agree)

    def _all_agree(self, own: bool) -> bool:
        flag = torch.tensor([int(own)], dtype=torch.int)
        self.cache._all_reduce_attn_groups(flag, torch.distributed.ReduceOp.MIN)
        return bool(flag.item())

    def _tail_hashes(self, key: Any, result: Any, device_hit_len: int) -> List[str]:
        tail: List[str] = super()._tail_hashes(key, result, device_hit_len)
        if tail and self._positioned is not None:
            core, before = self.cache.tree_core, []
            if device_hit_len > 0:
                before = [*core.get_prefix_hash_values(result.last_device_node),
                          *core.get_hash_values(result.last_device_node)]
            if len(before) * self.cache.page_size != device_hit_len:
                return []  # the position of the tail is not known: nothing of it is looked up
            self._positioned.begin_call(before, key.extra_key)
        return tail

    def _offload_node(self, node_id: Any, transfers: List[Any]) -> None:
        if self._positioned is not None:
            core = self.cache.tree_core
            node = core.snapshot_buffer_backup(node_id, False)
            if node is not None:
                self._positioned.begin_call(core.get_prefix_hash_values(node_id),
                                            node.key.extra_key)
        super()._offload_node(node_id, transfers)

    def release_request(self, rid: str) -> None:
        super().release_request(rid)
        if self._positioned is not None:
            self._positioned.forget(rid)


def install() -> None:
    """Makes SGLang call linkers of this process by PositionedLinkerWrapper. Raises
    FailedPrecondition if this version of SGLang is not known."""
    missing = [name for name in EXTENDED if not callable(getattr(UnifiedCacheLinkerWrapper, name,
                                                                 None))]
    if missing or not hasattr(unified_radix_cache, "UnifiedCacheLinkerWrapper"):
        raise FailedPrecondition("CrumbLinker knows SGLang 0.5.23, and the installed version has "
                                 "no UnifiedCacheLinkerWrapper with "
                                 f"{', '.join(missing or EXTENDED)}")
    unified_radix_cache.UnifiedCacheLinkerWrapper = PositionedLinkerWrapper
