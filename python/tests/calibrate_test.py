# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.calibrate over small models of transformers with random weights."""

import json
import pathlib
import subprocess
import tempfile
import unittest

import crumb
import support

torch = support.installed("torch")
transformers = support.installed("transformers")
if torch is not None:
    from crumb import calibrate

SHAPE = dict(vocab_size=500, hidden_size=128, intermediate_size=128, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, head_dim=64,
             max_position_embeddings=4096)


def models():
    """(name, model): heads with norms, without, with biases, and with scaled positions."""
    torch.manual_seed(1)
    yield "qwen3", transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE))
    yield "llama", transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    yield "qwen2", transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        **{**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1}))
    yield "yarn", transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                  "original_max_position_embeddings": 1024}))


@unittest.skipIf(torch is None or transformers is None, "needs torch and transformers")
class CalibrateTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        generator = torch.Generator().manual_seed(2)
        self.sequences = torch.randint(500, (2, 448), generator=generator).tolist()

    def test_the_recorded_rows_are_what_attention_computes_with(self):
        from safetensors.torch import load_file
        for name, model in models():
            with self.subTest(name):
                seen = {}
                hooks = [layer.self_attn.o_proj.register_forward_hook(
                    lambda _, given, __, i=i: seen.__setitem__(i, given[0][0].float()))
                    for i, layer in enumerate(model.model.layers)]
                file, = calibrate.record(model, self.sequences[:1], self.folder / name, name=name)
                for hook in hooks:
                    hook.remove()
                tensors = load_file(file)
                self.assertEqual(tensors["positions"].tolist(), list(range(448)))
                for layer, expected in seen.items():
                    q, k, v = (tensors[f"layers.{layer}.{what}"].float() for what in "qkv")
                    group = q.shape[1] // k.shape[1]
                    k, v = (rows.repeat_interleave(group, 1) for rows in (k, v))
                    scaling = model.model.layers[layer].self_attn.scaling
                    logits = torch.einsum("qhd,khd->hqk", q, k) * scaling
                    future = torch.ones(448, 448).triu(1).bool()
                    weights = logits.masked_fill(future, -torch.inf).softmax(-1)
                    out = torch.einsum("hqk,khd->qhd", weights, v).reshape(448, -1)
                    self.assertLess(float((out - expected).norm() / expected.norm()), 1e-2)

    def test_a_model_computes_as_before(self):
        _, model = next(models())
        ids = torch.tensor(self.sequences[:1])
        with torch.no_grad():
            before = model(ids).logits
            implementation = model.config._attn_implementation
            calibrate.record(model, self.sequences[:1], self.folder)
            self.assertEqual(model.config._attn_implementation, implementation)
            self.assertTrue(torch.equal(model(ids).logits, before))

    def test_a_worker_takes_the_rotation_file(self):
        for name, model in models():
            with self.subTest(name):
                files = calibrate.record(model, self.sequences, self.folder / name, name=name)
                out = self.folder / f"{name}.rotation"
                calibrate.rotation_file(files, out, ["--positions", "4096"])
                shown = subprocess.run([crumb.path_of("crumb"), "rotation", "show", str(out),
                                        "--json"], check=True, capture_output=True, text=True)
                rotation = json.loads(shown.stdout)
                self.assertEqual(rotation["model"], name)
                config = model.config
                shape = crumb.Model(name, "1", config.num_hidden_layers,
                                    config.num_key_value_heads, config.num_attention_heads, 64,
                                    rotation=str(out))
                with crumb.Worker(None, shape) as worker, worker.begin([1]) as sequence:
                    self.assertEqual(sequence.length, 0)
                with self.assertRaises(crumb.InvalidArgument):
                    crumb.Worker(None, crumb.Model(name, "1", 7, 2, 4, 64, rotation=str(out)))

    def test_layers_with_a_window_are_left_out(self):
        torch.manual_seed(1)
        config = transformers.Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=128,
                                          max_window_layers=1)
        self.assertEqual(config.layer_types,
                         ["full_attention", "sliding_attention", "sliding_attention"])
        model = transformers.Qwen3ForCausalLM(config)
        file, = calibrate.record(model, self.sequences[:1], self.folder)
        self.assertEqual(calibrate.layers_of(file), [0])

    def test_a_failed_calibration_says_so(self):
        _, model = next(models())
        files = calibrate.record(model, [self.sequences[0][:100]], self.folder)
        with self.assertRaisesRegex(crumb.InvalidArgument, "exit code"):
            calibrate.rotation_file(files, self.folder / "short.rotation")
        self.assertFalse((self.folder / "short.rotation").exists())

    def test_pieces_are_spread_over_the_text(self):
        ids = list(range(1000))
        self.assertEqual([piece[0] for piece in calibrate.pieces(ids, 100, 300)], [0, 300, 600])
        self.assertEqual(len(calibrate.pieces(ids, 100, 10**6)), 10)
        self.assertEqual(calibrate.pieces(ids[:99], 100, 300), [])


if __name__ == "__main__":
    unittest.main()
