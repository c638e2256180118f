# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Jobs that the connector's scheduler gives to its workers, and the places of pages in blocks.

A page is PAGE_TOKENS tokens of the sequence; a block is the unit of the engine's KV cache, of any
size. This module imports neither vLLM nor the library.
"""

import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Tuple

PAGE_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class LoadJob:
    """Pages [first_page, len(keys)) of a request that a worker loads under a lease.

    `keys` are those of all pages from the first one of the sequence on; `blocks` is the request's
    block table up to the last page; `lease` is the token of the scheduler's lease.
    """

    request_id: str
    lease: bytes
    keys: Tuple[bytes, ...]
    first_page: int
    blocks: Tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StoreJob:
    """Pages first_page, first_page + 1, ... of a request that a worker stores.

    `keys` are theirs, `parent` is the key of the page before them (32 zero bytes if first_page is
    0). `over_int2_prefix`: they were computed over a prefix that was loaded from INT2 pages.
    """

    request_id: str
    keyspace: bytes
    keys: Tuple[bytes, ...]
    first_page: int
    parent: bytes
    blocks: Tuple[int, ...]
    over_int2_prefix: bool


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """Says where a request's pages lie in the engine's KV cache groups.

    block_tokens: of a block of the group `pages`. front: the group whose blocks stand in front of
    the others in a block table, `front_blocks` of them for each request; None: there is none.
    """

    block_tokens: int
    pages: int = 0
    front: Optional[int] = None
    front_blocks: int = 0

    def table(self, groups: Sequence[Sequence[int]]) -> List[int]:
        """The block table of a request with these blocks of each group."""
        front = [] if self.front is None else list(groups[self.front])
        return front + list(groups[self.pages])

    def added(self, groups: Sequence[Sequence[int]]) -> Sequence[int]:
        """Returns the new blocks of each group, which follow its last one."""
        return groups[self.pages]

    def first_block(self, page: int) -> int:
        """The entry of a table in which a page begins."""
        return self.front_blocks + page * PAGE_TOKENS // self.block_tokens

    def blocks_of(self, pages: int) -> int:
        """Entries of a table in front of the end of the first `pages` pages."""
        return self.front_blocks + -(-pages * PAGE_TOKENS // self.block_tokens)

    def pages_in(self, blocks: int) -> int:
        """Pages that a table of so many entries has room for."""
        return max(0, blocks - self.front_blocks) * self.block_tokens // PAGE_TOKENS


class BlocksBeingStored:
    """Finds the steps that write blocks which stores of earlier steps may still read: a request that
    ends or is preempted gives its blocks back while its last pages are copied.

    Used by the scheduler. Stores are in order, so that the number of a step says which ones are
    meant.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._step = 0
        self._last_read: Dict[int, int] = {}  # the step of each block's latest store

    def next_step(self, output: Any, loads: Sequence[LoadJob],
                  stores: Sequence[StoreJob]) -> Tuple[int, int]:
        """Returns the number of the step of `output` (vLLM's SchedulerOutput), and that of the last
        step whose stores it must wait for (0: none)."""
        self._step += 1
        behind = 0
        for block in self._written(output, loads):
            behind = max(behind, self._last_read.pop(block, 0))
        for job in stores:
            for block in job.blocks[self._layout.first_block(job.first_page):]:
                self._last_read[block] = self._step
        return self._step, behind

    def _written(self, output: Any, loads: Sequence[LoadJob]) -> List[int]:
        """Blocks that the step's requests received. Those in front of their computed tokens are
        left out: they are hits, which are only read, or were loaded."""
        blocks: List[int] = []
        for job in loads:
            blocks.extend(job.blocks[self._layout.first_block(job.first_page):])
        for new in output.scheduled_new_reqs:
            blocks.extend(self._behind(new.block_ids, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            if request_id in cached.resumed_req_ids:
                blocks.extend(self._behind(cached.new_block_ids[i] or (),
                                           cached.num_computed_tokens[i]))
            elif cached.new_block_ids[i]:
                blocks.extend(self._layout.added(cached.new_block_ids[i]))
        return blocks

    def _behind(self, groups: Sequence[Sequence[int]], computed: int) -> List[int]:
        table = self._layout.table(groups) if groups else []
        return table[self._layout.front_blocks + computed // self._layout.block_tokens:]
