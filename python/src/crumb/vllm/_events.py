# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV events of pages that are stored in crumbd, and of those that are found there.

vLLM itself announces the blocks of its own cache, those that were loaded from crumbd included
(medium "GPU"). The events here say that crumbd has the blocks too, and in which tier.
"""

from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils

from crumb.client import Tier
from crumb.vllm._jobs import PAGE_TOKENS
from crumb.vllm._lookups import Lease

# The tier of a page -> an event's medium and locality.
PLACES = {Tier.DEVICE: ("GPU", "LOCAL"), Tier.HOST: ("CPU", "LOCAL"),
          Tier.SSD: ("STORAGE", "LOCAL"), Tier.REMOTE: ("CPU", "REMOTE")}
OWNERSHIP = "crumb"
# Events that are kept until vLLM takes them, which it does at every step.
EVENTS_MAX = 65536


class KvEvents:
    """Collects the events of one scheduler.

    block_tokens: tokens of a block of vLLM's block hashes. group: the KV cache group of pages.
    """

    def __init__(self, block_tokens: int, group: int) -> None:
        self._block_tokens = block_tokens
        self._group = group
        self._events: List[Any] = []

    def announce(self, request: Any, first_page: int, end_page: int,
                 lease: Optional[Lease]) -> None:
        """Pages [first_page, end_page) of a request were given to crumbd, or, with a lease, are
        loaded from it."""
        begin = first_page * PAGE_TOKENS // self._block_tokens
        end = min(end_page * PAGE_TOKENS // self._block_tokens, len(request.block_hashes))
        for first, last, tier in self._runs(begin, end, lease):
            if len(self._events) < EVENTS_MAX:
                self._events.append(self._stored(request, first, last, tier))

    def take(self) -> List[Any]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _runs(self, begin: int, end: int,
              lease: Optional[Lease]) -> Iterator[Tuple[int, int, Tier]]:
        """Blocks [first, last) that are in one tier."""
        first = begin
        for block in range(begin, end):
            tier = self._tier_of(block, lease)
            if block + 1 == end or self._tier_of(block + 1, lease) is not tier:
                yield first, block + 1, tier
                first = block + 1

    def _tier_of(self, block: int, lease: Optional[Lease]) -> Tier:
        """Stored pages are in host memory first. A block is where its last page is."""
        if lease is None:
            return Tier.HOST
        tiers: Sequence[Tier] = lease.tiers
        return tiers[((block + 1) * self._block_tokens - 1) // PAGE_TOKENS]

    def _stored(self, request: Any, first: int, last: int, tier: Tier) -> Any:
        convert = kv_cache_utils.maybe_convert_block_hash
        hashes, lora = request.block_hashes, request.lora_request
        medium, locality = PLACES.get(tier, PLACES[Tier.HOST])
        members: Dict[str, Any] = {
            "block_hashes": [convert(hashes[block]) for block in range(first, last)],
            "parent_block_hash": convert(hashes[first - 1]) if first else None,
            "token_ids": list(request.all_token_ids[first * self._block_tokens:
                                                    last * self._block_tokens]),
            "block_size": self._block_tokens,
            "lora_id": lora.adapter_id if lora else None,
            "lora_name": lora.name if lora else None,
            "medium": medium, "locality": locality, "ownership": OWNERSHIP,
            "extra_keys": self._extra_keys(request, first, last), "group_idx": self._group,
            "session_id": getattr(request, "session_id", None)}
        known = kv_events.BlockStored.__struct_fields__  # 0.26 has fewer
        return kv_events.BlockStored(**{name: value for name, value in members.items()
                                        if name in known})

    def _extra_keys(self, request: Any, first: int, last: int) -> Any:
        """Cache salt, LoRA adapter and images on which the hashes of blocks depend."""
        keys, item = [], 0
        for block in range(first, last):
            key, item = kv_cache_utils.generate_block_hash_extra_keys(
                request, block * self._block_tokens, (block + 1) * self._block_tokens, item)
            keys.append(key)
        untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)
        return untagged(keys) if untagged is not None else keys


def enabled(vllm_config: Any) -> bool:
    """Whether the user of vLLM wants KV events (--kv-events-config)."""
    config = vllm_config.kv_events_config
    return bool(config is not None and config.enable_kv_cache_events)


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any, block_tokens: int) -> int:
    """Tokens of a block of vLLM's block hashes. block_tokens: of a block of the pages' group."""
    resolve = getattr(kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    return int(resolve(kv_cache_config, vllm_config)[1]) if resolve is not None else block_tokens
