# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.ops: the operators against the methods, traced, and as torch itself checks operators."""

import unittest

import crumb
import support

torch = support.installed("torch")
if torch is not None:
    import crumb.ops


@unittest.skipIf(torch is None, "needs torch")
class OpsTest(unittest.TestCase):
    def setUp(self):
        worker = crumb.Worker(None, support.MODEL)
        self.addCleanup(worker.close)
        self.sequences = [worker.begin([1, 2, 3]) for _ in range(2)]
        self.handle = crumb.ops.register(self.sequences[0])
        self.addCleanup(crumb.ops.unregister, self.handle)
        generator = torch.Generator().manual_seed(1)
        self.k, self.v, self.q = (torch.randn(3, heads, 64, generator=generator).bfloat16()
                                  for heads in (2, 2, 4))

    def layer(self, layer, q, k, v):
        appended = torch.ops.crumb.append(self.handle, layer, k, v)
        return torch.ops.crumb.attend(self.handle, layer, q, appended)

    def test_results_are_those_of_the_methods(self):
        other = self.sequences[1]
        for layer in range(2):
            other.append(layer, self.k, self.v)
            expected = other.attend(layer, self.q)
            out = self.layer(layer, self.q, self.k, self.v)
            self.assertEqual(out.dtype, torch.float32)
            self.assertTrue(torch.equal(out, expected))

    def test_a_traced_model_keeps_every_append(self):
        def model(q, k, v):
            torch.ops.crumb.append(self.handle, 0, k, v)  # its result is not used
            out = self.layer(1, q, k, v)
            return out.sum()

        from torch.fx.experimental.proxy_tensor import make_fx
        graph = make_fx(model, tracing_mode="fake")(self.q, self.k, self.v)
        calls = [str(node.target) for node in graph.graph.nodes if "crumb" in str(node.target)]
        self.assertEqual(calls, ["crumb.append.default", "crumb.append.default",
                                 "crumb.attend.default"])
        self.assertEqual(self.sequences[0].length, 0)  # tracing ran nothing
        graph(self.q, self.k, self.v)
        self.sequences[0].advance([1, 2, 3])
        self.assertEqual(self.sequences[0].length, 3)

    def test_the_fake_has_the_results_shape(self):
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode() as mode:
            q = mode.from_tensor(self.q)
            k = mode.from_tensor(self.k)
            out = self.layer(0, q, k, k)
        self.assertEqual((tuple(out.shape), out.dtype), ((3, 4, 64), torch.float32))

    def test_a_handle_must_be_registered(self):
        crumb.ops.unregister(self.handle)
        with self.assertRaisesRegex(crumb.InvalidArgument, "no object is registered"):
            self.layer(0, self.q, self.k, self.v)


if __name__ == "__main__":
    unittest.main()
