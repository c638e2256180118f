# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""CrumbLinker where something fails: leases, loads, stores, sizes, and crumbd itself.

Needs the package sglang; tests/engines/install_sglang.sh installs it.
"""

import signal
import types
import unittest
from unittest import mock

import crumb
import support
from services import wait_for
from sglang_support import (LAYERS, PAGE, SLOTS, TOKENS, SglangLinkerTest, model_config, sglang,
                            torch)

if sglang is not None:
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
    from crumb.sglang import _model, _tree
    from sglang_support import ComponentType, InsertParams, linker_module


class HostileTest(SglangLinkerTest):
    def test_a_lease_that_ended_before_the_load(self):
        writer, reader = self.pair()
        self.stored(writer, TOKENS[:3 * PAGE])
        req, result = reader.match(TOKENS[:3 * PAGE + 1])
        with mock.patch.object(linker_module, "LEASE_SECONDS", 0.0):
            reader.linker.num_completed_offloads()  # the next step calls it
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

    def test_a_repeated_lookup_sends_one_request(self):
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

    def test_offloads_are_bounded_and_completed_in_order(self):
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
        pools = {"NHD and HND": {"kv_cache_layout": "page_major"},
                 "without layers": {"k_buffer": []},
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
        linker_module.Exporter(engine.linker.counters).export()  # the next engine of the process
        found = prometheus_client.REGISTRY.get_sample_value("sglang:crumb_loaded_pages_total")
        self.assertEqual(found, 10)

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
