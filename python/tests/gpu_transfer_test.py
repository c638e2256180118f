#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.Transfer with a paged cache on a GPU, against one on the CPU: gpu_transfer_test.py [--build
DIR]

Has the requirements of gpu_test.py, and exits with 77 where there is no device. Caches have the
layouts of vLLM on a GPU: [blocks, heads, tokens, 2 * head_dim], token-major or head-major.
"""

import argparse
import pathlib
import random
import sys
import tempfile
import types
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))
import develop  # noqa: E402

OPTIONS = argparse.Namespace()
SKIPPED = 77
PAGES, LAYERS, HEADS, DIM = 40, 3, 2, 128
TOKENS = [i * 7919 % 50000 for i in range(64 * PAGES)]
LAYOUTS = [("NHD", 16), ("HND", 16), ("NHD", 64), ("HND", 128)]


class Cache:
    """A paged cache in vLLM's layout, with random rows and a block table in random order."""

    def __init__(self, torch, device, layout, block_tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        used = -(-64 * PAGES // block_tokens)
        self.blocks, self.block_tokens = used + 3, block_tokens
        self.table = random.Random(seed).sample(range(self.blocks), used)
        shape = ((self.blocks, block_tokens, HEADS, 2 * DIM) if layout == "NHD" else
                 (self.blocks, HEADS, block_tokens, 2 * DIM))
        self.layers = []
        for _ in range(LAYERS):
            memory = torch.randn(shape, generator=generator).bfloat16().to(device)
            self.layers.append(memory.permute(0, 2, 1, 3) if layout == "NHD" else memory)

    def rows(self, layer):
        """[heads, tokens, 2 * head_dim] of the sequence, on the CPU."""
        blocks = self.layers[layer][self.table].float().cpu()
        return blocks.permute(1, 0, 2, 3).reshape(HEADS, -1, 2 * DIM)[:, :64 * PAGES]

    def view(self, crumb):
        return crumb.PagedCache([(crumb.PagedRows.of(layer[..., :DIM]),
                                  crumb.PagedRows.of(layer[..., DIM:])) for layer in self.layers],
                                self.blocks, self.block_tokens)


class GpuTransferTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import crumb
        import support
        import torch
        cls.crumb, cls.torch = crumb, torch
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        crumbd = support.Crumbd(pathlib.Path(crumb.path_of("crumbd")).parent, folder.name,
                                host_bytes="512MiB")
        cls.addClassCleanup(crumbd.stop)
        crumbd.start()
        cls.client = crumb.Client(folder.name)
        cls.addClassCleanup(cls.client.close)
        cls.client.wait_connected(30)

    def model(self, history, name):
        return self.crumb.Model("made-up", name, layers=LAYERS, kv_heads=HEADS, q_heads=8,
                                head_dim=DIM, history=history)

    def transfer(self, model, cache, **options):
        transfer = self.crumb.Transfer(self.client, model)
        self.addCleanup(transfer.close)
        transfer.use_cache(cache.view(self.crumb), **options)
        return transfer

    def store(self, transfer, cache, stream=None):
        keyspace = transfer.keyspace()
        with transfer.store(keyspace, transfer.keys(keyspace, TOKENS), 0, cache.table) as store:
            if stream is None:
                store.layers()
            else:
                store.enqueue(stream.cuda_stream)
            store.finish()

    def load(self, transfer, cache, first=0):
        keyspace = transfer.keyspace()
        keys = transfer.keys(keyspace, TOKENS)
        with transfer.acquire(keyspace, keys) as lease:
            self.assertEqual(lease.pages, PAGES)
            return transfer.load(lease.token, keys, first, PAGES, cache.table)

    def compare(self, got, expected, most):
        for layer in range(LAYERS):
            ours, theirs = got.rows(layer), expected.rows(layer)
            error = (ours - theirs).norm() / theirs.norm()
            self.assertLessEqual(float(error), most)

    def cache(self, device, layout, block_tokens, seed):
        return Cache(self.torch, device, layout, block_tokens, seed)

    def test_pages_go_from_a_gpu_to_the_cpu_and_back(self):
        for history, most in (("bf16", 0.0), ("int2", 2e-2)):
            for layout, block in LAYOUTS:
                with self.subTest(history=history, layout=layout, block=block):
                    model = self.model(history, f"{history} {layout} {block}")
                    source = self.cache("cuda", layout, block, 1)
                    on_cpu = self.cache("cpu", "HND", 32, 2)
                    on_gpu = self.cache("cuda", layout, block, 3)
                    alone = self.cache("cpu", "NHD", 16, 4)
                    writer = self.transfer(model, source, staging_bytes=64 << 20)
                    self.store(writer, source)
                    writer.wait_published(60)
                    with self.load(self.transfer(model, on_cpu), on_cpu) as load:
                        load.layers()
                    with self.load(self.transfer(model, on_gpu), on_gpu) as load:
                        load.layers()
                    # CPU and GPU have dequantized the same tiles.
                    self.compare(on_gpu, on_cpu, 0.0 if history == "bf16" else 2.6e-3)
                    # The CPU's quantizer over the same rows; a few codes round differently.
                    for memory, given in zip(alone.layers, source.layers):
                        rows = given[source.table].permute(1, 0, 2, 3).reshape(HEADS, -1, 2 * DIM)
                        blocks = rows[:, :64 * PAGES].reshape(HEADS, -1, 16, 2 * DIM).cpu()
                        memory[alone.table] = blocks.permute(1, 0, 2, 3)
                    other = self.model(history, f"{history} {layout} {block} cpu")
                    self.store(cpu := self.transfer(other, alone), alone)
                    cpu.wait_published(60)
                    with self.load(cpu, alone) as load:
                        load.layers()
                    self.compare(on_gpu, alone, most)

    def test_a_store_reads_rows_in_the_order_of_its_stream(self):
        torch = self.torch
        model = self.model("bf16", "order")
        source, target = self.cache("cuda", "NHD", 16, 5), self.cache("cuda", "HND", 64, 6)
        expected = [source.rows(layer) for layer in range(LAYERS)]
        writer = self.transfer(model, source)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            self.store(writer, source, stream)
            for layer in source.layers:
                layer.zero_()
        writer.wait_published(60)
        with self.load(self.transfer(model, target), target) as load:
            load.enqueue(stream.cuda_stream)
            load.wait()
            self.assertTrue(load.done())
        for layer in range(LAYERS):
            self.assertTrue(torch.equal(target.rows(layer), expected[layer]))

    def test_a_load_does_not_block_and_waits_for_its_stream(self):
        torch = self.torch
        model = self.model("bf16", "async")
        source, target = self.cache("cuda", "NHD", 16, 7), self.cache("cuda", "NHD", 16, 8)
        self.store(writer := self.transfer(model, source), source)
        writer.wait_published(60)
        reader = self.transfer(model, target)
        stream, gate = torch.cuda.Stream(), torch.cuda.Event()
        with self.load(reader, target) as load:
            load.enqueue(stream.cuda_stream)  # the first load pins and allocates
            load.wait()
            for layer in target.layers:
                layer.zero_()
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000_000)
            gate.record()
            stream.wait_event(gate)
            load.enqueue(stream.cuda_stream)
            self.assertFalse(gate.query() or load.done(), "the call waited for the stream")
            load.wait()
            self.assertTrue(gate.query())
        self.compare(target, source, 0.0)

    def test_caches_that_the_kernels_cannot_read_and_host_rows_among_them_are_refused(self):
        crumb = self.crumb
        model = self.model("bf16", "refused")
        good = self.cache("cuda", "NHD", 16, 9)
        planes = self.torch.zeros(good.blocks, HEADS, DIM, 2 * 16, dtype=self.torch.bfloat16,
                                  device="cuda")
        rows = [crumb.PagedRows.of(planes[..., :16], "bhdt"),
                crumb.PagedRows.of(planes[..., 16:], "bhdt")]
        transfer = crumb.Transfer(self.client, model)
        self.addCleanup(transfer.close)
        with self.assertRaises(crumb.InvalidArgument):
            transfer.use_cache(crumb.PagedCache([tuple(rows)] * LAYERS, good.blocks, 16))
        host = self.cache("cpu", "NHD", 16, 9)
        mixed = [good.view(crumb).layers[0], *host.view(crumb).layers[1:]]
        with self.assertRaises(crumb.InvalidArgument):
            transfer.use_cache(crumb.PagedCache(mixed, good.blocks, 16))

    def test_the_connectors_mover_on_a_gpu(self):
        mover_class, streams_class, jobs = connector_parts()
        model = self.model("bf16", "mover")
        source, target = self.cache("cuda", "NHD", 16, 10), self.cache("cuda", "HND", 16, 11)
        writer, reader = self.transfer(model, source), self.transfer(model, target)
        movers = []
        for transfer in (writer, reader):
            movers.append(mover_class(transfer, 16, 1.0))
            movers[-1].use_device(streams_class(0))
            self.addCleanup(movers[-1].close)
        keyspace = writer.keyspace()
        keys = tuple(writer.keys(keyspace, TOKENS))
        movers[0].store([jobs.StoreJob("a", keyspace, keys, 0, bytes(32), tuple(source.table),
                                       False)])
        writer.wait_published(60)
        with writer.acquire(keyspace, keys) as lease:
            movers[1].start_loads([jobs.LoadJob("b", lease.token, keys, 0, tuple(target.table))])
            movers[1]._loading["b"].result(60)
        self.assertEqual(movers[1].take_finished(), {"b"})
        self.assertEqual(movers[1].take_failed_blocks(), set())
        self.compare(target, source, 0.0)


def connector_parts():
    """PageMover, DeviceStreams and the module of jobs: crumb.vllm itself imports vLLM."""
    import importlib
    import crumb
    package = types.ModuleType("crumb.vllm")
    package.__path__ = [str(pathlib.Path(crumb.__file__).parent / "vllm")]
    sys.modules.setdefault("crumb.vllm", package)
    return (importlib.import_module("crumb.vllm._worker").PageMover,
            importlib.import_module("crumb.vllm._device").DeviceStreams,
            importlib.import_module("crumb.vllm._requests"))


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
        sys.path.insert(0, str(HERE))
        result = unittest.main(argv=sys.argv[:1], exit=False, verbosity=2).result
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
