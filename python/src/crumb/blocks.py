# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over INT2 blocks that an engine allocates itself.

crumb.h, "Blocks", says what a block holds and which tokens are attended in which form. Pointers are
addresses of host memory; the caller keeps their owners alive during a call.
"""

import ctypes
import dataclasses
from typing import Any, Tuple

from crumb import _abi
from crumb._library import Handle, c, check, options_of
from crumb.worker import Model, Rank, WorkerSettings, worker_options


@dataclasses.dataclass(frozen=True)
class BlockGeometry:
    """How the cache of a request fills blocks, each of which has `tile_bytes` for every layer and KV
    head.

    rows_per_block: BF16 rows (K and V of one token) that fit in place of a tile. sink_blocks,
    recent_blocks: blocks of BF16 rows that every request has beside its history.
    """

    tile_bytes: int
    rows_per_block: int
    sink_blocks: int
    recent_blocks: int


def block_geometry(model: Model, settings: WorkerSettings = WorkerSettings()) -> BlockGeometry:
    """The geometry that follows from the model's head_dim and group_size, and from recent_tokens."""
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
