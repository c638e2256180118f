# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.Worker and crumb.Sequence over a crumbd, with every kind of tensor that is installed."""

import array
import dataclasses
import unittest

import crumb
import support

PROMPT = [(i * 37 + 11) % 5000 for i in range(700)]
CACHED = 384  # 700 tokens less the recent window of 256, in pages of 64


def rows(position, tokens, layer, heads, what):
    """BF16 bits of the rows of some tokens; they depend on position, layer and `what`."""
    values = array.array("H")
    for i in range(position, position + tokens):
        values += support.bits(1 + 8 * i + 4 * layer + what, heads * support.MODEL.head_dim)
    return values


class Buffers:
    """Rows as arrays of the standard library."""

    name = "array"

    @staticmethod
    def bf16(values, tokens, heads):
        return values

    @staticmethod
    def floats(values):
        return bytes(values)


class Numpy(Buffers):
    name = "numpy"

    def __init__(self, np, dtype):
        self.np, self.dtype = np, dtype

    def bf16(self, values, tokens, heads):
        bits = self.np.frombuffer(values, dtype="uint16").reshape(tokens, heads, -1)
        return bits.view(self.dtype)

    @staticmethod
    def floats(values):
        assert values.dtype.name == "float32" and values.ndim == 3
        return values.tobytes()


class Torch(Buffers):
    name = "torch"

    def __init__(self, torch):
        self.torch = torch

    def bf16(self, values, tokens, heads):
        bits = self.torch.frombuffer(bytearray(values), dtype=self.torch.int16)
        return bits.view(self.torch.bfloat16).view(tokens, heads, -1)

    def floats(self, values):
        assert values.dtype is self.torch.float32 and values.dim() == 3
        return bytes(values.view(-1).view(self.torch.uint8).tolist())


def kinds():
    yield Buffers()
    numpy, dtypes, torch = (support.installed(n) for n in ("numpy", "ml_dtypes", "torch"))
    if numpy is not None:
        yield Numpy(numpy, "uint16")
    if numpy is not None and dtypes is not None:
        yield Numpy(numpy, dtypes.bfloat16)
    if torch is not None:
        yield Torch(torch)


def run_pass(sequence, kind, position, ids):
    """Every layer of a pass; the bytes of the last layer's output."""
    count = len(ids)
    for layer in range(support.MODEL.layers):
        k, v = (kind.bf16(rows(position, count, layer, 2, what), count, 2) for what in (0, 1))
        q = kind.bf16(rows(position, count, layer, 4, 2), count, 4)
        sequence.append(layer, k, v)
        out = sequence.attend(layer, q)
    sequence.advance(ids)
    return kind.floats(out)


class WorkerTest(support.CrumbdTest):
    def worker(self, model=support.MODEL, client=None):
        worker = crumb.Worker(client or self.client(), model)
        self.addCleanup(worker.close)
        return worker

    def test_a_warm_process_computes_the_same_with_every_kind_of_tensor(self):
        model = dataclasses.replace(support.MODEL, weights="2")
        worker = self.worker(model)
        with worker.begin(PROMPT) as cold:
            self.assertEqual(cold.cached_tokens, 0)
            run_pass(cold, Buffers(), 0, PROMPT)
            expected = [run_pass(cold, Buffers(), 700 + i, [i]) for i in range(2)]
            self.assertEqual(cold.length, 702)
            cold.finish()
        worker.wait_published(support.SECONDS)
        self.assertGreaterEqual(worker.counters()["published_pages"], 10)
        for kind in kinds():
            with self.subTest(kind.name):
                other = self.worker(model)
                with other.begin(PROMPT) as warm:
                    self.assertEqual(warm.cached_tokens, CACHED)
                    run_pass(warm, kind, CACHED, PROMPT[CACHED:])
                    self.assertEqual([run_pass(warm, kind, 700 + i, [i]) for i in range(2)],
                                     expected)
                self.assertEqual(other.counters()["hit_tokens_host"], CACHED)

    def test_ranks_follow_one_lead(self):
        worker = self.worker()
        with worker.begin(PROMPT) as first:
            run_pass(first, Buffers(), first.cached_tokens, PROMPT[first.cached_tokens:])
            first.finish()
        worker.wait_published(support.SECONDS)
        engine = bytes(range(1, 17))
        ranks = [crumb.Worker(self.client(engine=engine), support.MODEL,
                              rank=crumb.Rank(tp_rank=i, tp_size=2)) for i in range(2)]
        for rank in ranks:
            self.addCleanup(rank.close)
        self.assertEqual([(rank.kv_heads, rank.q_heads, rank.layers) for rank in ranks],
                         [(1, 2, 2)] * 2)
        led, token = ranks[0].lead(PROMPT)
        followed = ranks[1].follow(token, PROMPT)
        self.assertEqual((led.cached_tokens, followed.cached_tokens), (CACHED, CACHED))
        with self.assertRaises(crumb.InvalidArgument):
            ranks[1].follow(token, [1] + PROMPT[1:])
        with self.assertRaises(crumb.DataLoss):
            ranks[1].follow(token[:-1], PROMPT)
        for sequence in (led, followed):
            sequence.close()

    def test_options_of_a_sequence(self):
        worker = self.worker()
        with worker.begin(PROMPT, extra=[bytes(range(32))], publish="none") as salted:
            self.assertEqual(salted.cached_tokens, 0)
        with self.assertRaisesRegex(crumb.InvalidArgument, "publish"):
            worker.begin(PROMPT, publish="some")
        with self.assertRaisesRegex(crumb.InvalidArgument, "32 bytes"):
            worker.begin(PROMPT, extra=[b"short"])

    def test_fork_continues_alike(self):
        worker = crumb.Worker(None, support.MODEL)
        with worker, worker.begin([1, 2, 3]) as sequence:
            run_pass(sequence, Buffers(), 0, [1, 2, 3])
            with sequence.fork() as other:
                self.assertEqual(other.length, 3)
                outputs = [run_pass(s, Buffers(), 3, [4]) for s in (sequence, other)]
            self.assertEqual(outputs[0], outputs[1])

    def test_windows_and_sink_logits_of_each_layer(self):
        # In layer 0 a token attends itself only. In layer 1 the sink outweighs all keys of two
        # query heads.
        settings = crumb.WorkerSettings(windows=[1, 0],
                                        sink_logits=[[-100.0] * 4, [-100.0, 100.0] * 2])
        worker = crumb.Worker(None, support.MODEL, settings=settings)
        ids, outputs = [1, 2, 3], []
        with worker, worker.begin(ids) as sequence:
            for layer in range(2):
                k, v = (rows(0, 3, layer, 2, what) for what in (0, 1))
                sequence.append(layer, k, v)
                out = sequence.attend(layer, rows(0, 3, layer, 4, 2))
                outputs.append(memoryview(bytes(out)).cast("f").tolist())
            sequence.advance(ids)
        values = array.array("I", (bits << 16 for bits in rows(0, 3, 0, 2, 1)))
        exact = memoryview(bytes(values)).cast("f").tolist()
        for at, x in enumerate(outputs[0]):
            token, head, channel = at // 256, at // 64 % 4, at % 64
            self.assertAlmostEqual(x, exact[(token * 2 + head // 2) * 64 + channel], places=5)
        for at, x in enumerate(outputs[1]):
            if at // 64 % 2:
                self.assertAlmostEqual(x, 0.0, places=5)
        self.assertGreater(max(map(abs, outputs[1])), 0.1)
        for wrong in ({"windows": [128]}, {"windows": [128, -1]}, {"sink_logits": [[0.0] * 4]}):
            with self.subTest(wrong), self.assertRaises(crumb.InvalidArgument):
                crumb.Worker(None, support.MODEL, settings=crumb.WorkerSettings(**wrong))

    def test_wrong_tensors_are_refused_before_memory_is_touched(self):
        worker = crumb.Worker(None, support.MODEL)
        with worker, worker.begin([1, 2, 3]) as sequence:
            k = rows(0, 3, 0, 2, 0)
            with self.assertRaisesRegex(crumb.InvalidArgument, "v must hold 768"):
                sequence.append(0, k, k[:-2])
            with self.assertRaisesRegex(crumb.InvalidArgument, "v is a list"):
                sequence.append(0, k, [1.0])
            sequence.append(0, k, k)
            q = rows(0, 3, 0, 4, 2)
            with self.assertRaisesRegex(crumb.InvalidArgument, "out is read-only"):
                sequence.attend(0, q, bytes(3 * 4 * 64 * 4))
            with self.assertRaisesRegex(crumb.InvalidArgument, "layer"):
                sequence.append(7, k, k)
            self.refuse_numpy(sequence)
            self.refuse_torch(sequence)

    def refuse_numpy(self, sequence):
        np = support.installed("numpy")
        if np is None:
            return
        good = np.zeros((3, 2, 64), "uint16")
        for bad in (good.astype("float32"), good[:, :1], good.astype(">u2"),
                    np.zeros((3, 64, 2), "uint16").transpose(0, 2, 1)):
            with self.assertRaises(crumb.InvalidArgument):
                sequence.append(1, good, bad)
        out = np.zeros((3, 4, 64), "float32")
        out.flags.writeable = False
        with self.assertRaisesRegex(crumb.InvalidArgument, "read-only"):
            sequence.attend(0, np.zeros((3, 4, 64), "uint16"), out)

    def refuse_torch(self, sequence):
        torch = support.installed("torch")
        if torch is None:
            return
        good = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
        for bad in (good.float(), good[:, :1], good.half(), good.transpose(0, 1),
                    torch.zeros(3, 64, 2, dtype=torch.bfloat16).transpose(1, 2)):
            with self.assertRaises(crumb.InvalidArgument):
                sequence.append(1, good, bad)
        with self.assertRaisesRegex(crumb.InvalidArgument, "on the CPU"):
            sequence.append(1, good, torch.zeros(3, 2, 64, dtype=torch.bfloat16, device="meta"))

    def test_no_tensor_is_copied(self):
        np = support.installed("numpy")
        worker = crumb.Worker(None, support.MODEL)
        with worker, worker.begin([1]) as sequence:
            k = rows(0, 1, 0, 2, 0)
            sequence.append(0, k, k)
            out = array.array("f", [7.0] * 256) if np is None else np.full((1, 4, 64), 7, "f4")
            self.assertIs(sequence.attend(0, rows(0, 1, 0, 4, 2), out), out)
            self.assertNotEqual(bytes(out)[:64], bytes(array.array("f", [7.0] * 16)))
            self.assertNotEqual(bytes(out)[:64], bytes(64))

    def test_models_are_checked(self):
        with self.assertRaisesRegex(crumb.InvalidArgument, "history"):
            self.worker(crumb.Model("m", "1", 2, 2, 4, 64, history="fp4"))
        with self.assertRaises(crumb.InvalidArgument):
            self.worker(crumb.Model("m", "1", 2, 2, 4, 65))
        with self.assertRaises(crumb.NotFound):
            self.worker(crumb.Model("m", "1", 2, 2, 4, 64, rotation=self.folder + "/absent.rot"))


if __name__ == "__main__":
    unittest.main()
