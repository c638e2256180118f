# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.blocks against crumb.Worker: the same rows in blocks and in a sequence give the same
attention, with nothing but the standard library."""

import ctypes
import struct
import unittest

import crumb
from crumb import blocks
import support

MODEL = support.MODEL
TOKENS = 460  # two windows of history, sink and recent window
BLOCKS = 160
Q_ROW, KV_ROW = MODEL.q_heads * MODEL.head_dim, MODEL.kv_heads * MODEL.head_dim


def rows(begin, end, layer, what, elements):
    """BF16 bits of rows, which depend on position, layer and `what`."""
    values = support.bits(0, 0)
    for position in range(begin, end):
        values += support.bits(1 + 8 * position + 4 * layer + what, elements)
    return values


def floats(bits):
    """BF16 bits as numbers."""
    return [struct.unpack("<f", struct.pack("<I", x << 16))[0] for x in bits]


def address(values):
    """The address of the values of an array of the standard library."""
    return values.buffer_info()[0]


class Request:
    """One request in a pool of its own, whose blocks are in no order."""

    def __init__(self):
        self.geometry = blocks.block_geometry(MODEL)
        self.layer_bytes = self.geometry.tile_bytes * MODEL.kv_heads
        self.stride = self.layer_bytes * MODEL.layers
        self.memory = (ctypes.c_ubyte * (self.stride * BLOCKS))()
        order = [(7 * i + 3) % BLOCKS for i in range(BLOCKS)]
        counts = (-(-TOKENS // 64), self.geometry.sink_blocks, self.geometry.recent_blocks)
        self.tables = []
        for count in counts:
            self.tables.append((ctypes.c_int32 * count)(*order[:count]))
            order = order[count:]
        self.length = 0
        self.attention = blocks.BlockAttention(MODEL)

    def step(self, end, pool_blocks=BLOCKS):
        """Computes tokens up to `end`; returns the outputs of each layer as BF16 bits."""
        tokens, outputs = end - self.length, []
        start, length = (ctypes.c_int32 * 2)(0, tokens), (ctypes.c_int32 * 1)(end)
        batch = blocks.BlockBatch(
            1, ctypes.addressof(start), ctypes.addressof(length),
            *((ctypes.addressof(table), len(table)) for table in self.tables)).struct()
        for layer in range(MODEL.layers):
            base = ctypes.addressof(self.memory) + layer * self.layer_bytes
            pool = blocks.BlockPool(base, base, base, self.stride, pool_blocks).struct()
            q = rows(self.length, end, layer, 0, Q_ROW)
            k = rows(self.length, end, layer, 1, KV_ROW)
            v = rows(self.length, end, layer, 2, KV_ROW)
            out = support.bits(1, tokens * Q_ROW)
            self.attention.attend(layer, pool, batch, blocks.fresh_rows(
                (address(q), Q_ROW), (address(k), KV_ROW), (address(v), KV_ROW),
                (address(out), Q_ROW)))
            outputs.append(out)
        self.length = end
        return outputs


class BlocksTest(unittest.TestCase):
    def test_attention_is_that_of_a_sequence_which_decodes(self):
        request = Request()
        whole = request.step(TOKENS - 1)
        last = request.step(TOKENS)
        with crumb.Worker(None, MODEL) as worker, worker.begin([1]) as sequence:
            for position in range(TOKENS):
                for layer in range(MODEL.layers):
                    kv = [rows(position, position + 1, layer, what, KV_ROW) for what in (1, 2)]
                    sequence.append(layer, *kv)
                    out = sequence.attend(layer, rows(position, position + 1, layer, 0, Q_ROW))
                    if position in (0, 63, 64, 319, 320, 384, TOKENS - 2, TOKENS - 1):
                        found = (last[layer] if position == TOKENS - 1 else
                                 whole[layer][position * Q_ROW:(position + 1) * Q_ROW])
                        expected = struct.unpack(f"<{Q_ROW}f", bytes(out))
                        error = max(abs(x - y) for x, y in zip(floats(found), expected))
                        # Outputs below 1 are rounded to BF16.
                        self.assertLess(error, 2**-8, (position, layer))
                sequence.advance([1 + position % 1000])

    def test_errors_are_exceptions(self):
        request = Request()
        with self.assertRaisesRegex(crumb.InvalidArgument, "outside the pool"):
            request.step(10, pool_blocks=5)
        request.step(10)
        request.length = 20
        with self.assertRaisesRegex(crumb.FailedPrecondition, "first recent block of zeros"):
            request.step(21)
        request.attention.close()
        with self.assertRaisesRegex(crumb.InvalidArgument, "closed"):
            request.step(22)


if __name__ == "__main__":
    unittest.main()
