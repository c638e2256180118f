# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments that GpuWorker and Batch pass to the C library, without a GPU: the library's
device functions are replaced by ones that record their arguments. That the calls compute is gpu_test.py's
matter."""

import ctypes
import types
import unittest
from unittest import mock

import crumb
import support
from crumb import _abi, _library, gpu

MODEL = support.MODEL


class Recorder:
    """Stands for the C library: keeps each call, hands out handles, returns CRUMB_OK."""

    def __init__(self):
        self.calls, self.live, self.code = [], set(), 0

    def __getattr__(self, name):
        if not name.startswith("crumb_device"):
            return getattr(_library.c, name)
        _, kinds = _abi.FUNCTIONS[name]

        def call(*arguments):
            assert len(arguments) == len(kinds), name
            for kind, argument in zip(kinds, arguments):
                kind.from_param(argument)  # ctypes would take it
            self.calls.append((name, arguments))
            if name.endswith("_close"):
                self.live.remove(getattr(arguments[0], "value", arguments[0]))
                return None
            if name.endswith(("_open", "_begin", "_fork")) and not self.code:
                out = next(a._obj for a in arguments if isinstance(getattr(a, "_obj", None),
                                                                   ctypes.c_void_p))
                out.value = 0x1000 + 16 * len(self.calls)
                self.live.add(out.value)
            return self.code

        return call


class Tensor:
    """The members of a CUDA tensor that the package reads."""

    def __init__(self, torch, address, shape, dtype=None, device="cuda:3", contiguous=True):
        self.shape, self.dtype = torch.Size(shape), dtype or torch.bfloat16
        self.device = torch.device(device)
        self._address, self._contiguous = address, contiguous

    def data_ptr(self):
        return self._address

    def is_contiguous(self):
        return self._contiguous

    def size(self, dimension):
        return self.shape[dimension]

    def numel(self):
        return self.shape.numel()


class GpuCallsTest(unittest.TestCase):
    def setUp(self):
        self.c = Recorder()
        patch = mock.patch.object(gpu, "c", self.c)
        patch.start()
        self.addCleanup(patch.stop)

    def worker(self, **settings):
        worker = crumb.GpuWorker(None, MODEL, device=3, **settings)
        self.addCleanup(worker.close)
        return worker

    def named(self, name):
        return [arguments for call, arguments in self.c.calls if call == name]

    def test_options_reach_the_library(self):
        settings = crumb.GpuSettings(pages=100, pool_bytes=1 << 30, pool_peers=(1, 2),
                                     pins_nothing=True)
        worker = self.worker(gpu=settings, rank=crumb.Rank(tp_rank=1, tp_size=2))
        self.assertEqual(self.named("crumb_device_open")[0][:2], (b"cuda", 3))
        _, _, model, device, _ = self.named("crumb_device_worker_open")[0]
        self.assertEqual((model._obj.head_begin, model._obj.head_end, worker.kv_heads), (1, 2, 1))
        self.assertEqual(device._obj.size, ctypes.sizeof(_abi.crumb_device_worker_options))
        self.assertEqual((device._obj.pages, device._obj.pool_bytes, device._obj.pins_nothing),
                         (100, 1 << 30, 1))
        peers = (ctypes.c_uint32 * device._obj.pool_peer_count).from_address(device._obj.pool_peers)
        self.assertEqual(list(peers), [1, 2])

    def test_a_failed_open_leaves_no_device_open(self):
        with mock.patch.object(self.c, "code", 0):
            def fail(*_):
                self.c.code = 8
                return 8
            with mock.patch.object(Recorder, "crumb_device_worker_open", fail, create=True):
                with self.assertRaises(crumb.ResourceExhausted):
                    crumb.GpuWorker(None, MODEL)
        self.assertEqual(self.c.live, set())

    def test_handles_are_closed_once(self):
        worker = self.worker()
        sequence = worker.begin([1, 2, 3])
        batch = worker.batch(stream=0)
        fork = batch.fork(sequence)
        self.assertEqual(len(self.c.live), 4)
        for handle in (fork, batch, sequence, worker, worker):
            handle.close()
        self.assertEqual(self.c.live, set())

    def test_streams(self):
        torch = types.SimpleNamespace(cuda=types.SimpleNamespace(
            current_stream=lambda device: types.SimpleNamespace(cuda_stream=1000 + device)))
        worker = self.worker()
        with mock.patch.dict("sys.modules", torch=torch):
            worker.batch(sequences=4, tokens=2, output="f32")
        worker.batch(stream=77, prompts=True, tokens=512, pages=64)
        first, second = (a[1]._obj for a in self.named("crumb_device_batch_open"))
        self.assertEqual((first.stream, first.sequences, first.tokens, first.output_f32),
                         (1003, 4, 2, 1))
        self.assertEqual((second.stream, second.prompts, second.tokens, second.pages),
                         (77, 1, 512, 64))

    def test_a_pass(self):
        worker = self.worker()
        batch = worker.batch(stream=0, sequences=2)
        sequences = [worker.begin([1, 2, 3]), worker.begin([4, 5])]
        batch.prepare([(sequences[0], 1), (sequences[1], 1)])
        entries, count = self.named("crumb_device_batch_prepare")[0][1:]
        self.assertEqual([(e.sequence, e.tokens) for e in entries[:count]],
                         [(s._handle, 1) for s in sequences])
        batch.start()
        batch.advance([9, 8], [1, 1])
        _, tokens, counts, entries = self.named("crumb_device_batch_advance")[0]
        self.assertEqual((list(counts), entries), ([1, 1], 2))
        with self.assertRaisesRegex(crumb.InvalidArgument, "1 token ids"):
            batch.advance([9], [1, 1])
        sequences[0].close()
        with self.assertRaisesRegex(crumb.InvalidArgument, "GpuSequence is closed"):
            batch.prepare([(sequences[0], 1)])

    def test_tensors_of_a_pass(self):
        torch = support.installed("torch")
        if torch is None:
            self.skipTest("needs torch")
        worker = self.worker()
        batch = worker.batch(stream=0, sequences=2)
        batch.prepare([(worker.begin([1]), 1), (worker.begin([2]), 1)])
        k = Tensor(torch, 0x100, (2, 1, 2, 64))
        q, out = Tensor(torch, 0x200, (2, 4, 64)), Tensor(torch, 0x300, (2, 4, 64))
        batch.append(1, k, Tensor(torch, 0x180, (2, 1, 2, 64)))
        self.assertIs(batch.attend(1, q, out), out)
        self.assertEqual(self.named("crumb_device_batch_append")[0][1:], (1, 0x100, 0x180))
        self.assertEqual(self.named("crumb_device_batch_attend")[0][1:], (1, 0x200, 0x300))
        for bad in (Tensor(torch, 1, (3, 2, 64)), Tensor(torch, 1, (2, 1, 64)),
                    Tensor(torch, 1, (2, 2, 64), device="cpu"), torch.zeros(2, 2, 64),
                    Tensor(torch, 1, (2, 2, 64), device="cuda:2"), Tensor(torch, 1, (256,)),
                    Tensor(torch, 1, (2, 2, 64), dtype=torch.float16),
                    Tensor(torch, 1, (2, 2, 64), contiguous=False)):
            with self.assertRaises(crumb.InvalidArgument):
                batch.append(1, k, bad)

    def test_tensors_of_a_decode_pass_have_rows_for_all_places(self):
        """The kernels read the rows of places without a sequence."""
        torch = support.installed("torch")
        if torch is None:
            self.skipTest("needs torch")
        worker = self.worker()
        sequence = worker.begin([1])
        batch = worker.batch(stream=0, sequences=4, tokens=2)
        batch.prepare([(sequence, 2)])
        few, all_rows = (Tensor(torch, 0x100, (places, 2, 2, 64)) for places in (1, 4))
        with self.assertRaisesRegex(crumb.InvalidArgument, "8 rows"):
            batch.append(0, few, few)
        batch.append(0, all_rows, all_rows)
        prompts = worker.batch(stream=0, sequences=4, tokens=2, prompts=True)
        prompts.prepare([(sequence, 2)])
        prompts.append(0, few, few)
        with self.assertRaisesRegex(crumb.InvalidArgument, "2 rows"):
            prompts.append(0, all_rows, all_rows)


if __name__ == "__main__":
    unittest.main()
