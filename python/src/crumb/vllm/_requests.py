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

import dataclasses
import math
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple

from crumb.vllm._jobs import PAGE_TOKENS, BlockLayout, LoadJob, StoreJob
from crumb.vllm._keys import NO_EXTRA, Adapters, RoundedPages, page_extras
from crumb.vllm._lookups import Found, Lease, Lookup, Lookups, Opening, PageStore, Wanted
from crumb.vllm._policy import NO_PATIENCE, Patience

# Tokens at the end of a prompt that are recomputed even if their pages are stored as INT2: the
# recent window, which attention reads in BF16. Exact pages (BF16) need one token to be computed,
# for its logits.
RECENT_TOKENS = 256
# Seconds that the scheduler waits for a lookup before it schedules other requests. Pages in host
# memory are found in one to three milliseconds.
PATIENCE_SECONDS = 0.005
# Seconds after which requests no longer wait for crumbd to open their keyspace, and are computed.
OPENING_PATIENCE_SECONDS = 0.2
# Pages of an engine's own cache that are known to be rounded, if its size is not given.
ROUNDED_PAGES_MAX = 65536

# Receives pages [first, end) of a request: stored ones without a lease, loaded ones with it.
Announce = Callable[[Any, int, int, Optional[Lease]], None]


class Policy(Protocol):
    """Load or recompute: _policy.LoadPolicy."""

    def worth_loading(self, tokens: int, queued_tokens: int) -> bool: ...

    def patience(self, tokens: int, queued_tokens: int, deadline: float) -> Patience: ...

    def arrived(self, tokens: int, seconds: float, late: bool) -> None: ...


@dataclasses.dataclass
class _Tracked:
    """A request between its arrival and its end."""

    request: Any
    opening: Opening
    keyspace: Optional[bytes] = None  # unset until crumbd has responded
    waited: bool = False  # the scheduler has waited for the keyspace
    keys: List[bytes] = dataclasses.field(default_factory=list)
    blocks: List[int] = dataclasses.field(default_factory=list)
    stored_pages: int = 0  # leading pages that are in crumbd, or were given to a worker to store
    refused: List[Tuple[int, int]] = dataclasses.field(default_factory=list)  # those it refused
    lookup: Optional[Lookup] = None  # a lookup that has not ended
    lease: Optional[Lease] = None
    # Computed tokens of the latest call of matched_tokens, and the tokens that crumbd can supply
    # behind them; None: there is no result that is still valid.
    matched: Optional[Tuple[int, int]] = None
    load_pages: Tuple[int, int] = (0, 0)  # pages [first, end) that are to be loaded
    wanted: bool = True  # loading was predicted to beat computing
    own_tokens: int = 0  # leading tokens that the engine's own prefix cache had
    rounded: bool = False  # it is computed over pages that were loaded as INT2
    stale: bool = False  # it was computed with other weights, in part
    failed: bool = False  # a load of it failed: it is computed


class Requests:
    """Follows every request of one scheduler and lists the pages that its workers load and store.

    page_store: crumbd. layout: the engine's blocks. exact: stored pages are BF16.
    deadline: seconds that a lookup may wait for pages on SSD and other nodes; other requests run
    meanwhile. policy: whether loading is predicted to beat computing. patience: seconds that
    `matched_tokens` waits for a new lookup. adapter_digest: the digest of the LoRA adapter in a
    folder, None if there is none. engine_id: an identifier of this engine alone, for `reset`. cache_pages:
    pages that the engine's own cache has room for. announce: receives stored and loaded pages.
    """

    def __init__(self, page_store: PageStore, layout: BlockLayout, exact: bool, deadline: float,
                 policy: Policy, patience: float = PATIENCE_SECONDS,
                 adapter_digest: Callable[[str], Optional[str]] = lambda path: None,
                 engine_id: bytes = b"", cache_pages: int = ROUNDED_PAGES_MAX,
                 announce: Optional[Announce] = None) -> None:
        self._store = page_store
        self._layout = layout
        # Loaded prefixes end where a page and a block end.
        self._step = math.lcm(layout.block_tokens, PAGE_TOKENS)
        self._exact = exact
        self._deadline = deadline
        self._policy = policy
        self._patience = patience
        self._adapters = Adapters(adapter_digest)
        self._engine_id = engine_id
        self._announce = announce
        self._resets = 0
        self._tracked: Dict[str, _Tracked] = {}
        self._allocated: List[str] = []  # requests whose loads the workers do not know yet
        self._loading: Dict[str, int] = {}  # tokens that the workers are loading, by request
        self._rounded = RoundedPages(cache_pages)
        self._lookups = Lookups(page_store)

    def __len__(self) -> int:
        return len(self._tracked)

    def close(self) -> None:
        """Ends all requests and waits for their lookups."""
        for request_id in list(self._tracked):
            self.finished(request_id)
        self._lookups.close()

    def matched_tokens(self, request: Any, computed_tokens: int) -> Optional[int]:
        """Tokens behind the first `computed_tokens` that crumbd can supply; None: the lookup is
        still under way, and the engine calls again.

        The pages stay leased until the load is over or the request ends. The engine calls again
        in each step in which it has no blocks for the request: result and lease stay the same while
        `computed_tokens` does.
        """
        tracked = self._track(request)
        tracked.own_tokens = computed_tokens
        if self._ignores(tracked):
            self._release(tracked)
            return 0
        if tracked.matched is not None and tracked.matched[0] == computed_tokens:
            return tracked.matched[1]
        self._release(tracked)
        recomputed = 1 if self._exact else RECENT_TOKENS
        most = (request.num_tokens - recomputed) // self._step * self._step
        if most - computed_tokens < PAGE_TOKENS:
            # Pages in the engine's own prefix cache were stored when they were computed.
            tracked.stored_pages = max(tracked.stored_pages, computed_tokens // PAGE_TOKENS)
            return self._keep_matched(tracked, computed_tokens, 0)
        if tracked.opening.late(OPENING_PATIENCE_SECONDS):
            self._abandon(tracked)
            return self._keep_matched(tracked, computed_tokens, 0)
        patience = 0.0
        if tracked.lookup is None:
            tracked.lookup = self._look_up(tracked, computed_tokens, most)
            patience = self._patience
        if not tracked.lookup.done(patience):
            return None
        return self._keep_matched(tracked, computed_tokens,
                                  self._take_found(tracked, computed_tokens, most))

    def _ignores(self, tracked: _Tracked) -> bool:
        """Whether nothing of a request is loaded."""
        request = tracked.request
        tracked.stale |= self._adapters.changed(getattr(request, "lora_request", None))
        return (getattr(request, "skip_reading_prefix_cache", False) or tracked.stale or
                tracked.failed or not _has_tokens(request))

    @staticmethod
    def _keep_matched(tracked: _Tracked, computed_tokens: int, matched: int) -> int:
        tracked.matched = (computed_tokens, matched)
        return matched

    def _look_up(self, tracked: _Tracked, computed_tokens: int, most: int) -> Lookup:
        """Starts a lookup, for a load of tokens [computed_tokens, most) at most."""
        tokens, queued = most - computed_tokens, sum(self._loading.values())
        tracked.wanted = (computed_tokens % PAGE_TOKENS == 0 and
                          self._policy.worth_loading(tokens, queued))
        patience = (self._policy.patience(tokens, queued, self._deadline) if tracked.wanted else
                    NO_PATIENCE)
        # All pages of the prompt are looked up, those that are not worth loading and those behind
        # the last one to load, too: pages that exist need not be stored again.
        known, pages = len(tracked.keys), tracked.request.num_tokens // PAGE_TOKENS
        ids, extra, parent = self._unhashed(tracked, max(known, pages))
        return self._lookups.start(Wanted(
            tracked.opening, tracked.keys[:pages], parent, ids, extra, patience))

    def _take_found(self, tracked: _Tracked, computed_tokens: int, most: int) -> int:
        """Keeps the result of a lookup that has ended; returns the tokens to load."""
        assert tracked.lookup is not None
        found, tracked.lookup = tracked.lookup.found(), None
        if found is None:
            return 0
        self._note_found(tracked, found)
        lease = found.lease
        end = min(most, lease.pages * PAGE_TOKENS // self._step * self._step)
        matched = end - computed_tokens
        # Pages are loaded as a whole. A block in which the engine's own hit ends inside of a page
        # is not written, because running requests may attend it.
        if matched <= 0 or not tracked.wanted or computed_tokens % PAGE_TOKENS:
            lease.close()
            return 0
        tracked.lease = lease
        tracked.load_pages = (computed_tokens // PAGE_TOKENS, end // PAGE_TOKENS)
        return matched

    def _note_found(self, tracked: _Tracked, found: Found) -> None:
        tracked.keyspace = found.keyspace
        if len(found.keys) > len(tracked.keys):
            tracked.keys = found.keys
        lease = found.lease
        tracked.stored_pages = max(tracked.stored_pages, lease.pages)
        if found.waited_seconds is not None and (found.arrived_pages > 0 or lease.late):
            self._policy.arrived(found.arrived_pages * PAGE_TOKENS, found.waited_seconds,
                                 lease.late)

    def allocated(self, request: Any, groups: Sequence[Sequence[int]],
                  external_tokens: int) -> None:
        """The engine has given the request these blocks of each group, and loads `external_tokens`
        tokens of it from crumbd (0: none)."""
        tracked = self._track(request)
        tracked.blocks = self._layout.table(groups)
        tracked.matched = None
        if external_tokens > 0 and tracked.lease is not None:
            self._allocated.append(request.request_id)
        else:
            self._release(tracked)

    def loads(self) -> List[LoadJob]:
        """The loads of requests that were allocated since the last call."""
        jobs = []
        for request_id in self._allocated:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.lease is None:
                continue
            first, end = tracked.load_pages
            keys = tuple(tracked.keys[:end])
            if not self._exact:
                tracked.rounded |= end > max(1, first)  # page 0 is exact
                self._rounded.add(keys, first)
            self._loading[request_id] = (end - first) * PAGE_TOKENS
            if self._announce is not None:
                self._announce(tracked.request, first, end, tracked.lease)
            jobs.append(LoadJob(request_id, tracked.lease.token, keys, first,
                                self._blocks(tracked, end)))
        self._allocated = []
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
        self._loading.pop(request_id, None)
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
        self._loading.pop(request_id, None)
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._release(tracked)
            self._abandon(tracked)

    def reset(self) -> bool:
        """The weights may have changed: from now on this engine shares pages with no other, nor
        with its own past. Requests that have blocks may hold rows of the weights before: nothing of
        them is stored or loaded any more. False: such rows are being loaded now."""
        self._resets += 1
        self._rounded.clear()
        loading = False
        for request_id, tracked in list(self._tracked.items()):
            if tracked.blocks:
                tracked.stale = True
                loading |= tracked.lease is not None
            else:
                self.finished(request_id)  # and tracked again at the next call for it
        return not loading

    def _add_store(self, jobs: List[StoreJob], tracked: _Tracked, computed: int,
                   scheduled: int) -> None:
        request = tracked.request
        if tracked.stale or not _has_tokens(request):
            return
        known = min(computed + scheduled, request.num_tokens)
        end = min(known // PAGE_TOKENS, self._layout.pages_in(len(tracked.blocks)))
        # A request that was preempted has not computed all of its refused pages again yet.
        again = [pages for pages in tracked.refused if pages[1] <= end]
        if not again and end <= tracked.stored_pages:
            return
        tracked.stale = self._adapters.changed(getattr(request, "lora_request", None))
        if tracked.stale or self._keyspace(tracked) is None:
            return
        tracked.refused = [pages for pages in tracked.refused if pages[1] > end]
        if end > tracked.stored_pages:
            again.append((tracked.stored_pages, end))
            tracked.stored_pages = end
        for first, last in again:
            jobs.append(self._store_job(tracked, first, last))

    def _store_job(self, tracked: _Tracked, first: int, last: int) -> StoreJob:
        assert tracked.keyspace is not None
        if len(tracked.keys) < last:
            ids, extra, parent = self._unhashed(tracked, last)
            tracked.keys.extend(self._store.keys(tracked.keyspace, ids, extra, parent))
        keys = tracked.keys
        if not self._exact and tracked.own_tokens > 0:
            tracked.rounded |= self._rounded.under(keys, tracked.own_tokens)
            tracked.own_tokens = 0
        if self._announce is not None:
            self._announce(tracked.request, first, last, None)
        return StoreJob(tracked.request.request_id, tracked.keyspace, tuple(keys[first:last]),
                        first, keys[first - 1] if first else NO_EXTRA, self._blocks(tracked, last),
                        tracked.rounded and not self._exact)

    def _unhashed(self, tracked: _Tracked,
                  pages: int) -> Tuple[Sequence[int], List[bytes], bytes]:
        """Tokens, extra digests and parent of the pages up to `pages` whose keys are not known."""
        known, request = len(tracked.keys), tracked.request
        lora = getattr(request, "lora_request", None)
        private = (self._engine_id + self._resets.to_bytes(8, "little") if self._resets else b"")
        extra = page_extras(request, known, pages, private,
                            None if lora is None else self._adapters.name_of(lora))
        return (request.all_token_ids[known * PAGE_TOKENS:pages * PAGE_TOKENS], extra,
                tracked.keys[-1] if known else NO_EXTRA)

    def _keyspace(self, tracked: _Tracked) -> Optional[bytes]:
        """The keyspace of a request, for which the scheduler waits once; None: not known yet."""
        if tracked.keyspace is None:
            late = tracked.waited or tracked.opening.late(self._patience)
            tracked.keyspace = tracked.opening.wait(0.0 if late else self._patience)
            tracked.waited = True
        return tracked.keyspace

    def _blocks(self, tracked: _Tracked, end_page: int) -> Tuple[int, ...]:
        return tuple(tracked.blocks[:self._layout.blocks_of(end_page)])

    def _track(self, request: Any) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = _Tracked(request, self._lookups.open())
            self._tracked[request.request_id] = tracked
        return tracked

    @staticmethod
    def _release(tracked: _Tracked) -> None:
        tracked.matched = None
        if tracked.lease is not None:
            tracked.lease.close()
            tracked.lease = None

    @staticmethod
    def _abandon(tracked: _Tracked) -> None:
        if tracked.lookup is not None:
            tracked.lookup.abandon()
            tracked.lookup = None


def _has_tokens(request: Any) -> bool:
    """Whether token ids name the prompt: a prompt of embeddings has none."""
    return request.prompt_token_ids is not None and getattr(request, "prompt_embeds", None) is None
