# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""CrumbLinker under SGLang's own radix trees, allocator and KV pools, on the CPU, over a crumbd.

Needs the package sglang; tests/engines/install_sglang.sh installs it.
"""

import os
import pathlib
import tempfile
import types
import unittest
from unittest import mock

import crumb
from sglang_support import (DIM, HEADS, PAGE, TOKENS, SglangLinkerTest, model_config, sglang, torch)

if sglang is not None:
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang_support import InsertParams


class ExactPagesTest(SglangLinkerTest):
    def test_a_page_comes_back_bit_by_bit(self):
        writer, reader = self.pair()
        written = self.stored(writer, TOKENS[:5 * PAGE])
        slots = reader.load(TOKENS[:5 * PAGE + 1])
        self.assert_equal_rows(reader.rows(slots), written)
        # Pages that SGLang has loaded are not stored again when it inserts them.
        reader.cache.insert(InsertParams(key=reader.key(TOKENS[:5 * PAGE]), value=slots.clone()))
        reader.finish_offloads()
        self.assertEqual(reader.linker.counters.stored_pages, 0)
        self.assertEqual(reader.match(TOKENS[:5 * PAGE + 1])[1].device_prefix_len, 5 * PAGE)

    def test_the_layout_hnd(self):
        with mock.patch.dict(os.environ, {"SGLANG_USE_HND_KVCACHE": "1"}):
            writer = self.engine(1, weights="hnd")
        self.assertEqual(writer.pool.kv_cache_layout, "hnd")
        reader = self.engine(2, weights="hnd")
        pages = writer.compute(TOKENS[:3 * PAGE]).view(-1, PAGE)[:, 0] // PAGE
        writer.finish_offloads()
        rows = reader.rows(reader.load(TOKENS[:3 * PAGE + 1]))
        for number, buffer in enumerate([*writer.pool.k_buffer, *writer.pool.v_buffer]):
            expected = buffer[pages].transpose(1, 2).reshape(-1, HEADS, DIM).view(torch.int16)
            self.assert_equal_rows(rows[number], expected)

    def test_a_prefix_is_loaded_behind_what_sglang_has(self):
        writer, reader = self.pair()
        written = self.stored(writer, TOKENS[:9 * PAGE])
        reader.compute(TOKENS[:4 * PAGE])
        req, result = reader.match(TOKENS[:9 * PAGE + 30])
        self.assertEqual((result.device_prefix_len, result.host_hit_length), (4 * PAGE, 5 * PAGE))
        reader.load_back(req, result)
        slots = reader.cache.linker.private_load_indices[req.rid]
        self.assertEqual(reader.step(req), [])
        self.assert_equal_rows(reader.rows(slots), written[:, 4 * PAGE:])

    def test_nodes_that_are_extended_and_split(self):
        writer, reader = self.pair()
        first = self.stored(writer, TOKENS[:4 * PAGE])
        whole = [*TOKENS[:4 * PAGE], *TOKENS[10 * PAGE:13 * PAGE]]
        slots = writer.compute(whole)
        writer.finish_offloads()
        expected = torch.cat([first, writer.rows(slots)[:, 4 * PAGE:]], 1)
        branch = [*TOKENS[:2 * PAGE], *TOKENS[15 * PAGE:18 * PAGE]]
        branched = self.stored(writer, branch)
        self.assert_equal_rows(reader.rows(reader.load([*whole, 1])), expected)
        rows = reader.rows(reader.load([*branch, 1]))
        self.assert_equal_rows(rows[:, :2 * PAGE], first[:, :2 * PAGE])
        self.assert_equal_rows(rows[:, 2 * PAGE:], branched[:, 2 * PAGE:])

    def test_what_pages_depend_on(self):
        name = f"w{next(self.models)}"
        writer = self.engine(1, weights=name)
        tokens = TOKENS[:3 * PAGE]
        self.stored(writer, tokens)
        self.stored(writer, tokens, salt="a")
        self.stored(writer, tokens, extra="lora")
        reader = self.engine(2, weights=name)
        for named in ({}, {"salt": "a"}, {"extra": "lora"}):
            self.assertEqual(len(reader.load([*tokens, 1], **named)), 3 * PAGE)
        for named in ({"salt": "b"}, {"extra": "a"}, {"salt": "lora"},
                      {"salt": "a", "extra": "lora"}):
            self.assertEqual(len(reader.load([*tokens, 1], **named)), 0, named)
        rope = types.SimpleNamespace(rope_theta=5e5, max_position_embeddings=4096)
        others = [dict(weights=name + "x"), dict(weights=name, model="other name"),
                  dict(weights=name, history="int2"),
                  dict(weights=name, config=model_config(hf_text_config=rope)),
                  dict(weights=name, config=model_config(quantization="fp8"))]
        for options in others:
            self.assertEqual(len(self.engine(2, **options).load([*tokens, 1])), 0, options)

    def test_an_adapter_is_known_by_its_weights(self):
        """SGLang names an adapter of --lora-paths by its name and path alone."""
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "adapter_config.json").write_text("{}")
            adapter = LoRARef(LoRARef.deterministic_id("x", name), "x", name)
            gone = LoRARef(LoRARef.deterministic_id("y", "gone"), "y", "gone")
            options = {"weights": "adapters",
                       "server_args": types.SimpleNamespace(lora_paths=[adapter, gone],
                                                            download_dir=None)}

            def start(weights):
                (folder / "adapter_model.bin").write_bytes(weights)
                return self.engine(**options)

            writer = start(b"a" * 100)
            for extra in (adapter.lora_id, "mine" + adapter.lora_id, gone.lora_id):
                self.stored(writer, TOKENS[:4 * PAGE], extra=extra)
            again, trained = start(b"a" * 100), start(b"b" * 100)
            for extra in (adapter.lora_id, "mine" + adapter.lora_id):
                self.assertEqual(len(again.load(TOKENS[:5 * PAGE], extra=extra)), 4 * PAGE)
                self.assertEqual(len(trained.load(TOKENS[:5 * PAGE], extra=extra)), 0)
            # The weights of an adapter without files are not known.
            self.assertEqual(len(again.load(TOKENS[:5 * PAGE], extra=gone.lora_id)), 0)
            writer.evict()
            self.assertEqual(len(writer.load(TOKENS[:5 * PAGE], extra=gone.lora_id)), 4 * PAGE)

    def test_overrides_of_the_configuration_and_longrope(self):
        longrope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
        text = types.SimpleNamespace(rope_parameters=longrope)
        self.stored(self.engine(weights="o"), TOKENS[:4 * PAGE])
        for override in ({"rms_norm_eps": 1}, {}):
            reader = self.engine(weights="o", config=model_config(model_override_args=override))
            self.assertEqual(len(reader.load(TOKENS[:5 * PAGE])), 0 if override else 4 * PAGE)
        self.engine(config=model_config(hf_text_config=text, context_len=4096))
        with self.assertRaisesRegex(crumb.InvalidArgument, "--context-length 4096"):
            self.engine(config=model_config(hf_text_config=text, context_len=8192))

    def test_after_a_flush_pages_are_private_or_shared(self):
        for mode, after in (("private", 0), ("shared", 3 * PAGE)):
            writer, reader = self.pair(after_flush=mode)
            self.stored(writer, TOKENS[:3 * PAGE])
            writer.cache.reset()
            writer.allocator.clear()
            self.assertEqual(len(writer.load(TOKENS[:3 * PAGE + 1])), after)
            self.stored(writer, TOKENS[5 * PAGE:9 * PAGE])
            self.assertEqual(len(reader.load(TOKENS[5 * PAGE:9 * PAGE + 1])), 4 * after // 3)
            writer.evict()
            self.assertEqual(len(writer.load(TOKENS[5 * PAGE:9 * PAGE + 1])), 4 * PAGE)


class RustTreeTest(ExactPagesTest):
    """The tests above over SGLang's radix tree in Rust."""

    core = "rust"

    def test_the_tree_is_in_rust(self):
        self.assertIn("Rust", type(self.engine().cache.tree_core).__name__)


class Int2PagesTest(SglangLinkerTest):
    def test_int2_pages_are_hit_in_front_of_the_recent_window(self):
        writer, reader = self.pair(history="int2")
        written = self.stored(writer, TOKENS[:10 * PAGE])
        self.assertEqual(len(reader.load(TOKENS[:4 * PAGE + 30])), 0)
        slots = reader.load(TOKENS[:10 * PAGE + 30])
        self.assertEqual(len(slots), 6 * PAGE)
        found, expected = (rows[:, :6 * PAGE].view(torch.bfloat16).float()
                           for rows in (reader.rows(slots), written))
        self.assertTrue(torch.equal(found[:, :PAGE], expected[:, :PAGE]))  # the sink
        pairs = found[:, PAGE:].flatten(), expected[:, PAGE:].flatten()
        cosine = torch.nn.functional.cosine_similarity(*pairs, dim=0)
        self.assertTrue(0.9 < cosine < 0.999, cosine)

    def test_pages_behind_a_loaded_prefix_are_found_again(self):
        writer, reader = self.pair(history="int2")
        self.stored(writer, TOKENS[:6 * PAGE])
        slots = reader.load(TOKENS[:6 * PAGE + 1])
        self.assertEqual(len(slots), 2 * PAGE)
        rest = reader.allocator.alloc(8 * PAGE)
        reader.cache.insert(InsertParams(key=reader.key(TOKENS[:10 * PAGE]),
                                         value=torch.cat([slots, rest])))
        reader.finish_offloads()
        self.assertEqual(reader.linker.counters.stored_pages, 4)  # crumbd has the first 6
        third = self.engine(3, history="int2", weights=reader.linker._transfer.model.weights)
        self.assertEqual(len(third.load(TOKENS[:14 * PAGE])), 10 * PAGE)


if __name__ == "__main__":
    unittest.main()
