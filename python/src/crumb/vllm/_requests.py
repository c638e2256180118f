# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the connector: which pages each request loads and stores.

This module does not import vLLM. It works on the few attributes of vLLM's `Request` and
`SchedulerOutput` that it names, so that it can be tested alone and against several versions.

A page is PAGE_TOKENS tokens of the sequence; a block is the unit of the engine's KV cache, of any
size. Only whole pages are stored, and only pages of which every token is known: a draft token that
the target model may still reject, or a placeholder of asynchronous scheduling, is never in
`Request.all_token_ids`, and pages that reach beyond its end are not stored.
"""

import concurrent.futures
import dataclasses
import hashlib
import math
import time
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple

PAGE_TOKENS = 64
# Tokens at the end of a prompt that are recomputed even if their pages are stored as INT2: the
# recent window, which attention reads in BF16. Exact pages (BF16) need one token to be computed,
# for its logits.
RECENT_TOKENS = 256
NO_EXTRA = bytes(32)
# Lookups at once that wait for pages on SSD and other nodes. Further ones queue.
LOOKUPS_MAX = 4
# Seconds that the scheduler waits for a lookup before it schedules other requests. Pages in host
# memory are found in one to three milliseconds.
PATIENCE_SECONDS = 0.005


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
        """Returns what new blocks of each group add to its end."""
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


class Lease(Protocol):
    """Pages that crumbd keeps for this engine until `close`."""

    token: bytes
    pages: int

    @property
    def arrived_pages(self) -> int: ...

    @property
    def late(self) -> bool: ...

    def close(self) -> None: ...


class Policy(Protocol):
    """Load or recompute: _policy.LoadPolicy."""

    def worth_loading(self, tokens: int) -> bool: ...

    def worth_waiting(self, tokens: int) -> bool: ...

    def arrived(self, tokens: int, seconds: float) -> None: ...


class PageStore(Protocol):
    """The part of crumb.Transfer that the scheduler uses."""

    def keyspace(self) -> bytes: ...

    def keys(self, keyspace: bytes, token_ids: Sequence[int],
             extra: Sequence[bytes]) -> List[bytes]: ...

    def acquire(self, keyspace: bytes, keys: Sequence[bytes], deadline: float) -> Lease: ...


def page_extras(request: Any, pages: int, private: bytes = b"",
                adapter_digest: Callable[[str], Optional[str]] = lambda path: None) -> List[bytes]:
    """Digests of what pages depend on beside their tokens, one for each of the first `pages` pages.

    The first page carries the LoRA adapter, the cache salt and `private`, if pages are shared with
    no other engine; a page in which multimodal items begin carries their hashes. Keys are chained,
    so that every later page depends on them as well. An adapter stands with the digest of its
    weights. Without one, when `adapter_digest` finds no files, it stands with its name, number and
    path.
    """
    parts: Dict[int, List[str]] = {}
    if private:
        parts.setdefault(0, []).append(f"private\0{private.hex()}")
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        path = getattr(lora, "lora_path", "")
        digest = adapter_digest(path)
        parts.setdefault(0, []).append(
            f"lora digest\0{digest}" if digest is not None else
            f"lora\0{lora.lora_name}\0{lora.lora_int_id}\0{path}")
    salt = getattr(request, "cache_salt", None)
    if salt:
        parts.setdefault(0, []).append(f"salt\0{salt}")
    for feature in getattr(request, "mm_features", None) or ():
        position = feature.mm_position
        parts.setdefault(position.offset // PAGE_TOKENS, []).append(
            f"item\0{feature.identifier}\0{position.offset}\0{position.length}")
    extras = []
    for page in range(pages):
        named = parts.get(page)
        extras.append(hashlib.sha256("\0\0".join(named).encode()).digest() if named else NO_EXTRA)
    return extras


@dataclasses.dataclass(frozen=True)
class _Found:
    """The result of a lookup."""

    lease: Lease
    waited_seconds: Optional[float]  # None: it did not wait for pages on SSD and other nodes


@dataclasses.dataclass
class _Tracked:
    """A request between its arrival and its end."""

    request: Any
    keyspace: bytes
    keys: List[bytes] = dataclasses.field(default_factory=list)
    blocks: List[int] = dataclasses.field(default_factory=list)
    stored_pages: int = 0  # leading pages that are in crumbd, or were given to a worker to store
    refused: List[Tuple[int, int]] = dataclasses.field(default_factory=list)  # those it refused
    lookup: Optional["concurrent.futures.Future[_Found]"] = None  # under way
    lease: Optional[Lease] = None
    load_pages: Tuple[int, int] = (0, 0)  # pages [first, end) that are to be loaded
    wanted: bool = True  # loading was predicted to beat computing
    loaded: bool = False  # pages of it came from crumbd
    stale: bool = False  # it was computed with other weights, in part
    failed: bool = False  # a load of it failed: it is computed


class Requests:
    """Follows every request of one scheduler and says what its workers load and store.

    page_store: crumbd. layout: the engine's blocks. exact: stored pages are BF16.
    deadline: seconds that a lookup may wait for pages on SSD and other nodes; other requests run
    meanwhile. policy: whether loading is predicted to beat computing. patience: seconds that
    `matched_tokens` waits for a new lookup. adapter_digest: the digest of the LoRA adapter in a
    folder, None if there is none. engine_id: what no other engine has, for `reset`.
    """

    def __init__(self, page_store: PageStore, layout: BlockLayout, exact: bool, deadline: float,
                 policy: Policy, patience: float = PATIENCE_SECONDS,
                 adapter_digest: Callable[[str], Optional[str]] = lambda path: None,
                 engine_id: bytes = b"") -> None:
        self._store = page_store
        self._layout = layout
        # Loaded prefixes end where a page and a block end.
        self._step = math.lcm(layout.block_tokens, PAGE_TOKENS)
        self._exact = exact
        self._deadline = deadline
        self._policy = policy
        self._patience = patience
        self._adapter_digest = adapter_digest
        self._engine_id = engine_id
        self._resets = 0
        self._tracked: Dict[str, _Tracked] = {}
        self._loading: List[str] = []
        self._lookups = concurrent.futures.ThreadPoolExecutor(LOOKUPS_MAX, "crumb-lookup")

    def __len__(self) -> int:
        return len(self._tracked)

    def close(self) -> None:
        """Ends all requests and waits for their lookups."""
        for request_id in list(self._tracked):
            self.finished(request_id)
        self._lookups.shutdown(wait=True)

    def matched_tokens(self, request: Any, computed_tokens: int) -> Optional[int]:
        """Tokens behind the first `computed_tokens` that crumbd can supply; None: the lookup is
        still under way, and the engine asks again.

        The pages stay leased until the load is over or the request ends. May be called again for
        the same request; the lease of the call before is given back then.
        """
        tracked = self._track(request)
        self._release(tracked)
        skips = getattr(request, "skip_reading_prefix_cache", False)
        if skips or tracked.stale or tracked.failed or not _has_tokens(request):
            return 0
        recomputed = 1 if self._exact else RECENT_TOKENS
        most = (request.num_tokens - recomputed) // self._step * self._step
        if most - computed_tokens < PAGE_TOKENS:
            # Pages in the engine's own prefix cache were stored when they were computed.
            tracked.stored_pages = max(tracked.stored_pages, computed_tokens // PAGE_TOKENS)
            return 0
        found = self._found(tracked, most - computed_tokens)
        if found is None:
            return None
        tracked.stored_pages = max(tracked.stored_pages, found.pages)
        end = min(most, found.pages * PAGE_TOKENS // self._step * self._step)
        matched: int = end - computed_tokens
        if matched <= 0 or not tracked.wanted:
            found.close()
            return 0
        tracked.lease = found
        tracked.load_pages = (computed_tokens // PAGE_TOKENS, end // PAGE_TOKENS)
        return matched

    def _found(self, tracked: _Tracked, tokens: int) -> Optional[Lease]:
        """The prefix of the request that crumbd has, for a load of at most `tokens` tokens; None:
        it is not known yet."""
        patience = 0.0
        if tracked.lookup is None:
            tracked.wanted = self._policy.worth_loading(tokens)
            waits = tracked.wanted and self._policy.worth_waiting(tokens)
            # All pages of the prompt are looked up, those that are not worth loading and those
            # behind the last one to load, too: pages that exist need not be stored again.
            keys = self._keys(tracked, tracked.request.num_tokens // PAGE_TOKENS)
            tracked.lookup = self._lookups.submit(self._look_up, tracked.keyspace, keys,
                                                  self._deadline if waits else 0.0)
            patience = self._patience
        try:
            found = tracked.lookup.result(patience)
        except concurrent.futures.TimeoutError:
            return None
        tracked.lookup = None
        lease = found.lease
        if found.waited_seconds is not None and (lease.arrived_pages > 0 or lease.late):
            self._policy.arrived(lease.arrived_pages * PAGE_TOKENS, found.waited_seconds)
        return lease

    def _look_up(self, keyspace: bytes, keys: Sequence[bytes], deadline: float) -> _Found:
        begin = time.monotonic()
        lease = self._store.acquire(keyspace, keys, deadline)
        return _Found(lease, time.monotonic() - begin if deadline > 0 else None)

    def allocated(self, request: Any, groups: Sequence[Sequence[int]],
                  external_tokens: int) -> None:
        """The engine has given the request these blocks of each group, and loads `external_tokens`
        tokens of it from crumbd (0: none)."""
        tracked = self._track(request)
        tracked.blocks = self._layout.table(groups)
        if external_tokens > 0 and tracked.lease is not None:
            self._loading.append(request.request_id)
        else:
            self._release(tracked)

    def loads(self) -> List[LoadJob]:
        """The loads of requests that were allocated since the last call."""
        jobs = []
        for request_id in self._loading:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.lease is None:
                continue
            first, end = tracked.load_pages
            tracked.loaded = True
            jobs.append(LoadJob(request_id, tracked.lease.token, tuple(tracked.keys[:end]), first,
                                self._blocks(tracked, end)))
        self._loading = []
        return jobs

    def stores(self, output: Any) -> List[StoreJob]:
        """The pages that are complete when the step of `output` (vLLM's SchedulerOutput) is over
        and are not stored yet."""
        jobs: List[StoreJob] = []
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.blocks = self._layout.table(new.block_ids)
                self._add_store(jobs, tracked, new.num_computed_tokens,
                                output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                tracked.blocks = self._layout.table(blocks) if blocks else []
            elif blocks:
                tracked.blocks.extend(self._layout.added(blocks))
            self._add_store(jobs, tracked, cached.num_computed_tokens[i],
                            output.num_scheduled_tokens[request_id])
        return jobs

    def load_finished(self, request_id: str) -> None:
        """The workers have loaded the request's pages, or failed to."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            self._release(tracked)

    def load_failed(self, request_id: str) -> None:
        """Pages of the request did not arrive: all of it is stored again once it is computed."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.failed = True
            tracked.stored_pages = min(tracked.stored_pages, tracked.load_pages[0])
            self._release(tracked)

    def store_refused(self, request_id: str, first_page: int, end_page: int) -> None:
        """A worker had no memory for these pages: they are stored in the next step."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and (first_page, end_page) not in tracked.refused:
            tracked.refused.append((first_page, end_page))

    def finished(self, request_id: str) -> None:
        """The request has ended in whatever way."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        self._release(tracked)
        if tracked.lookup is not None and not tracked.lookup.cancel():
            tracked.lookup.add_done_callback(_give_back)

    def reset(self) -> bool:
        """The weights may have changed: from now on this engine shares pages with no other, nor
        with its own past. Requests that have blocks may hold rows of the weights before: nothing of
        them is stored or loaded any more. False: such rows are being loaded now."""
        self._resets += 1
        loading = False
        for request_id, tracked in list(self._tracked.items()):
            if tracked.blocks:
                tracked.stale = True
                loading |= tracked.lease is not None
            else:
                self.finished(request_id)  # and tracked again when the engine asks for it
        return not loading

    def _private(self) -> bytes:
        return self._engine_id + self._resets.to_bytes(8, "little") if self._resets else b""

    def _add_store(self, jobs: List[StoreJob], tracked: _Tracked, computed: int,
                   scheduled: int) -> None:
        if tracked.stale or not _has_tokens(tracked.request):
            return
        known = min(computed + scheduled, tracked.request.num_tokens)
        end = min(known // PAGE_TOKENS, self._layout.pages_in(len(tracked.blocks)))
        # A request that was preempted has not computed all of its refused pages again yet.
        again = [pages for pages in tracked.refused if pages[1] <= end]
        tracked.refused = [pages for pages in tracked.refused if pages[1] > end]
        if end > tracked.stored_pages:
            again.append((tracked.stored_pages, end))
            tracked.stored_pages = end
        for first, last in again:
            keys = self._keys(tracked, last)
            jobs.append(StoreJob(tracked.request.request_id, tracked.keyspace,
                                 tuple(keys[first:last]), first,
                                 keys[first - 1] if first else NO_EXTRA,
                                 self._blocks(tracked, last),
                                 tracked.loaded and not self._exact))

    def _blocks(self, tracked: _Tracked, end_page: int) -> Tuple[int, ...]:
        return tuple(tracked.blocks[:self._layout.blocks_of(end_page)])

    def _track(self, request: Any) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = _Tracked(request, self._store.keyspace())
            self._tracked[request.request_id] = tracked
        return tracked

    def _keys(self, tracked: _Tracked, pages: int) -> List[bytes]:
        if len(tracked.keys) < pages:
            tokens = tracked.request.all_token_ids[:pages * PAGE_TOKENS]
            tracked.keys = self._store.keys(tracked.keyspace, list(tokens),
                                            page_extras(tracked.request, pages, self._private(),
                                                        self._adapter_digest))
        return tracked.keys[:pages]

    @staticmethod
    def _release(tracked: _Tracked) -> None:
        if tracked.lease is not None:
            tracked.lease.close()
            tracked.lease = None


def _give_back(lookup: "concurrent.futures.Future[_Found]") -> None:
    """Ends the lease of a lookup that has ended, and whose request is gone."""
    if lookup.exception() is None:
        lookup.result().lease.close()


def _has_tokens(request: Any) -> bool:
    """Whether token ids name the prompt: a prompt of embeddings has none."""
    return request.prompt_token_ids is not None and getattr(request, "prompt_embeds", None) is None
