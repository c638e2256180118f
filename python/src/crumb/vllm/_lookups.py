# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of crumbd by the scheduler, on threads: the scheduler itself never waits for crumbd longer
than its patience. This module does not import vLLM.

    opening   the keyspace of requests that begin now. Requests that begin while a call is under
              way share it. It takes microseconds, or up to two seconds after crumbd has restarted
              or while it does not respond.
    lookup    of one request: waits for its opening, computes the keys of the prompt's pages, and
              leases the longest prefix that crumbd has
"""

import concurrent.futures
import dataclasses
import logging
import time
from typing import Any, List, Optional, Protocol, Sequence

from crumb.vllm._jobs import PAGE_TOKENS
from crumb.vllm._policy import Patience

log = logging.getLogger("crumb.vllm")

# Lookups at once that wait for pages on SSD and other nodes. Further ones queue.
LOOKUPS_MAX = 4
# Seconds after which a lookup goes on without its keyspace; Transfer.keyspace itself takes two.
OPENING_SECONDS_MAX = 5.0


class Lease(Protocol):
    """Pages that crumbd keeps for this engine until `close`."""

    token: bytes
    pages: int
    tiers: Sequence[Any]

    @property
    def arrived_pages(self) -> int: ...

    @property
    def late(self) -> bool: ...

    def close(self) -> None: ...


class PageStore(Protocol):
    """The part of crumb.Transfer that the scheduler uses."""

    def keyspace(self) -> bytes: ...

    def keys(self, keyspace: bytes, token_ids: Sequence[int], extra: Sequence[bytes],
             parent: bytes) -> List[bytes]: ...

    def acquire(self, keyspace: bytes, keys: Sequence[bytes], deadline: float) -> Lease: ...


class Opening:
    """The keyspace of requests that begin now."""

    def __init__(self, future: "concurrent.futures.Future[bytes]") -> None:
        self._future = future
        self._begun = time.monotonic()

    def done(self) -> bool:
        return self._future.done()

    def late(self, seconds: float) -> bool:
        """Whether crumbd has not responded for so long."""
        return not self.done() and time.monotonic() - self._begun >= seconds

    def wait(self, seconds: float) -> Optional[bytes]:
        """Waits so long at most; None: the keyspace is not known yet, or cannot be opened."""
        try:
            return self._future.result(seconds)
        except concurrent.futures.TimeoutError:
            return None
        except Exception:  # pylint: disable=broad-except  # requests run without Crumb
            log.exception("a keyspace was not opened")
            return None


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A lookup. parent: the key of the page in front of `tokens`, of which keys are computed;
    keys: those of the pages up to there. patience: for pages on SSD and other nodes."""

    opening: Opening
    keys: Sequence[bytes]
    parent: bytes
    tokens: Sequence[int]
    extra: Sequence[bytes]
    patience: Patience


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a lookup."""

    keyspace: bytes
    keys: List[bytes]  # keys of all pages that were looked up
    lease: Lease
    arrived_pages: int = 0  # brought from SSD and other nodes
    waited_seconds: Optional[float] = None  # unset if it did not wait for such pages


class Lookup:
    """A lookup under way."""

    def __init__(self, future: "concurrent.futures.Future[Optional[Found]]",
                 opening: Opening) -> None:
        self._future = future
        self.opening = opening

    def done(self, seconds: float) -> bool:
        """Waits so long at most; whether it has ended."""
        return bool(concurrent.futures.wait([self._future], seconds).done)

    def found(self) -> Optional[Found]:
        """Returns the pages, or None if nothing is known of the prompt. REQUIRES: it has ended."""
        try:
            return self._future.result()
        except Exception:  # pylint: disable=broad-except  # the request is computed
            log.exception("a prompt was not looked up")
            return None

    def abandon(self) -> None:
        """Its lease is given back when it ends."""
        if not self._future.cancel():
            self._future.add_done_callback(_give_back)


class Lookups:
    """Runs openings and lookups. Used by the scheduler's thread."""

    def __init__(self, page_store: PageStore) -> None:
        self._store = page_store
        self._openings = concurrent.futures.ThreadPoolExecutor(1, "crumb-keyspace")
        self._threads = concurrent.futures.ThreadPoolExecutor(LOOKUPS_MAX, "crumb-lookup")
        self._latest: Optional[Opening] = None

    def open(self) -> Opening:
        """The keyspace of a request that begins now."""
        if self._latest is None or self._latest.done():
            self._latest = Opening(self._openings.submit(self._store.keyspace))
        return self._latest

    def start(self, wanted: Wanted) -> Lookup:
        return Lookup(self._threads.submit(self._look_up, wanted), wanted.opening)

    def close(self) -> None:
        """Waits for all of them."""
        self._openings.shutdown(wait=True)
        self._threads.shutdown(wait=True)

    def _look_up(self, wanted: Wanted) -> Optional[Found]:
        keyspace = wanted.opening.wait(OPENING_SECONDS_MAX)
        if keyspace is None:
            return None
        keys = [*wanted.keys, *self._store.keys(keyspace, wanted.tokens, wanted.extra,
                                                wanted.parent)]
        patience = wanted.patience
        begin = time.monotonic()
        lease = self._store.acquire(keyspace, keys, patience.first)
        if patience.first <= 0:
            return Found(keyspace, keys, lease)
        arrived, waited = lease.arrived_pages, time.monotonic() - begin
        more = patience.more(arrived * PAGE_TOKENS, waited) if lease.late else 0.0
        if more > 0:
            first = lease
            try:
                lease = self._store.acquire(keyspace, keys, more)
            finally:
                first.close()
            # Pages that the first one brought are in host memory now.
            arrived, waited = arrived + lease.arrived_pages, time.monotonic() - begin
        return Found(keyspace, keys, lease, arrived, waited)


def _give_back(future: "concurrent.futures.Future[Optional[Found]]") -> None:
    """Ends the lease of a lookup whose request is gone."""
    if future.cancelled() or future.exception() is not None:
        return
    found = future.result()
    if found is not None:
        found.lease.close()
