# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang's own radix tree, allocator and KV pool on the CPU with a CrumbLinker, for tests.

The tests need the package sglang; tests/engines/install_sglang.sh installs it.
"""

import itertools
import types
import unittest
from array import array

import crumb
import support
from services import wait_for

torch = support.installed("torch")
sglang = support.installed("sglang")
if sglang is not None:
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import (EvictParams, InitLoadBackParams,
                                                        InsertParams, MatchPrefixParams)
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.server_args import ServerArgs
    import crumb.sglang.linker as linker_module

PAGE, LAYERS, HEADS, DIM = crumb.PAGE_TOKENS, 3, 2, 64
SLOTS = 64 * PAGE
TOKENS = [(i * 131 + 7) % 5000 for i in range(20 * PAGE)]


def model_config(**changes):
    """The members of SGLang's ModelConfig that the linker reads."""
    text = types.SimpleNamespace(rope_theta=10000.0, max_position_embeddings=4096)
    members = dict(model_path="made-up", revision="1", num_hidden_layers=LAYERS, head_dim=DIM,
                   hf_text_config=text, quantization=None, sliding_window_size=None,
                   attention_chunk_size=None, is_multimodal=False,
                   get_total_num_kv_heads=lambda: HEADS,
                   get_total_num_attention_heads=lambda: 2 * HEADS)
    return types.SimpleNamespace(**{**members, **changes})


def publish_configuration():
    """Publishes the server's arguments that SGLang's cache reads."""
    folder = support.ROOT / "models/data/tiny-lm"
    runtime_context.publish(ServerArgs(model_path=str(folder), device="cpu",
                                       attention_backend="torch_native"), role="scheduler")


class Engine:
    """SGLang's cache of one rank: pool, allocator, radix tree and linker."""

    def __init__(self, folder, seed=0, config=None, dtype=None, page=PAGE, core="python",
                 heads=HEADS, group=None, server_args=None, **options):
        self.pool = MHATokenToKVPool(SLOTS, page, dtype or torch.bfloat16, heads, DIM, LAYERS,
                                     "cpu", False)
        generator = torch.Generator().manual_seed(seed)
        for buffer in [*self.pool.k_buffer, *self.pool.v_buffer]:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        self.allocator = PagedTokenToKVPoolAllocator(SLOTS, page, torch.bfloat16, "cpu", self.pool,
                                                     False)
        self.params = CacheInitParams(disable=False,
                                      req_to_token_pool=ReqToTokenPool(4, 4096, "cpu", False),
                                      token_to_kv_pool_allocator=self.allocator, page_size=page,
                                      tree_components=(ComponentType.FULL,), tree_core_backend=core,
                                      tp_cache_group=group)
        self.cache = UnifiedRadixCache(self.params)
        self.linker = self.make_linker(folder, config or model_config(), options, server_args)
        self.cache.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.rids = itertools.count()

    def make_linker(self, folder, config, options, server_args=None):
        return linker_module.CrumbLinker(
            server_args, self.params, components=set(self.cache.components),
            extra_config={"socket_dir": folder, "weights": "w", "deadline": 5, **options},
            model_config=config)

    @staticmethod
    def key(tokens, extra=None, salt=None):
        return RadixKey(array("q", tokens), extra, cache_salt=salt)

    def request(self):
        return types.SimpleNamespace(rid=f"r{next(self.rids)}", last_node=None, kv=None,
                                     swa_branching_seqlen=None, session=None)

    def compute(self, tokens, **named):
        """Inserts a sequence as if its rows had just been computed; returns its slots."""
        slots = self.allocator.alloc(len(tokens) // PAGE * PAGE)
        self.cache.insert(InsertParams(key=self.key(tokens, **named), value=slots.clone()))
        return slots

    def finish_offloads(self):
        """Takes all results, as the scheduler does at each step; returns how many there were."""
        linker, before = self.linker, len(self.cache.linker.pending_offloads)
        wait_for("offloads", lambda: linker.num_completed_offloads() == before)
        self.cache.check_hicache_events()
        linker._transfer.wait_published(support.SECONDS)
        return before

    def match(self, tokens, req=None, **named):
        """(request, result): host_hit_length is the number of tokens that crumbd supplies."""
        req = req or self.request()
        result = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens, **named), req=req))
        req.last_node = result.last_device_node
        return req, result

    def load_back(self, req, result):
        tokens, _ = self.cache.init_load_back(InitLoadBackParams(
            best_match_node=result.best_match_node, host_hit_length=result.host_hit_length,
            req=req))
        return tokens

    def step(self, *requests):
        """A step that loads; returns requests that SGLang aborts."""
        self.linker.layer_done_counter.set_consumer(self.cache.ready_to_load_host_cache())
        for layer in range(LAYERS):
            self.pool.get_key_buffer(layer)  # waits for the layer
        return self.cache.finish_external_linker_loads(list(requests))

    def load(self, tokens, **named):
        """Slots of the prefix that crumbd supplies, loaded by one step."""
        req, result = self.match(tokens, **named)
        if result.host_hit_length == 0:
            return torch.empty(0, dtype=torch.int64)
        assert self.load_back(req, result) == result.host_hit_length
        slots = self.cache.linker.private_load_indices[req.rid]
        assert self.step(req) == []
        return slots

    def rows(self, slots):
        """K and V of all layers, as bits."""
        return torch.stack([buffer[slots].view(torch.int16)
                            for buffer in [*self.pool.k_buffer, *self.pool.v_buffer]])

    def evict(self):
        self.cache.evict(EvictParams(num_tokens=SLOTS))


@unittest.skipIf(sglang is None, "needs sglang")
class SglangLinkerTest(support.CrumbdTest):
    """Engines over one crumbd."""

    models = itertools.count()
    core = "python"  # SGLang's implementation of the radix tree

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        publish_configuration()

    def engine(self, seed=0, **options):
        options.setdefault("history", "bf16")
        engine = Engine(self.folder, seed, core=self.core, **options)
        self.addCleanup(engine.linker.close)
        return engine

    def pair(self, **options):
        """Two engines of a model that no other test uses: one writes, the other reads."""
        options.setdefault("weights", f"w{next(self.models)}")
        return self.engine(1, **options), self.engine(2, **options)

    def stored(self, engine, tokens, **named):
        """Computes and stores a sequence; returns its rows."""
        slots = engine.compute(tokens, **named)
        self.assertGreaterEqual(engine.finish_offloads(), 1)
        return engine.rows(slots)

    def assert_equal_rows(self, found, expected):
        self.assertEqual(found.shape, expected.shape)
        self.assertTrue(torch.equal(found, expected))

    def assert_computes(self, engine, req, result):
        """The request loads nothing, and no memory of SGLang's pool is lost."""
        self.assertGreater(result.host_hit_length, 0)
        free = engine.allocator.available_size()
        self.assertEqual(engine.load_back(req, result), 0)
        self.assertEqual(engine.allocator.available_size(), free)
        self.assertEqual(engine.step(req), [])
