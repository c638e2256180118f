# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang's UnifiedCacheLinker over crumbd. See crumb.sglang.

Every rank of SGLang has a scheduler with a radix tree of its own, and a linker:

    match       lookup   leases the longest prefix of the prompt that crumbd has
    admission   load     opens the pages of the leased prefix for the slots that SGLang has
                         allocated; if a rank cannot, none does, and SGLang computes the prefix
    step        start_layer_wise_loading   a thread copies the pages layer by layer, ahead of the
                         forward pass, which waits for each layer before it attends it
    insert      offload  a thread reads and quantizes the pages of a new node of the tree; they are
                         published in the background

A page of SGLang is a page of Crumb. Its key is made of SGLang's own hashes of it and of the pages
before it, which depend on the tokens, the cache salt, the extra key and the LoRA adapter.
"""

import array
import collections
import concurrent.futures
import dataclasses
import hashlib
import logging
import os
import time
from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from crumb import _engines
from crumb.client import NO_PARENT, PAGE_TOKENS
from crumb.errors import Error, FailedPrecondition
from crumb.sglang import _model, _tree
from crumb.sglang.metrics import Counters, Exporter
from crumb.transfer import Lease, Load, Transfer

log = logging.getLogger("crumb.sglang")

_Result = concurrent.futures.Future[bool]

# Pages at the end of a prompt that are recomputed even if they are stored as INT2: the recent
# window of 256 tokens, which attention reads in BF16.
RECENT_PAGES = 4
# Seconds after which the lease of a waiting request ends unless it is looked up again: leased pages
# take room in crumbd's host memory.
LEASE_SECONDS = 10.0
# The id of a LoRA adapter, which SGLang puts at the end of a sequence's extra_key.
LORA_ID_CHARACTERS = 32
# Pages that are remembered to be in crumbd, which are not stored again: 4 Mi tokens.
KNOWN_PAGES_MAX = 65536


@dataclasses.dataclass
class _Found:
    """The pages of a waiting request's prompt that crumbd has. lease: None: given back."""

    hashes: List[str]  # SGLang's hashes of the prompt's full pages
    keys: List[bytes]
    first: int         # pages of the prompt that SGLang's own cache had
    pages: int         # leading pages of the prompt that crumbd has
    lease: Optional[Lease]
    used: float        # time of the last lookup

    def close(self) -> None:
        """Gives the lease back."""
        if self.lease is not None:
            self.lease.close()
            self.lease = None


class _PageSet:
    """The most recently added hashes of pages, at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: "collections.OrderedDict[str, None]" = collections.OrderedDict()

    def __contains__(self, page: str) -> bool:
        return page in self._hashes

    def add(self, pages: Sequence[str]) -> None:
        for page in pages:
            self._hashes[page] = None
            self._hashes.move_to_end(page)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)

    def remove(self, pages: Sequence[str]) -> None:
        for page in pages:
            self._hashes.pop(page, None)

    def clear(self) -> None:
        self._hashes.clear()


class CrumbLinker(_tree.PositionedLinker):
    """Stores the pages of SGLang's radix tree in crumbd, and loads the longest stored prefix.

    linker_extra_config: "socket_dir" (crumbd's folder of sockets; default /run/crumb), "token_file"
    (with the tenant's token), "tenant", "history" ("int2" or "bf16", exact pages), "rotation" (a
    rotation file of `crumb calibrate`; default "hadamard", which needs no data), "deadline"
    (seconds that a lookup waits for pages on SSD and other nodes; default 0.2), "weights" (a digest
    of the checkpoint), "model" (a name), "after_flush" ("private": pages that are stored after
    SGLang's cache was flushed are found by this server only, because its weights may have changed;
    "shared"), "leases_max" (prefixes that are leased at once for waiting requests; default 256),
    "offloads_max" (nodes of the radix tree that are read at once, which SGLang cannot evict
    meanwhile; default 256).

    Used by the scheduler's thread only.
    """

    def __init__(self, server_args: Any, params: Any, *, components: Any,
                 extra_config: Optional[Dict[str, Any]] = None, forward_stream: Any = None,
                 model_config: Any = None) -> None:
        self.forward_stream = forward_stream
        self._closed = True
        options = _model.options_of(extra_config)
        config = model_config or ModelConfig.from_server_args(server_args)
        _model.check_supported(config, params, components)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        cache = _model.paged_cache_of(pool)
        self.pools: Dict[PoolName, Any] = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(len(cache.layers))
        self.counters = Counters()
        self._exporter = Exporter(self.counters) if params.enable_metrics else None
        self._shared_after_flush = options["after_flush"] == "shared"
        self._deadline = float(options["deadline"])
        self._leases_max = int(options["leases_max"])
        self._offloads_max = int(options["offloads_max"])
        rank = _model.rank_of(params)
        engine = _engine_id(params.attn_tp_cache_group or params.tp_cache_group, rank.tp_size)
        model = _model.model_of(config, options, getattr(server_args, "download_dir", None))
        self._exact = model.history == "bf16"
        self._client = _engines.open_client(options, f"sglang rank {rank.tp_rank}", engine, log)
        try:
            self._transfer = Transfer(self._client, model, rank=rank)
            self._transfer.use_cache(cache)
            _tree.install()
        except BaseException:
            self._client.close()
            raise
        self._open_state(engine, cache.blocks)
        self._adapters = _model.adapters_of(server_args)
        if model.rotation == "hadamard" and not self._exact:
            log.info(_engines.HADAMARD_NOTE)
        log.info("Crumb serves %d layers, %d pages of %d tokens, history %s", len(cache.layers),
                 cache.blocks, PAGE_TOKENS, model.history)

    def _open_state(self, engine: bytes, pool_pages: int) -> None:
        self._engine = engine
        self._flushes = 0
        self._agree: Optional[_tree.Agree] = None
        self._before: Optional[List[str]] = None
        self._adapter = b""  # the adapter of the next call's sequence
        self._found: "collections.OrderedDict[str, _Found]" = collections.OrderedDict()
        self._queued: Dict[str, Load] = {}
        # Pages that are stored, and the result, in the order of the calls.
        self._offloads: Deque[Tuple[List[str], _Result]] = collections.deque()
        self._known = _PageSet(KNOWN_PAGES_MAX)
        # Pages of SGLang's cache that were loaded from INT2 pages.
        self._rounded = _PageSet(pool_pages)
        self._loader = concurrent.futures.ThreadPoolExecutor(1, "crumb-load")
        self._storer = concurrent.futures.ThreadPoolExecutor(1, "crumb-store")
        self._closed = False

    # Positions: _tree.py.

    def attach(self, agree: _tree.Agree) -> None:
        self._agree = agree

    def begin_call(self, before: Sequence[str], namespace: Optional[str]) -> None:
        self._before = list(before)
        self._adapter = b""
        adapter = (namespace or "")[-LORA_ID_CHARACTERS:]
        if adapter in self._adapters:
            # The pages of an adapter whose files are not here are found by this server only.
            self._adapter = self._adapters[adapter] or self._engine

    def forget(self, rid: str) -> None:
        found = self._found.pop(rid, None)
        if found is not None:
            found.close()

    # Loading.

    def lookup(self, rid: str, transfers: List[Any]) -> List[int]:
        before, tail = self._take_before(), _pages_of(transfers).keys
        if before is None or not tail or not self._client.connected:
            self.forget(rid)
            return []
        hashes = [*before, *tail]
        found = self._found.get(rid)
        if found is None or found.hashes != hashes:
            self.forget(rid)
            found = self._acquire(hashes, self._adapter)
            if found is None:
                return []
            self._found[rid] = found
        found.first, found.used = len(before), time.monotonic()
        self._found.move_to_end(rid)
        self._end_leases()
        most = len(hashes) - (0 if self._exact else RECENT_PAGES)
        return list(range(1, min(found.pages, most) - found.first + 1))

    def _acquire(self, hashes: List[str], adapter: bytes) -> Optional[_Found]:
        self.counters.lookups += 1
        try:
            keyspace = self._transfer.keyspace(self._deadline)
            keys = self._keys(keyspace, hashes, adapter)
            lease = self._transfer.acquire(keyspace, keys, self._deadline)
        except Error as error:
            log.warning("a prompt of %d pages is not looked up: %s", len(hashes), error)
            return None
        self._known.add(hashes[:lease.pages])
        self._known.remove(hashes[lease.pages:])
        return _Found(hashes, keys, 0, lease.pages, lease, 0.0)

    def _end_leases(self) -> None:
        """Gives back leases of requests that were not looked up again."""
        oldest = time.monotonic() - LEASE_SECONDS
        while self._found:
            rid, found = next(iter(self._found.items()))
            if len(self._found) <= self._leases_max and found.used > oldest:
                break
            self.forget(rid)

    def load(self, rid: str, transfers: List[Any]) -> bool:
        """Opens the pages. Their memory stays valid from then on, with or without crumbd:
        SGLang would abort the request for a later failure."""
        pages = _pages_of(transfers)
        found = self._found.pop(rid, None)
        opened = self._open(rid, found, pages) if found is not None else None
        if not self._all_agree(opened is not None):
            self.counters.refused_loads += 1
            self._rounded.remove(pages.keys)  # SGLang computes them
            if opened is not None:
                opened.close()
            return False
        assert opened is not None and found is not None
        self.cancel_queued_load(rid)
        self._queued[rid] = opened
        if not self._exact:
            self._rounded.add(pages.keys[found.first == 0:])  # page 0 is exact
        return True

    def _open(self, rid: str, found: _Found, pages: Any) -> Optional[Load]:
        blocks = _page_numbers(pages.device_indices)
        first, end = found.first, found.first + len(pages.keys)
        try:
            if (found.lease is None or found.hashes[first:end] != pages.keys or
                    len(blocks) != len(pages.keys)):
                return None
            load = self._transfer.load(found.lease.token, found.keys[:end], first, end,
                                       [0] * first + blocks, self._deadline)
            if load.pages == len(pages.keys):
                return load
            self._known.remove(pages.keys[load.pages:])
            load.close()
        except Error as error:
            log.warning("%d pages of request %s are computed: %s", len(pages.keys), rid, error)
        finally:
            found.close()
        return None

    def cancel_queued_load(self, rid: str) -> bool:
        load = self._queued.pop(rid, None)
        if load is not None:
            load.close()
        return load is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index: int = self.layer_done_counter.update_producer()
        self._loader.submit(self._load_layers, index, loads)
        return index

    def _load_layers(self, index: int, loads: List[Load]) -> None:
        """Runs in the thread crumb-load."""
        counter = self.layer_done_counter
        try:
            for layer in range(counter.num_layers):
                for load in loads:
                    load.layers(layer, layer + 1)
                counter.complete(index, layer)
            self.counters.loaded_pages += sum(load.pages for load in loads)
        except BaseException as error:
            self.counters.failed_loads += 1
            log.exception("a batch of %d loads broke off", len(loads))
            counter.fail(index, error)
        finally:
            for load in loads:
                load.close()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed: bool = self.layer_done_counter.finish(counter_index)
        return landed

    # Storing.

    def offload(self, transfers: List[Any], session_id: Optional[str] = None) -> bool:
        """Queues the pages. The result of pages that cannot be queued is a failure, in its turn:
        ranks with different results here would no longer agree on the order of results."""
        before, pages = self._take_before(), _pages_of(transfers)
        hashes = [*(before or ()), *pages.keys]
        blocks = [0] * (len(hashes) - len(pages.keys)) + _page_numbers(pages.device_indices)
        if (before is None or len(blocks) != len(hashes) or not self._client.connected or
                len(self._offloads) >= self._offloads_max):
            self.counters.refused_offloads += 1
            self._offloads.append(([], _failure()))
            return True
        runs = self._unknown_runs(hashes, len(before))
        stored = [page for begin, end, _ in runs for page in hashes[begin:end]]
        self._known.add(stored)
        self._offloads.append((stored, self._storer.submit(self._store, hashes, blocks, runs,
                                                            self._adapter)))
        return True

    def _unknown_runs(self, hashes: List[str], first: int) -> List[Tuple[int, int, bool]]:
        """Runs of pages behind `first` that crumbd may not have: [begin, end), and whether they
        were computed over pages that were loaded from INT2."""
        runs: List[Tuple[int, int, bool]] = []
        rounded = any(page in self._rounded for page in hashes[:first])
        for number in range(first, len(hashes)):
            if hashes[number] in self._rounded:
                rounded = True
            elif hashes[number] not in self._known:
                if runs and runs[-1][1] == number:
                    runs[-1] = (runs[-1][0], number + 1, runs[-1][2])
                else:
                    runs.append((number, number + 1, rounded))
        return runs

    def _store(self, hashes: List[str], blocks: List[int],
               runs: List[Tuple[int, int, bool]], adapter: bytes) -> bool:
        """Runs in the thread crumb-store. SGLang keeps the pages until the result is taken."""
        try:
            keyspace = self._transfer.keyspace(self._deadline)
            keys = self._keys(keyspace, hashes, adapter)
            for begin, end, rounded in runs:
                with self._transfer.store(keyspace, keys[begin:end], begin, blocks,
                                          keys[begin - 1] if begin else NO_PARENT,
                                          rounded) as store:
                    store.layers()
                    store.finish()
                self.counters.stored_pages += end - begin
            return True
        except Error as error:
            log.warning("%d pages are not stored: %s", len(hashes), error)
            return False

    def num_completed_offloads(self) -> int:
        self._end_leases()  # SGLang calls this at every step
        if self._exporter is not None:
            self._exporter.export()
        completed = 0
        for _, result in self._offloads:
            if not result.done():
                break
            completed += 1
        return completed

    def pop_completed_offload(self) -> bool:
        pages, result = self._offloads.popleft()
        stored: bool = result.result()
        if not stored:
            self._known.remove(pages)
        return stored

    # The rest.

    def reset(self) -> None:
        self._quiesce()
        self._known.clear()
        self._rounded.clear()
        self.layer_done_counter.reset()
        if not self._shared_after_flush:
            self._flushes += 1

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._quiesce()
        self._loader.shutdown()
        self._storer.shutdown()
        try:
            self._transfer.wait_published(10)
        except Error as error:
            log.warning("pages were not published: %s", error)
        self._transfer.close()
        self._client.close()

    def _quiesce(self) -> None:
        """Waits for everything that is under way, and forgets requests and results."""
        for rid in list(self._found):
            self.forget(rid)
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._loader.submit(lambda: None).result()
        self._storer.submit(lambda: None).result()
        self._offloads.clear()
        self._before = None

    def _take_before(self) -> Optional[List[str]]:
        if self._agree is None:
            raise FailedPrecondition("CrumbLinker was not attached to SGLang's radix cache: "
                                     "another plugin has replaced UnifiedCacheLinkerWrapper")
        before, self._before = self._before, None
        return before

    def _all_agree(self, own: bool) -> bool:
        return self._agree(own) if self._agree is not None else own

    def _keys(self, keyspace: bytes, hashes: Sequence[str], adapter: bytes) -> List[bytes]:
        """Keys of the pages of a sequence. SGLang's hashes stand for all that a page depends on,
        except for the weights of a LoRA adapter (`adapter`: their digest, empty without one), so
        that the tokens are taken to be zeros."""
        digests = [bytes.fromhex(page) for page in hashes]
        if adapter:
            digests[0] = hashlib.sha256(b"adapter\0" + adapter + digests[0]).digest()
        if self._flushes:
            own = self._engine + self._flushes.to_bytes(8, "little")
            digests[0] = hashlib.sha256(own + digests[0]).digest()
        return self._transfer.keys(keyspace, array.array("i", bytes(4 * PAGE_TOKENS * len(hashes))),
                                   digests)


def _failure() -> _Result:
    """A result that is there at once."""
    result: _Result = concurrent.futures.Future()
    result.set_result(False)
    return result


def _engine_id(group: Any, ranks: int) -> bytes:
    """16 random bytes that the ranks have in common."""
    made = [os.urandom(16)]
    if ranks > 1:
        source = torch.distributed.get_global_rank(group, 0)
        torch.distributed.broadcast_object_list(made, src=source, group=group)
    return made[0]


def _pages_of(transfers: List[Any]) -> Any:
    """The transfer of the pages of full attention."""
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)


def _page_numbers(slots: Any) -> List[int]:
    """The pages of SGLang's cache that these slots are; empty if they are not whole pages."""
    indices = slots.detach().to(device="cpu", dtype=torch.int64).flatten()
    if indices.numel() % PAGE_TOKENS:
        return []
    rows = indices.view(-1, PAGE_TOKENS)
    whole = rows[:, :1] + torch.arange(PAGE_TOKENS)
    if not torch.equal(rows, whole) or bool((rows[:, 0] % PAGE_TOKENS).any()):
        return []
    return [int(number) for number in rows[:, 0] // PAGE_TOKENS]
