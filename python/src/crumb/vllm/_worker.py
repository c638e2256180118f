# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The workers' half of the connector: moves pages between vLLM's KV cache and crumbd.

This module does not import vLLM.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from typing import Any, Deque, Dict, List, Optional, Sequence, Set, Tuple

from crumb.errors import Error, ResourceExhausted
from crumb.transfer import Load, Transfer
from crumb.vllm._device import DeviceStreams
from crumb.vllm._jobs import BlockLayout, LoadJob, StoreJob
from crumb.vllm._layers import LayerProgress

log = logging.getLogger("crumb.vllm")

# Pages of one call that stores: if there is no memory for all pages of a step, the calls in front
# are not lost with the others. A call on a GPU is some five launches.
STORE_PAGES = 64
# Steps of a request that are computed over pages which did not arrive: the one that loads them by
# layer, and the one that asynchronous scheduling has prepared before the failure is known.
FAILED_STEPS = 2
# Seconds between two warnings of refused stores, which are tried again in every step.
WARNING_SECONDS = 10.0


@dataclasses.dataclass
class Moved:
    """Counts since they were last taken."""

    loaded_pages: int = 0
    load_seconds: float = 0.0
    failed_pages: int = 0
    stored_pages: int = 0
    store_seconds: float = 0.0
    refused_stores: int = 0


class PageMover:
    """Loads pages in the background and stores pages at once.

    Loads write blocks that no step reads or writes until the engine has been notified that they
    are finished. With a cache in host memory, stores read blocks before the step that computed them
    is over, so that the engine may give them to other requests afterwards. Thread-safe.

    With a cache on a GPU (`use_device`) both run on streams of their own beside later steps. Stores
    begin behind the step that computed their blocks, and a step that writes blocks which a store
    may still read waits for it (`wait_for_stores`). Loads begin behind the steps that were enqueued
    before them, because these may still use the blocks' former tokens.

    A load by layer (`start_layer_loads`) runs beside the step that attends its rows, which waits for
    each layer.
    """

    def __init__(self, transfer: Transfer, layout: BlockLayout, deadline: float) -> None:
        self._transfer = transfer
        self._layout = layout
        self._deadline = deadline
        self._loader = concurrent.futures.ThreadPoolExecutor(1, "crumb-load")
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)  # a load has ended
        self._loading: Dict[str, concurrent.futures.Future[None]] = {}
        self._finished: Set[str] = set()
        self._failed_blocks: Set[int] = set()
        self._failed_requests: Set[str] = set()
        self._failed_loads: Set[str] = set()
        self._loaded_by_layer: Set[str] = set()
        self._progress: Optional[LayerProgress] = None  # unset if the step has no load by layer
        # Requests whose load by layer has failed, and for how many steps they store nothing.
        self._failed_by_layer: Dict[str, int] = {}
        self._refused: List[Tuple[str, int, int]] = []
        self._warned: Optional[float] = None  # time of the last warning of a refused store
        self._moved = Moved()
        self._streams: Optional[DeviceStreams] = None  # unset if the cache is in host memory
        # Numbers of steps whose stores may be under way, and the points behind these.
        self._storing: Deque[Tuple[int, Any]] = collections.deque()

    def use_device(self, streams: DeviceStreams) -> None:
        """Moves pages of a cache on a GPU from now on."""
        self._streams = streams

    def start_loads(self, jobs: Sequence[LoadJob]) -> None:
        """Begins to load; `take_finished` reports when a request's pages are there."""
        behind = self._streams.mark() if self._streams is not None and jobs else None
        for job in jobs:
            self._loading[job.request_id] = self._loader.submit(self._load, job, behind)

    def start_layer_loads(self, jobs: Sequence[LoadJob]) -> None:
        """Begins to load layer by layer, for the step that begins now."""
        if not jobs:
            return
        behind = self._streams.mark() if self._streams is not None else None
        self._progress = LayerProgress()
        self._loader.submit(self._load_by_layer, jobs, behind, self._progress)

    def wait_for_layer(self, layer: int) -> None:
        """Lets the step continue when its loads have written this layer."""
        if self._progress is not None:
            self._continue_behind(self._progress.wait(layer))

    def wait_for_layers(self) -> None:
        """Lets the step continue when its loads have written all layers."""
        if self._progress is not None:
            self._continue_behind(self._progress.wait_end())
            self._progress = None

    def take_loaded_by_layer(self) -> Set[str]:
        """Requests whose loads by layer have ended since the last call."""
        with self._lock:
            loaded, self._loaded_by_layer = self._loaded_by_layer, set()
        return loaded

    def wait_for_stores(self, step: int) -> None:
        """Lets the work that is enqueued from now on wait until the stores of the step of this
        number, and of those before it, have read their blocks."""
        for number, point in self._storing:
            if number >= step and self._streams is not None:
                self._streams.wait_for(point)
                return

    def store(self, jobs: Sequence[StoreJob], step: int = 0) -> None:
        """Reads and quantizes the pages, or enqueues that; they are published in the background.
        Pages for which there is no memory are returned by `take_refused`; a page that cannot be
        stored otherwise is a later miss, not an error. step: a number that grows from step to
        step."""
        with self._lock:
            failed = self._failed_by_layer
            self._failed_by_layer = {name: left - 1 for name, left in failed.items() if left > 1}
        if not jobs:
            return
        # These steps computed over rows that did not arrive.
        jobs = [job for job in jobs if job.request_id not in failed]
        if jobs:
            stream = self._streams.begin_store() if self._streams is not None else None
            self._store(jobs, stream)
        # A step whose jobs were all left out is marked as well: who waits for it waits for the
        # stores of the steps before it.
        if self._streams is not None:
            while self._storing and self._storing[0][1].query():
                self._storing.popleft()
            self._storing.append((step, self._streams.mark_stores()))

    def take_refused(self) -> List[Tuple[str, int, int]]:
        """Pages [first, end) of requests for which there was no memory since the last call."""
        with self._lock:
            refused, self._refused = self._refused, []
        return refused

    def take_finished(self) -> Set[str]:
        """Requests whose loads have ended since the last call, with or without success."""
        with self._lock:
            finished, self._finished = self._finished, set()
        for request_id in finished:
            self._loading.pop(request_id, None)
        return finished

    def wait_for_load(self, seconds: float) -> None:
        """Waits until a load ends, if one is under way, and at most so long. An engine that has
        nothing to compute would otherwise compete with the load for Python's interpreter lock."""
        with self._ended:
            if self._loading and not self._finished:
                self._ended.wait(seconds)

    def take_failed_blocks(self) -> Set[int]:
        """Blocks whose pages did not arrive since the last call: the engine recomputes them."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_loads(self) -> Set[str]:
        """Requests whose pages did not all arrive since the last call, in an engine with several
        groups of blocks: it recomputes all of them."""
        with self._lock:
            failed, self._failed_loads = self._failed_loads, set()
        return failed

    def take_failed_requests(self) -> Set[str]:
        """Requests of which a page did not arrive since the last call."""
        with self._lock:
            failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_moved(self) -> Moved:
        """The counts since the last call."""
        with self._lock:
            moved, self._moved = self._moved, Moved()
        return moved

    def close(self) -> None:
        """Waits for loads that are under way, and for pages that are still to be published."""
        self._loader.shutdown(wait=True)
        try:
            self._transfer.wait_published(10)
        except Error as error:
            log.warning("pages were not published: %s", error)

    def _store(self, jobs: Sequence[StoreJob], stream: Optional[int]) -> None:
        for job in jobs:
            begin = time.monotonic()
            stored = 0
            try:
                while stored < len(job.keys):
                    end = min(stored + STORE_PAGES, len(job.keys))
                    self._store_pages(job, stored, end, stream)
                    stored = end
            except ResourceExhausted as error:
                self._refuse(job, stored, error)
            except Error as error:
                log.warning("%d pages of request %s are not stored: %s", len(job.keys) - stored,
                            job.request_id, error)
            with self._lock:
                self._moved.stored_pages += stored
                self._moved.refused_stores += stored < len(job.keys)
                self._moved.store_seconds += time.monotonic() - begin

    def _store_pages(self, job: StoreJob, begin: int, end: int, stream: Optional[int]) -> None:
        parent = job.keys[begin - 1] if begin else job.parent
        with self._transfer.store(job.keyspace, job.keys[begin:end], job.first_page + begin,
                                  job.blocks, parent, job.over_int2_prefix) as store:
            if stream is None:
                store.layers()
            else:
                store.enqueue(stream)
            store.finish()

    def _refuse(self, job: StoreJob, stored: int, error: Error) -> None:
        first, end = job.first_page + stored, job.first_page + len(job.keys)
        with self._lock:
            self._refused.append((job.request_id, first, end))
        now = time.monotonic()
        if self._warned is None or now - self._warned >= WARNING_SECONDS:
            self._warned = now
            log.warning("%d pages of request %s are not stored in this step: %s", end - first,
                        job.request_id, error)

    def _load(self, job: LoadJob, behind: Any) -> None:
        wanted = len(job.keys) - job.first_page
        pages, seconds = 0, 0.0
        try:
            pages, seconds = self._load_pages(job, behind)
        except Error as error:
            log.warning("%d pages of request %s are recomputed: %s", wanted, job.request_id, error)
        except Exception:  # pylint: disable=broad-except  # the engine waits until the load ends
            log.exception("%d pages of request %s are recomputed", wanted, job.request_id)
        with self._lock:
            self._count_load(job, pages, seconds)
            self._finished.add(job.request_id)
            self._ended.notify_all()

    def _count_load(self, job: LoadJob, pages: int, seconds: float) -> None:
        """Counts a load of which `pages` pages arrived. REQUIRES: the lock is held."""
        wanted = len(job.keys) - job.first_page
        self._moved.loaded_pages += pages
        self._moved.failed_pages += wanted - pages
        self._moved.load_seconds += seconds
        if pages == wanted:
            return
        self._failed_requests.add(job.request_id)
        if self._layout.front is None:
            first = self._layout.first_block(job.first_page + pages)
            self._failed_blocks.update(job.blocks[first:])
        else:
            self._failed_loads.add(job.request_id)

    def _continue_behind(self, point: Any) -> None:
        if point is not None and self._streams is not None:
            self._streams.wait_for(point)

    def _load_by_layer(self, jobs: Sequence[LoadJob], behind: Any,
                       progress: LayerProgress) -> None:
        """Loads the first layer of all jobs, then the second, and so on. If any of them fails, all of
        the step's are recomputed."""
        begin = time.monotonic()
        pages, loads = [0] * len(jobs), contextlib.ExitStack()
        span, opening = None, 0.0
        try:
            opened = [loads.enter_context(self._open(job)) for job in jobs]
            opening = time.monotonic() - begin
            span = self._streams.begin_load(behind) if self._streams is not None else None
            for layer in range(self._transfer.layers):
                for load in opened:
                    if span is None:
                        load.layers(layer, layer + 1)
                    else:
                        load.enqueue(span.stream, layer, layer + 1)
                progress.advance(None if span is None else span.mark())
            if span is not None:
                span.end()
            pages = [load.pages for load in opened]
        except Exception:  # pylint: disable=broad-except  # the step waits until the load ends
            log.exception("pages of %d requests are recomputed", len(jobs))
        # The step learns of failures before it stores, and before it reports.
        seconds = time.monotonic() - begin
        with self._lock:
            for job, count in zip(jobs, pages):
                self._count_load(job, count, 0.0)
                if count < len(job.keys) - job.first_page:
                    self._failed_by_layer[job.request_id] = FAILED_STEPS
        progress.end()
        loads.close()  # waits until the device has written the rows
        if span is not None and any(pages):
            seconds = opening + span.seconds()
        with self._lock:
            self._moved.load_seconds += seconds
            self._loaded_by_layer.update(job.request_id for job in jobs)
            self._ended.notify_all()

    def _open(self, job: LoadJob) -> Load:
        return self._transfer.load(job.lease, job.keys, job.first_page, len(job.keys), job.blocks,
                                   self._deadline)

    def _load_pages(self, job: LoadJob, behind: Any) -> Tuple[int, float]:
        """Returns how many pages were loaded, and the seconds that it took. The time in which steps
        in front of the load ran is not counted: computing the pages would wait for them, too."""
        begin = time.monotonic()
        with self._open(job) as load:
            if self._streams is None:
                load.layers()
                return load.pages, time.monotonic() - begin
            fetched = time.monotonic() - begin
            span = self._streams.begin_load(behind)
            load.enqueue(span.stream)
            span.end()
            load.wait()
            return load.pages, fetched + span.seconds()

