# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Pages between crumbd and the paged KV cache of an engine that computes attention itself.

The cache is in host memory or on one CUDA device.

An engine's scheduler looks prefixes up and leases them (`Transfer.keyspace`, `keys`, `acquire`);
its workers, which have the cache, move the bytes (`load`, `store`). Tokens are bytes that pass from
one process to the other.
"""

import ctypes
import dataclasses
from typing import Any, Dict, List, Optional, Sequence as SequenceOf, Tuple

from crumb import _abi, _tensors
from crumb._library import Handle, c, check, milliseconds, options_of
from crumb.blocks import BlockPool
from crumb.client import KEY_BYTES, NO_PARENT, PAGE_TOKENS, Client, Miss, Tier, _joined
from crumb.errors import InvalidArgument
from crumb.worker import (Model, Rank, WorkerSettings, lead_token_bytes, read_counters,
                          worker_options)


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """K or V of one layer in a paged cache, in host memory or on a CUDA device.

    Element i of the row of token t in block b and KV head h lies at address + s * (b * block +
    h * head + t * token + i * element) bytes, where s is 2 for BF16 and 1 for FP8: strides are
    elements.

    scale: the factor of FP8 elements (E4M3); None: elements are BF16. Rows of pages are BF16; with
    `Model(history="bf16")` an FP8 element that was stored is loaded as it was.

    extents: blocks, heads, tokens of a block and elements of a row, which `Transfer.use_cache`
    compares with the cache and the model; None: not known, nothing is compared. owner: kept alive
    as long as the transfer uses the cache. device: the ordinal of the CUDA device; None: host
    memory.
    """

    address: int
    block: int
    head: int
    token: int
    element: int = 1
    extents: Optional[Tuple[int, int, int, int]] = None
    owner: Any = dataclasses.field(default=None, repr=False, compare=False)
    device: Optional[int] = None
    scale: Optional[float] = None

    @classmethod
    def of(cls, tensor: Any, dims: str = "bhtd", scale: float = 1.0) -> "PagedRows":
        """Rows of a torch tensor, BF16 or FP8 (float8_e4m3fn), or of a writable numpy array, BF16, of
        any strides. scale: the factor of FP8 elements.

        dims: which of block (b), head (h), token (t) and element (d) each dimension is. The tensor
        may be a view of a larger one. On a CUDA device, K and V of all layers must have the same
        strides, the elements of a row must be adjacent, and rows aligned to 16 bytes.
        """
        address, strides, device, fp8 = _tensors.strided_rows(tensor, "a paged cache")
        if sorted(dims) != sorted("bhtd") or len(dims) != len(strides):
            raise InvalidArgument(f"dims {dims!r} of a tensor with {len(strides)} dimensions")
        block, head, token, element = (strides[dims.index(name)] for name in "bhtd")
        blocks, heads, tokens, elements = (int(tensor.shape[dims.index(name)]) for name in "bhtd")
        return cls(address, block, head, token, element, (blocks, heads, tokens, elements), tensor,
                   device, scale if fp8 else None)


@dataclasses.dataclass(frozen=True)
class PagedCache:
    """An engine's paged cache: K and V of each of this rank's layers, in order.

    blocks: how many there are. block_tokens: tokens of a block, any number; on a CUDA device at
    most 128.
    """

    layers: SequenceOf[Tuple[PagedRows, PagedRows]]
    blocks: int
    block_tokens: int

    def device(self) -> Optional[int]:
        """The ordinal of the CUDA device of all rows; None: host memory. Raises InvalidArgument if
        rows are in different memories."""
        devices = {rows.device for layer in self.layers for rows in layer}
        if len(devices) > 1:
            raise InvalidArgument(f"the layers of a cache are on several devices: {devices}")
        return next(iter(devices), None)

    def fp8(self) -> bool:
        """Whether rows are FP8. Raises InvalidArgument if some are and some are not."""
        kinds = {rows.scale is not None for layer in self.layers for rows in layer}
        if len(kinds) > 1:
            raise InvalidArgument("some rows of a cache are FP8 and others BF16")
        return next(iter(kinds), False)


class Lease(Handle):
    """A prefix that crumbd keeps for the processes of this engine until `close`.

    pages: how many leading pages of the keys it has; 0: none. tiers: of these pages. reason: why
    the next page is not there. token: names the lease to `Transfer.load` of other processes.
    """

    def __init__(self, handle: Any, pages: int, tiers: SequenceOf[Tier], reason: Miss,
                 token: bytes) -> None:
        self.pages, self.tiers, self.reason, self.token = pages, tiers, reason, token
        self._own(handle, _close_lease)

    @property
    def arrived_pages(self) -> int:
        """How many of the pages were brought from SSD and other nodes."""
        return sum(tier in (Tier.SSD, Tier.REMOTE) for tier in self.tiers)

    @property
    def late(self) -> bool:
        """Whether the next page is on SSD or another node, and did not arrive in time."""
        return self.reason is Miss.DEADLINE


def _close_lease(handle: Optional[int]) -> None:
    if handle:
        c.crumb_transfer_lease_close(handle)


class Load(Handle):
    """Pages on their way into the cache. pages: how many of the requested ones can be loaded.

    `close` waits until enqueued rows are in the cache.
    """

    def __init__(self, handle: Any, pages: int, layers: int) -> None:
        self.pages, self._layers = pages, layers
        self._own(handle, c.crumb_page_load_close)

    def layers(self, begin: int = 0, end: Optional[int] = None) -> None:
        """Writes the rows of layers [begin, end) of this rank; all of them by default."""
        self._check(c.crumb_page_load_layers(self._handle, begin,
                                             self._layers if end is None else end))

    def enqueue(self, stream: int, begin: int = 0, end: Optional[int] = None) -> None:
        """Enqueues the same on a CUDA stream of the cache's device, a cudaStream_t.

        Blocks for pages whose memory is not pinned yet.
        """
        self._check(c.crumb_page_load_enqueue(self._handle, begin,
                                              self._layers if end is None else end, stream))

    def done(self) -> bool:
        """Whether all enqueued rows are in the cache."""
        done = ctypes.c_uint32()
        self._check(c.crumb_page_load_done(self._handle, ctypes.byref(done)))
        return done.value != 0

    def wait(self) -> None:
        """Waits until they are."""
        self._check(c.crumb_page_load_wait(self._handle))


class Store(Handle):
    """Pages on their way out of the cache. They are published by `finish`."""

    def __init__(self, handle: Any, layers: int) -> None:
        self._layers = layers
        self._own(handle, c.crumb_page_store_close)

    def layers(self, begin: int = 0, end: Optional[int] = None) -> None:
        """Reads and quantizes layers [begin, end) of this rank; the engine may overwrite their rows
        when this returns."""
        self._check(c.crumb_page_store_layers(self._handle, begin,
                                              self._layers if end is None else end))

    def enqueue(self, stream: int, begin: int = 0, end: Optional[int] = None) -> None:
        """Enqueues the same on a CUDA stream of the cache's device, a cudaStream_t.

        Work behind it on the stream may overwrite the rows.
        """
        self._check(c.crumb_page_store_enqueue(self._handle, begin,
                                               self._layers if end is None else end, stream))

    def finish(self) -> None:
        """Queues the pages for publishing, which happens in the background. Raises
        FailedPrecondition if a layer was not stored."""
        self._check(c.crumb_page_store_finish(self._handle))


class Transfer(Handle):
    """Moves pages between crumbd and an engine's cache. Thread-safe.

    All processes of an engine open one with the same model, over clients with the same `engine`.
    INT2 pages are quantized when they are stored and dequantized when they are loaded; with
    `Model(history="bf16")` they stay as they are.
    """

    def __init__(self, client: Client, model: Model, *, rank: Rank = Rank(),
                 settings: WorkerSettings = WorkerSettings()) -> None:
        options = worker_options(model, rank, settings)
        self.model, self.rank = model, rank
        self.layers = (options.layer_end - options.layer_begin) or model.layers
        self.kv_heads = (options.head_end - options.head_begin) or model.kv_heads
        handle = ctypes.c_void_p()
        check(c.crumb_transfer_open(client._open_handle(), ctypes.byref(options),
                                    ctypes.byref(handle)))
        self._own(handle, c.crumb_transfer_close)
        self._caches: List[Any] = []

    def use_cache(self, cache: PagedCache, staging_bytes: int = 0) -> None:
        """Sets the cache for `load` and `store`.

        staging_bytes: for a cache on a CUDA device, pinned host memory for stored pages until they
        are published; 0: 2 GiB. The call takes about a second for each few GiB.

        Its memory must stay valid until the transfer is closed, and all loads and stores are; rows
        made by `PagedRows.of` see to that. Raises InvalidArgument if their extents are not those of
        the cache and the model.
        """
        wanted = (cache.blocks, self.kv_heads, cache.block_tokens, self.model.head_dim)
        for number, layer in enumerate(cache.layers):
            for rows in layer:
                if rows.extents is not None and rows.extents != wanted:
                    raise InvalidArgument(
                        f"layer {number} has {rows.extents} blocks, heads, tokens of a block and "
                        f"elements; the cache and the model say {wanted}")
        kind = _abi.crumb_paged_rows * max(1, len(cache.layers))
        planes = []
        for part in (0, 1):
            planes.append(kind(*(
                _abi.crumb_paged_rows(base=layer[part].address, block_stride=layer[part].block,
                                      head_stride=layer[part].head, token_stride=layer[part].token,
                                      element_stride=layer[part].element)
                for layer in cache.layers)))
        given = _abi.crumb_paged_cache(size=ctypes.sizeof(_abi.crumb_paged_cache), k=planes[0],
                                       v=planes[1], layers=len(cache.layers),
                                       block_tokens=cache.block_tokens, blocks=cache.blocks,
                                       staging_bytes=staging_bytes)
        if cache.fp8():
            given.element = _abi.CRUMB_ROWS_FP8_E4M3
            factors = [[rows.scale for rows in part if rows.scale is not None]
                       for part in zip(*cache.layers)]
            scales = [(ctypes.c_float * len(of_part))(*of_part) for of_part in factors]
            given.k_scale, given.v_scale = map(ctypes.addressof, scales)
        device, ordinal = ctypes.c_void_p(), cache.device()
        try:
            if ordinal is not None:
                check(c.crumb_device_open(b"cuda", ordinal, ctypes.byref(device)))
                given.device = device
            self._check(c.crumb_transfer_use_cache(self._handle, ctypes.byref(given)))
        finally:
            if device.value:
                c.crumb_device_close(device)  # the transfer keeps it open
        self._caches.append(cache)  # loads and stores that are open keep to the cache before

    def use_blocks(self, pools: SequenceOf[BlockPool], owner: Any = None) -> None:
        """Sets an engine's pool of INT2 blocks (crumb.blocks) in host memory for `load` and
        `store`, in place of a paged cache.

        pools: one for each layer of this rank. owner: kept alive as long as the transfer. The block
        tables of `load` and `store` have a sequence's sink blocks, and behind them its history
        blocks, one for each page; that of page 0 is not used.
        """
        structs = (_abi.crumb_block_pool * max(1, len(pools)))(*(pool.struct() for pool in pools))
        given = options_of(_abi.crumb_block_cache, pools=structs, layers=len(pools))
        self._check(c.crumb_transfer_use_blocks(self._handle, ctypes.byref(given)))
        self._caches.append(owner)

    def keyspace(self, timeout: float = 2.0) -> bytes:
        """The token of the keyspace for requests that begin now; a request keeps its own."""
        token, size = ctypes.create_string_buffer(lead_token_bytes(0)), ctypes.c_size_t()
        self._check(c.crumb_transfer_keyspace(self._handle, milliseconds(timeout), token,
                                              len(token), ctypes.byref(size)))
        return token.raw[:size.value]

    def keys(self, keyspace: bytes, token_ids: Any, extra: SequenceOf[bytes] = (),
             parent: bytes = NO_PARENT) -> List[bytes]:
        """Keys of the full pages of a sequence: one of 32 bytes for every 64 token ids.

        extra: digests of 32 bytes of other inputs of leading pages, one a page; 32 zero bytes
        for nothing. parent: the key of a page; then token_ids and extra are those of the pages
        behind it.
        """
        address, count, held = _tensors.tokens(token_ids)
        pages = count // PAGE_TOKENS
        keys = ctypes.create_string_buffer(max(1, pages * KEY_BYTES))
        self._check(c.crumb_transfer_next_keys(
            self._handle, keyspace, len(keyspace), _bytes(_joined([parent])), address, count,
            _bytes(_joined(extra)), len(extra), _bytes(keys)))
        del held
        made = keys.raw
        return [made[i * KEY_BYTES:(i + 1) * KEY_BYTES] for i in range(pages)]

    def acquire(self, keyspace: bytes, keys: SequenceOf[bytes], deadline: float = 0.2) -> Lease:
        """Leases the longest prefix of the keys that crumbd has for all layers and heads.

        deadline: seconds to wait for pages on SSD and other nodes; 0: only those in host memory.
        Without crumbd the lease has no pages.
        """
        handle, hits, size = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        tiers = (ctypes.c_int32 * max(1, len(keys)))()
        reason = ctypes.c_int32()
        token = ctypes.create_string_buffer(lead_token_bytes(len(keys) * PAGE_TOKENS))
        self._check(c.crumb_transfer_acquire(
            self._handle, keyspace, len(keyspace), _bytes(_joined(keys)), len(keys),
            milliseconds(deadline), ctypes.byref(handle), ctypes.byref(hits), tiers,
            ctypes.byref(reason), token, len(token), ctypes.byref(size)))
        return Lease(handle, hits.value, [Tier(tiers[i]) for i in range(hits.value)],
                     Miss(reason.value), token.raw[:size.value])

    def load(self, token: bytes, keys: SequenceOf[bytes], first_page: int, end_page: int,
             blocks: SequenceOf[int], deadline: float = 0.2) -> Load:
        """Begins to load pages [first_page, end_page) of a leased prefix.

        keys: those of pages [0, end_page). blocks: the sequence's block table, from its first
        token on. Call `layers` of the result to write rows.
        """
        table = (ctypes.c_int64 * max(1, len(blocks)))(*blocks)
        handle, pages = ctypes.c_void_p(), ctypes.c_size_t()
        self._check(c.crumb_page_load_open(
            self._handle, token, len(token), _bytes(_joined(keys)), first_page, end_page, table,
            len(blocks), milliseconds(deadline), ctypes.byref(handle), ctypes.byref(pages)))
        return Load(handle, pages.value, self.layers)

    def store(self, keyspace: bytes, keys: SequenceOf[bytes], first_page: int,
              blocks: SequenceOf[int], parent: bytes = NO_PARENT,
              over_int2_prefix: bool = False) -> Store:
        """Begins to store pages first_page, first_page + 1, ... with these keys.

        blocks: the sequence's block table, from its first token on. parent: the key of the page
        before them. over_int2_prefix: their rows were computed over a prefix that was loaded from
        INT2 pages. Raises ResourceExhausted if the memory for pages still to be published is used.
        """
        table = (ctypes.c_int64 * max(1, len(blocks)))(*blocks)
        handle = ctypes.c_void_p()
        self._check(c.crumb_page_store_open(
            self._handle, keyspace, len(keyspace), _bytes(parent), first_page,
            _bytes(_joined(keys)), len(keys), table, len(blocks), int(over_int2_prefix),
            ctypes.byref(handle)))
        return Store(handle, self.layers)

    def wait_published(self, timeout: float) -> None:
        """Waits until all pages that were queued were published or dropped. Raises
        DeadlineExceeded after `timeout` seconds."""
        self._check(c.crumb_transfer_wait_published(self._handle, milliseconds(timeout)))

    def counters(self) -> Dict[str, int]:
        """Counters since the transfer was opened, by the names of crumb_worker_counters."""
        code, counters = read_counters(c.crumb_transfer_read_counters, self._handle)
        self._check(code)
        return counters


def _bytes(data: Any) -> Any:
    """Bytes or a buffer as the library's uint8_t*."""
    return ctypes.cast(ctypes.c_char_p(data) if isinstance(data, bytes) else data,
                       ctypes.POINTER(ctypes.c_uint8))
