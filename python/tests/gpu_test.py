#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.GpuWorker and crumb.Batch on a GPU, against crumb.Worker: gpu_test.py [--build DIR]

Needs a CUDA device, torch with CUDA, and either a build of the targets crumbd, crumb and crumb_c
with CRUMB_CUDA=ON (--build), or the installed wheel of such a build. Without a device or such a
torch it says so and exits with 77; a library that was built without CUDA is a failure.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))
import develop  # noqa: E402

OPTIONS = argparse.Namespace()
SKIPPED = 77
PROMPT, DECODE, CHUNK, CACHED = 1000, 8, 256, 704
TOKENS = [i * 7919 % 50000 for i in range(PROMPT + DECODE)]


class GpuTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        import crumb
        import support
        import torch
        cls.crumb, cls.torch = crumb, torch
        cls.model = crumb.Model("made-up", "gpu", layers=2, kv_heads=2, q_heads=8, head_dim=128)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        crumbd = support.Crumbd(pathlib.Path(crumb.path_of("crumbd")).parent, folder.name)
        cls.addClassCleanup(crumbd.stop)
        crumbd.start()
        cls.socket_dir = folder.name
        cls.client = crumb.Client(folder.name)
        cls.addClassCleanup(cls.client.close)
        cls.client.wait_connected(30)
        cls.cpu = crumb.Worker(cls.client, cls.model)
        cls.addClassCleanup(cls.cpu.close)
        with cls.cpu.begin(TOKENS[:PROMPT]) as writer:
            cls.on_cpu(writer, PROMPT)
            writer.finish()
        cls.cpu.wait_published(30)

    @classmethod
    def rows(cls, begin, end, layer, heads, what):
        """BF16 rows on the CPU that depend on position, layer and `what` only."""
        torch = cls.torch
        made = []
        for position in range(begin, end):
            generator = torch.Generator().manual_seed(97 * position + 11 * layer + what)
            made.append(torch.rand(heads, 128, generator=generator) * 2 - 1)
        return torch.stack(made).bfloat16()

    @classmethod
    def on_cpu(cls, sequence, count):
        begin, out = sequence.length, None
        for layer in range(2):
            k, v, q = (cls.rows(begin, begin + count, layer, heads, what)
                       for what, heads in enumerate((2, 2, 8)))
            sequence.append(layer, k, v)
            out = sequence.attend(layer, q)
        sequence.advance(TOKENS[begin:begin + count])
        return out

    def device_rows(self, sequence, count, layer):
        begin = sequence.length
        return [self.rows(begin, begin + count, layer, heads, what).cuda()
                for what, heads in enumerate((2, 2, 8))]

    def on_gpu(self, batch, sequence, count):
        begin, out = sequence.length, None
        batch.prepare([(sequence, count)])
        batch.start()
        for layer in range(2):
            k, v, q = self.device_rows(sequence, count, layer)
            batch.append(layer, k, v)
            out = batch.attend(layer, q)
            self.torch.cuda.synchronize()  # k, v and q must outlive the stream's reads
        batch.advance(TOKENS[begin:begin + count], [count])
        return out

    def assert_alike(self, on_gpu, on_cpu):
        difference = (on_gpu.cpu().float() - on_cpu).norm() / on_cpu.norm()
        self.assertLess(float(difference), 1e-2)

    def worker(self, **gpu):
        settings = self.crumb.GpuSettings(pages=128, sequences=4, **gpu)
        client = self.crumb.Client(self.socket_dir)  # takes part in a device pool once
        self.addCleanup(client.close)
        client.wait_connected(30)
        worker = self.crumb.GpuWorker(client, self.model, gpu=settings)
        self.addCleanup(worker.close)
        return worker

    def test_prompt_and_decode_are_those_of_the_cpu(self):
        pool = 16 << 20
        for gpu in ({}, {"pool_bytes": pool, "pool_sink_bytes": pool, "pool_handle_bytes": pool}):
            for output in ("f32", "bf16"):
                with self.subTest(pools=bool(gpu), output=output):
                    self.compare(self.worker(**gpu), output)

    def compare(self, worker, output):
        with worker.batch(prompts=True, tokens=CHUNK, pages=64, output=output) as prompts, \
                worker.batch(pages=64, output=output) as decode, \
                self.cpu.begin(TOKENS[:PROMPT], deadline=10) as expected, \
                worker.begin(TOKENS[:PROMPT], deadline=10) as sequence:
            self.assertEqual((expected.cached_tokens, sequence.cached_tokens), (CACHED, CACHED))
            while sequence.length < PROMPT:
                count = min(CHUNK, sequence.pass_tokens_max)
                self.assert_alike(self.on_gpu(prompts, sequence, count),
                                  self.on_cpu(expected, count))
            for _ in range(DECODE):
                self.assert_alike(self.on_gpu(decode, sequence, 1), self.on_cpu(expected, 1))
            with decode.fork(sequence) as fork:
                self.assertEqual(fork.length, PROMPT + DECODE)
            decode.finish(sequence)
            worker.wait_published(10)
        self.assertEqual(worker.counters()["verify_failures"], 0)

    def test_a_captured_pass_and_operators(self):
        import crumb.ops
        torch, worker = self.torch, self.worker()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), worker.batch(pages=64, output="f32") as decode, \
                worker.batch(prompts=True, tokens=CHUNK, pages=64, output="f32") as prompts, \
                self.cpu.begin(TOKENS[:PROMPT], deadline=10) as expected, \
                worker.begin(TOKENS[:PROMPT], deadline=10) as sequence:
            while sequence.length < PROMPT:
                count = min(CHUNK, sequence.pass_tokens_max)
                self.on_gpu(prompts, sequence, count)
                self.on_cpu(expected, count)
            handle = crumb.ops.register(decode)
            self.addCleanup(crumb.ops.unregister, handle)
            inputs = [self.device_rows(sequence, 1, layer) for layer in range(2)]
            decode.prepare([(sequence, 1)])
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                decode.start()
                for layer, (k, v, q) in enumerate(inputs):
                    appended = torch.ops.crumb.append(handle, layer, k, v)
                    out = torch.ops.crumb.attend(handle, layer, q, appended)
            for step in range(DECODE):
                if step > 0:
                    decode.prepare([(sequence, 1)])
                for layer in range(2):
                    for held, fresh in zip(inputs[layer], self.device_rows(sequence, 1, layer)):
                        held.copy_(fresh)
                graph.replay()
                stream.synchronize()
                begin = sequence.length
                decode.advance(TOKENS[begin:begin + 1], [1])
                self.assert_alike(out, self.on_cpu(expected, 1))

    def test_tensors_elsewhere_are_refused(self):
        torch, worker = self.torch, self.worker()
        with worker.batch(pages=64) as batch, worker.begin([1, 2]) as sequence:
            self.assertEqual(sequence.cached_tokens, 0)
            k = torch.zeros(1, 2, 128, dtype=torch.bfloat16)
            with self.assertRaisesRegex(self.crumb.InvalidArgument, "on cuda:0"):
                batch.append(0, k, k)
        with self.assertRaises(self.crumb.Unavailable):
            self.crumb.GpuWorker(None, self.model, device=4096)

    def test_host_time_of_a_decode_call(self):
        """Prints the host's time for an append and an attend; claims nothing."""
        torch, worker = self.torch, self.worker()
        seconds = []
        with worker.batch(prompts=True, tokens=64, pages=64) as prompts, \
                worker.batch(pages=64) as decode, worker.begin(TOKENS[:1]) as sequence:
            self.on_gpu(prompts, sequence, 1)
            k, v, q = self.device_rows(sequence, 1, 0)
            out = torch.empty_like(q)
            for token in range(200):
                decode.prepare([(sequence, 1)])
                decode.start()
                torch.cuda.synchronize()
                for layer in range(2):
                    begin = time.perf_counter()
                    decode.append(layer, k, v)
                    decode.attend(layer, q, out)
                    seconds.append(time.perf_counter() - begin)
                torch.cuda.synchronize()
                decode.advance([token], [1])
        print(f"host time of one append and attend: median "
              f"{statistics.median(seconds) * 1e6:.1f} us of {len(seconds)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path)
    _, rest = parser.parse_known_args(namespace=OPTIONS)
    try:
        import torch
        if not torch.cuda.is_available():
            raise ImportError("torch sees no CUDA device")
    except ImportError as missing:
        print(f"Skipped: needs a CUDA device and torch with CUDA: {missing}")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        if OPTIONS.build is not None:
            sys.path.insert(0, str(develop.stage(OPTIONS.build, pathlib.Path(folder))))
        sys.path.insert(0, str(HERE))
        result = unittest.main(argv=[sys.argv[0], "-v", *rest], exit=False).result
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
