# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""CrumbLinker under SGLang's own radix tree, allocator and KV pools, on the CPU, over a crumbd.

Needs the package sglang; tests/engines/install_sglang.sh installs it.
"""

import itertools
import os
import signal
import types
import unittest
from array import array
from unittest import mock

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
    from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.server_args import ServerArgs
    import crumb.sglang.linker as linker_module
    from crumb.sglang import _model, _tree

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
    """What SGLang's cache reads of the server's arguments."""
    folder = support.ROOT / "models/data/tiny-lm"
    runtime_context.publish(ServerArgs(model_path=str(folder), device="cpu",
                                       attention_backend="torch_native"), role="scheduler")


class Engine:
    """SGLang's cache of one rank: pool, allocator, radix tree and linker."""

    def __init__(self, folder, seed=0, config=None, dtype=None, page=PAGE, core="python",
                 heads=HEADS, group=None, **options):
        self.pool = MHATokenToKVPool(SLOTS, page, dtype or torch.bfloat16, heads, DIM, LAYERS, "cpu",
                                     False)
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
        self.linker = self.make_linker(folder, config or model_config(), options)
        self.cache.init_cache_linker(self.linker)
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        self.rids = itertools.count()

    def make_linker(self, folder, config, options):
        return linker_module.CrumbLinker(
            None, self.params, components=set(self.cache.components),
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
        """(request, result): host_hit_length is what crumbd supplies."""
        req = req or self.request()
        result = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens, **named), req=req))
        req.last_node = result.last_device_node
        return req, result

    def load_back(self, req, result):
        tokens, _ = self.cache.init_load_back(InitLoadBackParams(
            best_match_node=result.best_match_node, host_hit_length=result.host_hit_length, req=req))
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
    """The same over SGLang's radix tree in Rust."""

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


class HostileTest(SglangLinkerTest):
    def test_a_lease_that_ended_before_the_load(self):
        writer, reader = self.pair()
        self.stored(writer, TOKENS[:3 * PAGE])
        req, result = reader.match(TOKENS[:3 * PAGE + 1])
        with mock.patch.object(linker_module, "LEASE_SECONDS", 0.0):
            reader.linker.num_completed_offloads()  # as at the next step
        self.assert_computes(reader, req, result)
        self.assertEqual(reader.linker.counters.refused_loads, 1)
        self.assertEqual(len(reader.load(TOKENS[:3 * PAGE + 1])), 3 * PAGE)

    def test_the_number_of_leases_is_bounded(self):
        writer, reader = self.pair(leases_max=2)
        self.stored(writer, TOKENS[:3 * PAGE])
        first = reader.match(TOKENS[:3 * PAGE + 1])
        for _ in range(3):
            last = reader.match(TOKENS[:3 * PAGE + 1])
        self.assertEqual(len(reader.linker._found), 2)
        self.assert_computes(reader, *first)
        self.assertEqual(reader.load_back(*last), 3 * PAGE)
        self.assertEqual(reader.step(last[0]), [])

    def test_a_lookup_that_is_repeated_asks_crumbd_once(self):
        writer, reader = self.pair()
        self.stored(writer, TOKENS[:3 * PAGE])
        req, _ = reader.match(TOKENS[:3 * PAGE + 1])
        for _ in range(3):
            self.assertEqual(reader.match(TOKENS[:3 * PAGE + 1], req)[1].host_hit_length, 3 * PAGE)
        self.assertEqual(reader.linker.counters.lookups, 1)
        reader.compute(TOKENS[:2 * PAGE])  # another request was faster
        result = reader.match(TOKENS[:3 * PAGE + 1], req)[1]
        self.assertEqual((result.device_prefix_len, result.host_hit_length), (2 * PAGE, PAGE))
        self.assertEqual(reader.linker.counters.lookups, 1)
        self.assertEqual(reader.load_back(req, result), PAGE)
        self.assertEqual(reader.step(req), [])

    def test_cancelled_requests(self):
        writer, reader = self.pair()
        self.stored(writer, TOKENS[:3 * PAGE])
        waiting, _ = reader.match(TOKENS[:3 * PAGE + 1])
        reader.cache.linker.release_request(waiting.rid)
        self.assertEqual(len(reader.linker._found), 0)
        admitted, result = reader.match(TOKENS[:3 * PAGE + 1])
        reader.load_back(admitted, result)
        slots = reader.cache.linker.private_load_indices[admitted.rid]
        before = reader.rows(slots)
        reader.cache.linker.release_request(admitted.rid)
        self.assertEqual(reader.cache.linker.inflight_load_rids, [])
        self.assertEqual(reader.step(admitted), [])
        self.assert_equal_rows(reader.rows(slots), before)  # nothing was written

    def test_a_load_that_cannot_be_opened_is_computed(self):
        writer, reader = self.pair()
        self.stored(writer, TOKENS[:3 * PAGE])
        error = crumb.Unavailable("made up")
        with mock.patch.object(reader.linker._transfer, "load", side_effect=error):
            self.assert_computes(reader, *reader.match(TOKENS[:3 * PAGE + 1]))
        short = mock.Mock(pages=1)
        with mock.patch.object(reader.linker._transfer, "load", return_value=short):
            self.assert_computes(reader, *reader.match(TOKENS[:3 * PAGE + 1]))
        short.close.assert_called_once()
        with mock.patch.object(reader.linker, "_agree", lambda own: False):  # another rank cannot
            self.assert_computes(reader, *reader.match(TOKENS[:3 * PAGE + 1]))
        self.assertEqual(reader.linker.counters.refused_loads, 3)

    def test_a_load_that_breaks_off_ends_its_requests_only(self):
        writer, reader = self.pair()
        self.stored(writer, TOKENS[:3 * PAGE])
        req, result = reader.match(TOKENS[:3 * PAGE + 1])
        reader.load_back(req, result)
        load, = reader.linker._queued.values()
        with mock.patch.object(load, "layers", side_effect=[None, crumb.DataLoss("made up")]):
            self.assertEqual(reader.step(req), [req])
        self.assertEqual(reader.linker.counters.failed_loads, 1)
        self.assertEqual(len(reader.load(TOKENS[:3 * PAGE + 1])), 3 * PAGE)

    def test_a_prefix_that_does_not_fit_is_computed(self):
        writer, reader = self.pair()
        self.stored(writer, TOKENS[:8 * PAGE])
        taken = reader.allocator.alloc(SLOTS - 5 * PAGE)
        self.assert_computes(reader, *reader.match(TOKENS[:8 * PAGE + 1]))
        reader.allocator.free(taken)
        self.assertEqual(len(reader.load(TOKENS[:8 * PAGE + 1])), 8 * PAGE)

    def test_stores_that_are_refused_are_made_later(self):
        writer, reader = self.pair()
        error = crumb.ResourceExhausted("made up")
        with mock.patch.object(writer.linker._transfer, "store", side_effect=error):
            slots = writer.compute(TOKENS[:3 * PAGE])
            writer.finish_offloads()
        self.assertEqual(len(reader.load(TOKENS[:3 * PAGE + 1])), 0)
        writer.cache.insert(InsertParams(key=writer.key(TOKENS[:3 * PAGE]), value=slots.clone()))
        writer.finish_offloads()
        self.assertEqual(len(reader.load(TOKENS[:3 * PAGE + 1])), 3 * PAGE)

    def test_offloads_are_bounded_and_answered_in_order(self):
        writer, reader = self.pair(offloads_max=1)
        writer.compute(TOKENS[:2 * PAGE])
        writer.compute(TOKENS[5 * PAGE:7 * PAGE])
        self.assertEqual(writer.finish_offloads(), 2)
        self.assertEqual(writer.linker.counters.refused_offloads, 1)
        self.assertEqual(len(reader.load(TOKENS[:2 * PAGE + 1])), 2 * PAGE)
        self.assertEqual(len(reader.load(TOKENS[5 * PAGE:7 * PAGE + 1])), 0)
        writer.evict()  # no node is locked any more
        self.assertEqual(writer.allocator.available_size(), SLOTS)

    def test_slots_that_are_no_pages(self):
        for bad in (torch.arange(PAGE) + 1, torch.arange(PAGE - 1), torch.arange(2 * PAGE).flip(0)):
            self.assertEqual(linker_module._page_numbers(bad), [])
        self.assertEqual(linker_module._page_numbers(torch.arange(PAGE, 3 * PAGE)), [1, 2])

    def test_what_is_not_served_is_refused_in_a_sentence(self):
        configs = {"sliding window": model_config(sliding_window_size=128),
                   "text models": model_config(is_multimodal=True),
                   "layer 0 has": model_config(head_dim=128),
                   "layers": model_config(num_hidden_layers=LAYERS + 1)}
        for text, config in configs.items():
            with self.assertRaisesRegex(crumb.InvalidArgument, text):
                self.engine(config=config)
        with self.assertRaisesRegex(crumb.InvalidArgument, "--dtype bfloat16"):
            self.engine(dtype=torch.float16)
        with self.assertRaisesRegex(crumb.InvalidArgument, "--page-size 64"):
            self.engine(page=32)
        with self.assertRaisesRegex(crumb.InvalidArgument, "no option dead_line"):
            self.engine(dead_line=1)
        with self.assertRaisesRegex(crumb.InvalidArgument, "after_flush"):
            self.engine(after_flush="sometimes")
        good = self.engine().params
        for text, change in {"draft": {"is_eagle": True}, "pipeline": {"pp_size": 2}}.items():
            params = types.SimpleNamespace(**{**vars(good), **change})
            with self.assertRaisesRegex(crumb.InvalidArgument, text):
                _model.check_supported(model_config(), params, {ComponentType.FULL})
        with self.assertRaisesRegex(crumb.InvalidArgument, "components FULL, SWA"):
            _model.check_supported(model_config(), good, {ComponentType.FULL, ComponentType.SWA})
        pool = self.engine().pool
        pools = {"NHD and HND": {"kv_cache_layout": "page_major"}, "without layers": {"k_buffer": []},
                 "in host memory": {"k_buffer": [torch.empty(1, device="meta")]},
                 "fixed places": {"host_transfer_translate": len}}
        for text, change in pools.items():
            with self.assertRaisesRegex(crumb.InvalidArgument, text):
                _model.paged_cache_of(types.SimpleNamespace(**{**vars(pool), **change}))

    def test_counters_are_exported(self):
        import prometheus_client
        engine = self.engine()
        exporter = linker_module.Exporter(engine.linker.counters)
        engine.linker.counters.loaded_pages = 5
        for _ in range(2):
            exporter.export()
        found = prometheus_client.REGISTRY.get_sample_value("sglang:crumb_loaded_pages_total")
        self.assertEqual(found, 5)

    def test_linkers_of_other_projects_are_called_as_before(self):
        engine = self.engine()
        other = mock.Mock(spec=UnifiedCacheLinker, pools={}, layer_done_counter=None)
        wrapper = _tree.PositionedLinkerWrapper(engine.cache, other)
        wrapper.release_request("r")
        other.close()
        with self.assertRaisesRegex(crumb.FailedPrecondition, "not attached"):
            linker = engine.make_linker(self.folder, model_config(), {})
            self.addCleanup(linker.close)
            linker.lookup("r", [])


class CrashTest(SglangLinkerTest):
    """With a crumbd for each test, which is killed."""

    def setUp(self):
        self.crumbd.stop()
        self.crumbd.start()

    def kill(self):
        self.crumbd.stop(signal.SIGKILL)

    def test_crumbd_ends_between_lookup_and_load(self):
        writer, reader = self.pair()
        self.stored(writer, TOKENS[:3 * PAGE])
        req, result = reader.match(TOKENS[:3 * PAGE + 1])
        self.kill()
        self.assert_computes(reader, req, result)
        self.assertEqual(reader.match(TOKENS[:3 * PAGE + 1])[1].host_hit_length, 0)

    def test_crumbd_ends_between_load_and_step(self):
        writer, reader = self.pair()
        written = self.stored(writer, TOKENS[:3 * PAGE])
        req, result = reader.match(TOKENS[:3 * PAGE + 1])
        reader.load_back(req, result)
        slots = reader.cache.linker.private_load_indices[req.rid]
        self.kill()
        self.assertEqual(reader.step(req), [])
        self.assert_equal_rows(reader.rows(slots), written)

    def test_stores_without_crumbd_fail_and_are_made_again(self):
        writer, reader = self.pair()
        self.kill()
        wait_for("the end of the connection", lambda: not writer.linker._client.connected)
        slots = writer.compute(TOKENS[:3 * PAGE])
        self.assertEqual(len(writer.cache.linker.pending_offloads), 1)
        writer.finish_offloads()
        self.crumbd.start()
        for engine in (writer, reader):
            engine.linker._client.wait_connected(support.SECONDS)
        writer.cache.insert(InsertParams(key=writer.key(TOKENS[:3 * PAGE]), value=slots.clone()))
        writer.finish_offloads()
        self.assertEqual(len(reader.load(TOKENS[:3 * PAGE + 1])), 3 * PAGE)


if __name__ == "__main__":
    unittest.main()
