# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over INT2 blocks that an engine allocates itself.

crumb_blocks.h defines the content of a block and the form in which each token is attended.
Pointers are addresses, of host memory for BlockAttention and of device memory for
DeviceBlockAttention; the caller keeps their owners alive during a call, or until the device is
done.
"""

import ctypes
import dataclasses
from typing import Any, Tuple

from crumb import _abi
from crumb._library import Handle, c, check, options_of
from crumb.worker import Model, Rank, WorkerSettings, worker_options


@dataclasses.dataclass(frozen=True)
class BlockGeometry:
    """How the cache of a request fills blocks, each of which has `tile_bytes` for every layer and
    KV head.

    rows_per_block: BF16 rows (K and V of one token) that fit in place of a tile. sink_blocks,
    recent_blocks: blocks of BF16 rows that every request has beside its history.
    """

    tile_bytes: int
    rows_per_block: int
    sink_blocks: int
    recent_blocks: int


def block_geometry(model: Model, settings: WorkerSettings = WorkerSettings()) -> BlockGeometry:
    """The geometry that follows from a model's head_dim and group_size and from recent_tokens."""
    options = worker_options(model, Rank(), settings)
    out = options_of(_abi.crumb_block_geometry)
    check(c.crumb_block_geometry_of(ctypes.byref(options), ctypes.byref(out)))
    return BlockGeometry(out.tile_bytes, out.rows_per_block, out.sink_blocks, out.recent_blocks)


@dataclasses.dataclass(frozen=True)
class BlockPool:
    """One layer's part of an engine's pool: block b of a group begins at its address + b *
    block_stride bytes. The groups may share their memory."""

    history: int
    sink: int
    recent: int
    block_stride: int
    blocks: int

    def struct(self) -> Any:
        """crumb_block_pool."""
        return options_of(_abi.crumb_block_pool, history=self.history, sink=self.sink,
                          recent=self.recent, block_stride=self.block_stride, blocks=self.blocks)


@dataclasses.dataclass(frozen=True)
class BlockBatch:
    """The requests of one step, as addresses of int32 arrays.

    query_start: [requests + 1], first fresh token of each. lengths: [requests], tokens with the
    fresh ones. history, sink, recent: (address, entries between two requests) of block tables.
    """

    requests: int
    query_start: int
    lengths: int
    history: Tuple[int, int]
    sink: Tuple[int, int]
    recent: Tuple[int, int]

    def struct(self) -> Any:
        """crumb_block_batch."""
        return options_of(
            _abi.crumb_block_batch, requests=self.requests, query_start=self.query_start,
            lengths=self.lengths, history=self.history[0], sink=self.sink[0],
            recent=self.recent[0], history_stride=self.history[1], sink_stride=self.sink[1],
            recent_stride=self.recent[1])


class BlockAttention(Handle):
    """Attention of a model's layers over an engine's blocks. It keeps no state of requests."""

    def __init__(self, model: Model, *, rank: Rank = Rank(),
                 settings: WorkerSettings = WorkerSettings()) -> None:
        options = worker_options(model, rank, settings)
        handle = ctypes.c_void_p()
        check(c.crumb_block_attention_open(ctypes.byref(options), ctypes.byref(handle)))
        self._own(handle, c.crumb_block_attention_close)

    def attend(self, layer: int, pool: Any, batch: Any, rows: Any) -> None:
        """Stores the fresh rows of one layer and computes the attention of the fresh tokens.

        pool, batch: results of `struct`, which can be used again. rows: of `fresh_rows`. Raises
        InvalidArgument for blocks outside the pool, FailedPrecondition if rows of earlier tokens
        are missing.
        """
        self._check(c.crumb_block_attend(self._handle, layer, ctypes.byref(pool),
                                         ctypes.byref(batch), ctypes.byref(rows)))


def fresh_rows(q: Tuple[int, int], k: Tuple[int, int], v: Tuple[int, int],
               out: Tuple[int, int]) -> Any:
    """crumb_block_rows of (address, elements between two tokens) of BF16 rows."""
    return options_of(_abi.crumb_block_rows, q=q[0], k=k[0], v=v[0], out=out[0], q_stride=q[1],
                      k_stride=k[1], v_stride=v[1], out_stride=out[1])


@dataclasses.dataclass(frozen=True)
class DeviceBlockLimits:
    """Bounds of a step, for which device memory is allocated; 0 takes the default that
    crumb_device_block_options states.

    requests, tokens: of a step. pages: history blocks of a request. padding_block: a request whose
    first recent block this is takes no part; -1: there is no such block.
    """

    requests: int = 0
    tokens: int = 0
    pages: int = 0
    padding_block: int = -1

    def struct(self) -> Any:
        """crumb_device_block_options."""
        return options_of(_abi.crumb_device_block_options, requests=self.requests,
                          tokens=self.tokens, pages=self.pages,
                          has_padding_block=int(self.padding_block >= 0),
                          padding_block=self.padding_block)


def block_step(decodes: int, tokens: int, tokens_max: int) -> Any:
    """crumb_block_step: leading requests with one fresh token each, fresh tokens of all requests,
    and of one request, both at most."""
    return options_of(_abi.crumb_block_step, decodes=decodes, tokens=tokens, tokens_max=tokens_max)


class DeviceBlockAttention(Handle):
    """Attention over blocks in the memory of one GPU. All work is enqueued on a CUDA stream, and
    can be captured into a CUDA graph. Used by one thread at a time."""

    def __init__(self, model: Model, device: int = 0, *,
                 limits: DeviceBlockLimits = DeviceBlockLimits(), rank: Rank = Rank(),
                 settings: WorkerSettings = WorkerSettings()) -> None:
        options, bounds = worker_options(model, rank, settings), limits.struct()
        opened, handle = ctypes.c_void_p(), ctypes.c_void_p()
        check(c.crumb_device_open(b"cuda", device, ctypes.byref(opened)))
        try:
            check(c.crumb_device_blocks_open(opened, ctypes.byref(options), ctypes.byref(bounds),
                                             ctypes.byref(handle)))
        finally:
            c.crumb_device_close(opened)
        self._own(handle, c.crumb_device_blocks_close)
        #: bytes of device memory, beside the model's rotations
        self.device_bytes = int(c.crumb_device_blocks_bytes(handle))

    def prepare(self, pool: Any, batch: Any, step: Any, stream: int) -> None:
        """Begins a step. step: of `block_step`. REQUIRES: every call passes the same layer's pool,
        because request headers are stored only there."""
        self._check(c.crumb_device_blocks_prepare(self._handle, ctypes.byref(pool),
                                                  ctypes.byref(batch), ctypes.byref(step), stream))

    def attend(self, layer: int, pool: Any, rows: Any, stream: int) -> None:
        """Stores the fresh rows of one layer and computes the attention of the fresh tokens. Tokens
        of q and of out are adjacent."""
        self._check(c.crumb_device_blocks_attend(self._handle, layer, ctypes.byref(pool),
                                                 ctypes.byref(rows), stream))

    def raise_fault(self) -> None:
        """Raises the error that the device has found in a step's tables, if any, without waiting
        for it. The outputs of such a request are NaN."""
        self._check(c.crumb_device_blocks_check(self._handle))
