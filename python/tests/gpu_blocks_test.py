#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.blocks in a GPU's memory, against the same on the CPU: gpu_blocks_test.py [--build DIR]

Has the requirements of gpu_test.py, and exits with 77 where there is no device. Pools are filled
with NaN, so that a block that is read and was not written is noticed.
"""

import argparse
import pathlib
import random
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))
import develop  # noqa: E402

OPTIONS = argparse.Namespace()
SKIPPED = 77
LAYERS, BLOCKS, PADDING = 2, 700, 0
# head_dim, query heads, KV heads
SHAPES = [(128, 32, 8), (128, 4, 1), (64, 8, 2), (64, 4, 1), (256, 4, 2)]
# Bounds on a token's difference between CPU and GPU, relative to its output: of one token, and the
# mean of a step. Outputs of random values nearly cancel out, some codes of tiles round differently,
# and both sides round queries and probabilities in their own ways. client_cuda_block_attention_test
# compares with double precision.
ERROR_MAX, MEAN_ERROR_MAX = 6e-2, 1e-2


class Side:
    """A pool and attention on one device; the same rows and tables are given to both sides."""

    def __init__(self, blocks, torch, model, device):
        self.torch, self.device, self.model, self.blocks = torch, device, model, blocks
        self.geometry = blocks.block_geometry(model)
        self.layer_bytes = self.geometry.tile_bytes * model.kv_heads
        # BF16 NaN in rows, 0xff codes and NaN factors in tiles.
        self.memory = torch.full((LAYERS, BLOCKS, self.layer_bytes), 0xff, dtype=torch.uint8,
                                 device=device)
        if device == "cpu":
            self.attention = blocks.BlockAttention(model)
        else:
            limits = blocks.DeviceBlockLimits(requests=9, tokens=2048, pages=64,
                                              padding_block=PADDING)
            self.attention = blocks.DeviceBlockAttention(model, limits=limits)

    def close(self):
        self.attention.close()

    def zero(self, block):
        self.memory[:, block] = 0

    def pool(self, layer):
        base = self.memory[layer].data_ptr()
        return self.blocks.BlockPool(base, base, base, self.layer_bytes, BLOCKS).struct()

    def batch(self, tables):
        """tables: query_start, lengths, history, sink, recent on this device."""
        start, lengths, *groups = tables
        return self.blocks.BlockBatch(
            len(lengths), start.data_ptr(), lengths.data_ptr(),
            *((table.data_ptr(), table.stride(0)) for table in groups)).struct()

    def attend(self, tables, q, k, v, out, decodes=0, tokens_max=0):
        """Computes all layers into `out`."""
        batch = self.batch(tables)
        if self.device != "cpu":
            stream = self.torch.cuda.current_stream().cuda_stream
            step = self.blocks.block_step(decodes, q.shape[1], tokens_max)
            self.attention.prepare(self.pool(0), batch, step, stream)
        for layer in range(LAYERS):
            rows = self.blocks.fresh_rows(*((x[layer].data_ptr(), x.stride(1))
                                            for x in (q, k, v, out)))
            if self.device == "cpu":
                self.attention.attend(layer, self.pool(layer), batch, rows)
            else:
                self.attention.attend(layer, self.pool(layer), rows, stream)


class Engine:
    """Requests, whose blocks are handed out in random order."""

    def __init__(self, crumb, torch, shape):
        from crumb import blocks
        head_dim, q_heads, kv_heads = shape
        self.torch = torch
        self.model = crumb.Model("made-up", "w", layers=LAYERS, kv_heads=kv_heads, q_heads=q_heads,
                                 head_dim=head_dim, rotation="hadamard")
        self.cpu = Side(blocks, torch, self.model, "cpu")
        self.gpu = Side(blocks, torch, self.model, "cuda")
        self.free = random.Random(1).sample(range(1, BLOCKS), BLOCKS - 1)
        self.requests = []
        self.generator = torch.Generator().manual_seed(5)

    def close(self):
        self.cpu.close()
        self.gpu.close()

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def new(self):
        geometry = self.cpu.geometry
        request = {"length": 0, "history": [], "sink": self.take(geometry.sink_blocks),
                   "recent": self.take(geometry.recent_blocks)}
        for side in (self.cpu, self.gpu):
            side.zero(request["recent"][0])
        return request

    def end(self, request):
        for blocks in ("history", "sink", "recent"):
            self.free += request[blocks]

    def tables(self, requests, tokens, padding=0):
        """Tables on the CPU of a step, with `padding` requests behind those that exist."""
        torch, starts, lengths = self.torch, [0], []
        columns = {"history": 64, "sink": 64, "recent": 64}
        tables = {name: torch.full((len(requests) + padding, count), PADDING, dtype=torch.int32)
                  for name, count in columns.items()}
        for index, (request, count) in enumerate(zip(requests, tokens)):
            end = request["length"] + count
            request["history"] += self.take(-(-end // 64) - len(request["history"]))
            starts.append(starts[-1] + count)
            lengths.append(end)
            for name, table in tables.items():
                table[index, :len(request[name])] = torch.tensor(request[name], dtype=torch.int32)
        starts += starts[-1:] * padding
        lengths += [0] * padding
        integers = [torch.tensor(x, dtype=torch.int32) for x in (starts, lengths)]
        return integers + list(tables.values())

    def rows(self, tokens):
        """q, and k and v in one tensor as engines have them."""
        torch, model = self.torch, self.model
        q = torch.randn((LAYERS, tokens, model.q_heads * model.head_dim), generator=self.generator)
        kv = torch.randn((LAYERS, tokens, 2, model.kv_heads * model.head_dim),
                         generator=self.generator)
        kv[..., 3::16] *= 6  # channels with outliers
        q, kv = q.bfloat16(), kv.bfloat16()
        return q, kv

    def step(self, requests, tokens):
        """Computes a step on both sides; returns their outputs."""
        tables, (q, kv) = self.tables(requests, tokens), self.rows(sum(tokens))
        decodes = next((i for i, count in enumerate(tokens) if count != 1), len(tokens))
        outs = []
        for side in (self.cpu, self.gpu):
            out = self.torch.full(q.shape, float("nan"), dtype=self.torch.bfloat16,
                                  device=side.device)
            given = [x.to(side.device) for x in tables]
            q_there, kv_there = q.to(side.device), kv.to(side.device)
            side.attend(given, q_there, kv_there[:, :, 0], kv_there[:, :, 1], out, decodes,
                        max(tokens))
            outs.append(out.float().cpu())
        self.gpu.attention.raise_fault()
        for request, count in zip(requests, tokens):
            request["length"] += count
        return outs


class GpuBlocksTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import crumb
        import torch
        cls.crumb, cls.torch = crumb, torch

    def engine(self, shape):
        engine = Engine(self.crumb, self.torch, shape)
        self.addCleanup(engine.close)
        return engine

    def same(self, outs, where):
        """Outputs of each token, [layers, tokens, elements], are alike."""
        expected, found = outs
        error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        self.assertLess(float(error.max()), ERROR_MAX, where)  # false for NaN
        self.assertLess(float(error.mean()), MEAN_ERROR_MAX, where)

    def test_prompts_in_chunks_and_decoding_requests_beside_them(self):
        for shape in SHAPES:
            engine = self.engine(shape)
            first, second, third = engine.new(), engine.new(), engine.new()
            steps = [([first], [700]), ([first, second], [1, 450]),
                     ([first, second, third], [1, 100, 30]),
                     ([first, third, second], [1, 1000, 63]),
                     ([first, second, third], [1, 1, 1]), ([third], [511])]
            for index, (requests, tokens) in enumerate(steps):
                self.same(engine.step(requests, tokens), (shape, index))
            for index in range(70):  # a window of each is completed
                self.same(engine.step([third, first, second], [1, 1, 1]), (shape, "decode", index))
            # Blocks go to another request.
            engine.end(first)
            self.same(engine.step([third, engine.new()], [1, 600]), (shape, "again"))

    def test_a_captured_step_serves_all_that_follow(self):
        torch, engine = self.torch, self.engine(SHAPES[0])
        requests = [engine.new() for _ in range(5)]
        engine.step(requests, [400, 63, 700, 65, 257])
        side, width = engine.gpu, 8
        tables = [x.cuda() for x in engine.tables([], [], padding=width)]
        q, kv = (x.cuda() for x in engine.rows(width))
        out = torch.empty_like(q)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.attend(tables, q, kv[:, :, 0], kv[:, :, 1], out, width, 1)
        for index in range(130):
            mine = requests[:3] if index % 3 == 2 else requests
            padding = width - len(mine)
            now = engine.tables(mine, [1] * len(mine), padding)
            fresh = engine.rows(width)
            for buffer, values in zip([*tables, q, kv], [*now, *fresh]):
                buffer.copy_(values)
            graph.replay()
            expected = torch.empty(fresh[0].shape, dtype=torch.bfloat16)
            engine.cpu.attend([x[:len(mine) + (i == 0)].contiguous() for i, x in enumerate(now)],
                              fresh[0], fresh[1][:, :, 0], fresh[1][:, :, 1], expected)
            self.same([x[:, :len(mine)].float().cpu() for x in (expected, out)], index)
            for request in mine:
                request["length"] += 1
        side.attention.raise_fault()

    def test_faults_are_reported_and_outputs_are_nan(self):
        crumb, engine = self.crumb, self.engine(SHAPES[1])
        good, bad = engine.new(), engine.new()
        engine.step([good, bad], [300, 300])
        for change, error in (
                (lambda: bad.update(length=310), crumb.FailedPrecondition),
                (lambda: bad["recent"].__setitem__(3, BLOCKS), crumb.InvalidArgument)):
            kept = {**bad, "recent": list(bad["recent"])}
            change()
            side, tables = engine.gpu, [x.cuda() for x in engine.tables([good, bad], [1, 1])]
            q, kv = (x.cuda() for x in engine.rows(2))
            out = self.torch.zeros_like(q)
            side.attend(tables, q, kv[:, :, 0], kv[:, :, 1], out, 2, 1)
            self.torch.cuda.synchronize()
            with self.assertRaises(error):
                side.attention.raise_fault()
            side.attention.raise_fault()  # it is reported once
            self.assertTrue(out[:, 1].isnan().all())
            self.assertFalse(out[:, 0].isnan().any())
            bad.update(kept)
        with self.assertRaisesRegex(crumb.InvalidArgument, "there is room for 9 requests"):
            side.attend(tables, q, kv[:, :, 0], kv[:, :, 1], out, 3, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path)
    OPTIONS.__dict__.update(parser.parse_args().__dict__)
    try:
        import torch
        if not torch.cuda.is_available():
            raise ImportError("no CUDA device")
    except ImportError as error:
        print(f"skipped: {error}")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        if OPTIONS.build is not None:
            sys.path.insert(0, str(develop.stage(OPTIONS.build, pathlib.Path(folder))))
        result = unittest.main(argv=sys.argv[:1], exit=False, verbosity=2).result
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
