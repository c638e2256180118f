# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Tests of which layers of vLLM share attention over INT2 blocks, and which are refused, without
vLLM and a device."""

import dataclasses
import gc
import importlib
import logging
import pathlib
import sys
import types
import unittest
import weakref
from unittest import mock

SOURCES = pathlib.Path(__file__).resolve().parents[1] / "src/crumb"


def stand_in(name, **members):
    """A module in place of one that needs the library, torch or vLLM."""
    made = sys.modules[name] = types.ModuleType(name)
    made.__dict__.update(members)
    return made


class InvalidArgument(Exception):
    """crumb.errors.InvalidArgument"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """crumb.worker.WorkerSettings"""

    recent_tokens: int
    scale: float
    soft_cap: float


class Blocks:
    """BlockAttention and DeviceBlockAttention: keeps the arguments that it was opened with."""

    device_bytes = 1 << 20

    def __init__(self, model, device=None, *, limits=None, rank=None, settings=None):
        self.device, self.limits, self.settings = device, limits, settings


device = types.SimpleNamespace(current=0)
stand_in("torch", cuda=types.SimpleNamespace(current_device=lambda: device.current))
stand_in("vllm")
stand_in("vllm.logger", init_logger=logging.getLogger)
stand_in("crumb", __path__=[str(SOURCES)])
stand_in("crumb._engines", HADAMARD_NOTE="hadamard")
stand_in("crumb.blocks", BlockAttention=Blocks, DeviceBlockAttention=Blocks,
         DeviceBlockLimits=types.SimpleNamespace, BlockGeometry=object, block_geometry=None)
stand_in("crumb.errors", InvalidArgument=InvalidArgument)
stand_in("crumb.worker", Model=object, Rank=object, WorkerSettings=Settings)
stand_in("crumb.vllm_native", __path__=[str(SOURCES / "vllm_native")])
stand_in("crumb.vllm_native.blocks_of_requests", BLOCK_TOKENS=64)
model = importlib.import_module("crumb.vllm_native.model")
attention = importlib.import_module("crumb.vllm_native.attention")


class Engine:
    """The part of an engine's configuration that the backend reads, and the engine's layers."""

    def __init__(self, requests=16, tokens=2048, length=4096, device_type="cuda"):
        self.layers = {"vllm's own": types.SimpleNamespace(attention="not Crumb's")}
        self.config = types.SimpleNamespace(
            scheduler_config=types.SimpleNamespace(max_num_seqs=requests,
                                                   max_num_batched_tokens=tokens),
            model_config=types.SimpleNamespace(max_model_len=length),
            device_config=types.SimpleNamespace(device_type=device_type),
            compilation_config=types.SimpleNamespace(static_forward_context=self.layers))

    def add_layer(self, scale=0.125, soft_cap=0.0):
        found = attention.attention_of(self.config, scale, soft_cap)
        self.layers[f"crumb_recent.{len(self.layers)}"] = types.SimpleNamespace(attention=found)
        return found


class AttentionTest(unittest.TestCase):
    def setUp(self):
        for name, result in (("model_of", types.SimpleNamespace(rotation="hadamard")),
                             ("rank_of", 0)):
            patch = mock.patch.object(attention, name, lambda config, result=result: result)
            patch.start()
            self.addCleanup(patch.stop)

    def test_engines_of_a_process_have_their_own_limits_and_devices(self):
        first, second = Engine(), Engine(requests=256, tokens=8192, length=32769)
        small = first.add_layer()
        device.current = 1
        self.addCleanup(setattr, device, "current", 0)
        large = second.add_layer()
        self.assertIs(first.add_layer(), small)
        self.assertIs(second.add_layer(), large)
        opened = [(found._blocks.device, found._blocks.limits) for found in (small, large)]
        self.assertEqual(opened, [
            (0, types.SimpleNamespace(requests=16, tokens=2048, pages=64, padding_block=0)),
            (1, types.SimpleNamespace(requests=256, tokens=8192, pages=513, padding_block=0))])

    def test_equal_engines_share_nothing(self):
        self.assertIsNot(Engine().add_layer(), Engine().add_layer())

    def test_device_memory_ends_with_the_layers(self):
        engine = Engine()
        found = weakref.ref(engine.add_layer())
        gc.collect()
        self.assertIsNotNone(found())
        engine.layers.clear()
        gc.collect()
        self.assertIsNone(found())

    def test_layers_with_different_scales(self):
        for differing in ({"scale": 0.25}, {"soft_cap": 30.0}):
            engine = Engine()
            engine.add_layer()
            with self.assertRaisesRegex(InvalidArgument, "different scales or soft caps on a GPU"):
                engine.add_layer(**differing)
            on_cpu = Engine(device_type="cpu")
            first, other = on_cpu.add_layer(), on_cpu.add_layer(**differing)
            self.assertNotEqual(first._blocks.settings, other._blocks.settings)
            self.assertIs(on_cpu.add_layer(), first)
            self.assertIs(on_cpu.add_layer(**differing), other)


class RefusalTest(unittest.TestCase):
    def refusal(self, device_type="cuda", drafts=None, **layer):
        """The sentence with which a layer of a model with 8 query heads and 2 KV heads of 128 is
        refused, None if it is served."""
        parallel = types.SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1)
        config = types.SimpleNamespace(
            parallel_config=parallel, device_config=types.SimpleNamespace(device_type=device_type),
            model_config=types.SimpleNamespace(
                dtype="torch.bfloat16", get_head_size=lambda: 128,
                get_num_attention_heads=lambda given: 8 if given is parallel else None,
                get_num_kv_heads=lambda given: 2 if given is parallel else None),
            cache_config=types.SimpleNamespace(cache_dtype="auto"), kv_transfer_config=None,
            speculative_config=drafts,
            scheduler_config=types.SimpleNamespace(disable_hybrid_kv_cache_manager=False))
        try:
            model.check_supported(config, **{
                "head_size": 128, "num_heads": 8, "num_kv_heads": 2, "sliding_window": None,
                "alibi_slopes": None, "attn_type": "decoder", "shared_layer": None, "more": {},
                **layer})
        except InvalidArgument as error:
            return str(error)
        return None

    def test_layers_with_heads_of_their_own(self):
        self.assertIsNone(self.refusal())
        for heads in ({"head_size": 64}, {"head_size": 256}, {"num_heads": 16},
                      {"num_kv_heads": 8}):
            self.assertRegex(self.refusal(**heads), "heads differ in number or size", heads)
        self.assertRegex(self.refusal(head_size=96), "other sizes than 64, 128 and 256")
        self.assertRegex(self.refusal(sliding_window=4096), "sliding window")

    def test_drafts(self):
        def refusal(device_type="cpu", method="ngram", tokens=5):
            return self.refusal(device_type, types.SimpleNamespace(
                method=method, num_speculative_tokens=tokens))

        # The geometry of head_dim 128: nine rows of 512 bytes in a tile of 4,608.
        geometry = types.SimpleNamespace(rows_per_block=9, recent_blocks=36)
        with mock.patch.object(model, "geometry_of", lambda head_size: geometry):
            self.assertIsNone(refusal())
            self.assertRegex(refusal(tokens=6), "more than 5 draft tokens")
            self.assertRegex(refusal(method="eagle"), "another method than ngram")
            self.assertRegex(refusal(device_type="cuda"), "speculative decoding on a GPU")


if __name__ == "__main__":
    unittest.main(verbosity=2)
