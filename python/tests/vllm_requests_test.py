# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector's scheduler loads and stores the right pages: without vLLM and crumbd."""

import types
import unittest

from vllm_requests_support import (FakeLease, FakePolicy, SECONDS, Request, RequestsCase, jobs,
                                   requests, step)


class RequestsTest(RequestsCase):
    def test_whole_pages_of_a_prompt_are_stored_once(self):
        tracker = self.make()
        request = Request("a", range(1000))
        matched, _, stores = self.run_prompt(tracker, request, range(63))
        self.assertEqual(matched, 0)
        self.assertEqual([(j.first_page, len(j.keys)) for j in stores], [(0, 15)])
        self.assertEqual(stores[0].blocks, tuple(range(60)))
        request.all_token_ids.append(7)
        self.assertEqual(tracker.stores(step(cached=[("a", None, 1000, 1)])), [])
        tracker.finished("a")
        self.assertEqual(len(tracker), 0)

    def test_blocks_of_a_sink_stand_in_front_of_those_of_pages(self):
        layout = requests.BlockLayout(64, pages=1, front=2, front_blocks=3)
        tracker = requests.Requests(self.store, layout, False, 0.1, FakePolicy(), SECONDS)
        self.addCleanup(tracker.close)

        def output(request_id, computed, scheduled, groups, new=True):
            made = step(new=[(request_id, (), computed, scheduled)] if new else (),
                        cached=() if new else [(request_id, (), computed, scheduled)])
            if new:
                made.scheduled_new_reqs[0].block_ids = groups
            else:
                made.scheduled_cached_reqs.new_block_ids[0] = groups
            return made

        writer = Request("a", range(700))
        self.assertEqual(tracker.matched_tokens(writer, 0), 0)
        groups = ([1], [10, 11, 12, 13, 14], [7, 8, 9])
        tracker.allocated(writer, groups, 0)
        stores = tracker.stores(output("a", 0, 300, groups))
        self.assertEqual([(j.first_page, len(j.keys), j.blocks) for j in stores],
                         [(0, 4, (7, 8, 9, 10, 11, 12, 13))])
        more = tracker.stores(output("a", 300, 400, ([], [15, 16, 17, 18, 19, 20], []), new=False))
        self.assertEqual([(j.first_page, len(j.keys), j.blocks) for j in more],
                         [(4, 6, (7, 8, 9, *range(10, 20)))])
        self.publish(stores + more)
        tracker.finished("a")

        reader = Request("b", range(700))
        self.assertEqual(tracker.matched_tokens(reader, 64), 384 - 64)
        tracker.allocated(reader, ([1], list(range(30, 41)), [4, 5, 6]), 320)
        (load,) = tracker.loads()
        self.assertEqual((load.first_page, len(load.keys), load.blocks),
                         (1, 6, (4, 5, 6, *range(30, 36))))
        # A request of which a load failed is computed, and its pages are stored again.
        tracker.load_failed("b")
        self.assertEqual(tracker.matched_tokens(reader, 0), 0)
        tracker.finished("b")

    def test_chunks_of_a_prompt_continue_where_the_last_one_ended(self):
        tracker = self.make()
        request = Request("a", range(300))
        tracker.matched_tokens(request, 0)
        tracker.allocated(request, [range(7)], 0)
        first = tracker.stores(step(new=[("a", range(7), 0, 100)]))
        second = tracker.stores(step(cached=[("a", range(7, 19), 100, 200)]))
        self.assertEqual([(j.first_page, len(j.keys)) for j in first + second], [(0, 1), (1, 3)])
        self.assertEqual(second[0].parent, first[0].keys[0])
        self.assertEqual(second[0].blocks, tuple(range(16)))
        tracker.finished("a")

    def test_a_hit_leaves_the_recent_window_of_int2_prompts_to_the_engine(self):
        tracker = self.make(block_tokens=128)
        self.run_prompt(tracker, Request("a", range(1000)), range(9))
        tracker.finished("a")
        matched, loads, stores = self.run_prompt(tracker, Request("b", range(1100)), range(20, 29))
        self.assertEqual(matched, 768)  # 1,100 - 256, in blocks of 128
        self.assertEqual((loads[0].first_page, len(loads[0].keys)), (0, 12))
        self.assertEqual(loads[0].blocks, tuple(range(20, 26)))
        self.assertEqual([(j.first_page, len(j.keys)) for j in stores], [(15, 2)])
        self.assertTrue(stores[0].over_int2_prefix)
        tracker.finished("b")

    def test_exact_pages_need_one_token_to_be_computed(self):
        tracker = self.make(exact=True)
        self.run_prompt(tracker, Request("a", range(640)), range(40))
        tracker.finished("a")
        matched, _, stores = self.run_prompt(tracker, Request("b", range(640)), range(40))
        self.assertEqual(matched, 576)
        self.assertEqual(stores, [])
        tracker.finished("b")

    def test_tokens_that_the_engine_has_itself_are_not_loaded(self):
        tracker = self.make(exact=True)
        self.run_prompt(tracker, Request("a", range(640)), range(40))
        tracker.finished("a")
        request = Request("b", range(640))
        self.assertEqual(tracker.matched_tokens(request, 256), 320)
        tracker.allocated(request, [range(40)], 320)
        self.assertEqual(tracker.loads()[0].first_page, 4)
        self.assertEqual(tracker.matched_tokens(request, 576), 0)
        tracker.finished("b")

    def test_adapter_salt_and_images_are_in_the_keys(self):
        def feature(identifier, offset):
            return types.SimpleNamespace(
                identifier=identifier, mm_position=types.SimpleNamespace(offset=offset, length=9))

        def lora(number):
            return types.SimpleNamespace(lora_name=f"l{number}", lora_int_id=number, lora_path="p")

        others = [{"lora_request": lora(1)}, {"lora_request": lora(2)}, {"cache_salt": "s"},
                  {"mm_features": [feature("image", 0)]}, {"mm_features": [feature("other", 0)]},
                  {}]
        tracker = self.make(exact=True)
        for i, members in enumerate(others):
            with self.subTest(members=members):
                matched, _, _ = self.run_prompt(tracker, Request(str(i), range(640), **members),
                                                range(40))
                self.assertEqual(matched, 0)
                again, _, _ = self.run_prompt(
                    tracker, Request(f"again {i}", range(640), **members), range(40))
                self.assertEqual(again, 576)
        # An image in the middle leaves the pages before it alone.
        matched, _, _ = self.run_prompt(
            tracker, Request("late", range(640), mm_features=[feature("image", 300)]), range(40))
        self.assertEqual(matched, 256)
        for request_id in [str(i) for i in range(6)] + [f"again {i}" for i in range(6)] + ["late"]:
            tracker.finished(request_id)

    def test_after_a_reset_pages_of_the_weights_before_are_neither_found_nor_stored(self):
        tracker = self.make(exact=True, engine_id=b"this engine")
        self.assertEqual(self.run_prompt(tracker, Request("a", range(640)), range(40))[0], 0)
        running, waiting = Request("b", range(640)), Request("c", range(640))
        self.assertEqual(tracker.matched_tokens(running, 0), 576)
        self.assertEqual(tracker.matched_tokens(waiting, 0), 576)
        tracker.allocated(running, [range(40)], 576)
        self.assertFalse(tracker.reset(), "pages are being loaded")
        tracker.load_finished("b")
        self.assertEqual(FakeLease.open_leases, 0)
        running.all_token_ids.extend(range(200))
        self.assertEqual(tracker.stores(step(new=[("b", range(60), 576, 264)])), [])
        tracker.finished("b")
        self.assertTrue(tracker.reset())
        # The one that waited finds nothing, and the pages that it stores are found again.
        self.assertEqual(self.run_prompt(tracker, waiting, range(40))[0], 0)
        self.assertEqual(self.run_prompt(tracker, Request("d", range(640)), range(40))[0], 576)
        other = self.make(exact=True, engine_id=b"another engine")
        self.assertTrue(other.reset())
        self.assertEqual(self.run_prompt(other, Request("e", range(640)), range(40))[0], 0)
        other.finished("e")
        for request_id in "acd":
            tracker.finished(request_id)

    def test_draft_tokens_and_placeholders_are_never_stored(self):
        tracker = self.make()
        request = Request("a", range(120))
        self.run_prompt(tracker, request, range(10))
        # Eight positions are scheduled: two known tokens, then drafts that may be rejected.
        request.all_token_ids += [1, 2]
        self.assertEqual(tracker.stores(step(cached=[("a", None, 120, 10)])), [])
        request.all_token_ids += [3, 4, 5, 6, 7, 8]
        jobs = tracker.stores(step(cached=[("a", None, 126, 2)]))
        self.assertEqual([(j.first_page, len(j.keys)) for j in jobs], [(1, 1)])
        expected = self.store.keys(b"", list(range(120)) + [1, 2, 3, 4, 5, 6, 7, 8],
                                   [requests.NO_EXTRA] * 2)
        self.assertEqual(jobs[0].keys, (expected[1],))
        tracker.finished("a")

    def test_a_preempted_request_comes_back_with_other_blocks(self):
        tracker = self.make()
        request = Request("a", range(200))
        tracker.matched_tokens(request, 0)
        tracker.allocated(request, [range(13)], 0)
        tracker.stores(step(new=[("a", range(13), 0, 100)]))
        jobs = tracker.stores(step(cached=[("a", range(50, 63), 0, 200)], resumed=["a"]))
        self.assertEqual([(j.first_page, len(j.keys)) for j in jobs], [(1, 2)])
        self.assertEqual(jobs[0].blocks, tuple(range(50, 62)))
        tracker.finished("a")

    def test_pages_that_did_not_arrive_are_stored_again(self):
        tracker = self.make(exact=True)
        self.run_prompt(tracker, Request("a", range(640)), range(40))
        tracker.finished("a")
        request = Request("b", range(640))
        matched = tracker.matched_tokens(request, 0)
        tracker.allocated(request, [range(40)], matched)
        self.assertEqual(len(tracker.loads()), 1)
        tracker.load_failed("b")
        jobs = tracker.stores(step(new=[("b", range(40), 0, 640)]))
        self.assertEqual([(j.first_page, len(j.keys)) for j in jobs], [(0, 10)])
        tracker.finished("b")

    def test_a_request_that_ends_before_it_is_scheduled_gives_its_lease_back(self):
        tracker = self.make(exact=True)
        self.run_prompt(tracker, Request("a", range(640)), range(40))
        tracker.finished("a")
        request = Request("b", range(640))
        self.assertEqual(tracker.matched_tokens(request, 0), 576)
        self.assertEqual(FakeLease.open_leases, 1)
        tracker.finished("b")
        self.assertEqual(tracker.loads(), [])

    def test_prompts_that_crumb_does_not_serve(self):
        tracker = self.make(exact=True)
        self.run_prompt(tracker, Request("a", range(640)), range(40))
        tracker.finished("a")
        for members in ({"skip_reading_prefix_cache": True}, {"prompt_embeds": object()}):
            request = Request("b", range(640), **members)
            self.assertEqual(tracker.matched_tokens(request, 0), 0)
            tracker.allocated(request, [range(40)], 0)
            stores = tracker.stores(step(new=[("b", range(40), 0, 640)]))
            self.assertEqual(bool(stores), "prompt_embeds" not in members)
            tracker.finished("b")

    def test_a_prefix_that_is_faster_to_compute_is_not_loaded(self):
        tracker = self.make(exact=True, worth=lambda tokens: tokens > 600)
        self.run_prompt(tracker, Request("a", range(640)), range(40))
        tracker.finished("a")
        request = Request("b", range(700))
        self.store.deadlines.clear()
        self.assertEqual(tracker.matched_tokens(request, 64), 0)
        # It is looked up all the same, without a deadline, so that it is not stored again.
        self.assertEqual(self.store.deadlines, [0.0])
        tracker.allocated(request, [range(44)], 0)
        stores = tracker.stores(step(new=[("b", range(44), 64, 636)]))
        self.assertEqual([job.first_page for job in stores], [])
        tracker.finished("b")

    def test_the_choice_is_made_once(self):
        choices = iter([True, False])
        tracker = self.make(exact=True, worth=lambda tokens: next(choices))
        self.store.pages.update(self.store.keys(b"", range(640), [requests.NO_EXTRA] * 10))
        self.assertEqual(tracker.matched_tokens(Request("a", range(640)), 0), 576)
        tracker.finished("a")

    def test_pages_of_the_engines_own_prefix_cache_are_not_stored_again(self):
        tracker = self.make(exact=True)
        request = Request("a", range(700))
        self.assertEqual(tracker.matched_tokens(request, 640), 0)
        tracker.allocated(request, [range(44)], 0)
        stores = tracker.stores(step(new=[("a", range(44), 640, 60)]))
        request.all_token_ids.extend(range(4))
        stores += tracker.stores(step(cached=[("a", None, 700, 4)]))
        self.assertEqual([(j.first_page, len(j.keys)) for j in stores], [(10, 1)])
        tracker.finished("a")

    def test_pages_for_which_a_worker_had_no_memory_are_stored_in_a_later_step(self):
        tracker = self.make()
        request = Request("a", range(640))
        _, _, stores = self.run_prompt(tracker, request, range(40))
        request.all_token_ids.append(7)
        ahead = tracker.stores(step(cached=[("a", None, 640, 1)]))
        for _ in range(2):  # two ranks say so
            tracker.store_refused("a", 4, 10)
        again = tracker.stores(step(cached=[("a", range(40, 41), 641, 1)]))
        self.assertEqual([(j.first_page, len(j.keys)) for j in stores + ahead + again],
                         [(0, 10), (4, 6)])
        self.assertEqual((again[0].parent, again[0].keys), (stores[0].keys[3], stores[0].keys[4:]))
        self.assertEqual(tracker.stores(step(cached=[("a", None, 642, 1)])), [])
        tracker.store_refused("b", 0, 1)  # has ended
        tracker.finished("a")

    def test_refused_pages_of_a_preempted_request_wait_until_they_are_computed_again(self):
        tracker = self.make()
        request = Request("a", range(640))
        self.run_prompt(tracker, request, range(40))
        tracker.store_refused("a", 4, 10)
        blocks = range(50, 90)
        self.assertEqual(
            tracker.stores(step(cached=[("a", blocks, 0, 500)], resumed=["a"])), [])
        again = tracker.stores(step(cached=[("a", None, 500, 140)]))
        self.assertEqual([(j.first_page, len(j.keys)) for j in again], [(4, 6)])
        self.assertEqual(again[0].blocks, tuple(blocks))
        tracker.finished("a")


class BlocksBeingStoredTest(unittest.TestCase):
    """Blocks of 16 tokens, four in a page."""

    def setUp(self):
        self.blocks = jobs.BlocksBeingStored(jobs.BlockLayout(16))

    def store(self, blocks, first_page=0):
        return jobs.StoreJob("a", b"", (b"",), first_page, b"", tuple(blocks), False)

    def load(self, blocks, first_page=0):
        return jobs.LoadJob("b", b"", (b"",), first_page, tuple(blocks))

    def behind(self, new=(), cached=(), resumed=(), loads=(), stores=()):
        return self.blocks.next_step(step(new, cached, resumed), loads, stores)[1]

    def test_a_step_that_receives_such_blocks_waits_for_their_latest_store(self):
        self.assertEqual(self.behind(new=[("a", range(8), 0, 128)],
                                     stores=[self.store(range(4)), self.store(range(8), 1)]), 0)
        self.assertEqual(self.behind(cached=[("a", [8], 128, 1)]), 0)
        self.assertEqual(self.behind(cached=[("a", None, 129, 1)],
                                     stores=[self.store(range(12), 2)]), 0)
        self.assertEqual(self.behind(new=[("b", [20, 3], 0, 32)]), 1)
        self.assertEqual(self.behind(cached=[("b", [9], 32, 1)]), 3)
        self.assertEqual(self.behind(cached=[("b", [9, 3], 33, 1)]), 0)  # it has waited

    def test_hits_are_only_read_and_loads_write(self):
        self.behind(stores=[self.store(range(8))])
        self.assertEqual(self.behind(new=[("b", [*range(4), 20], 64, 10)]), 0)
        self.assertEqual(self.behind(cached=[("c", [4, 21], 16, 10)], resumed=["c"]), 0)
        self.assertEqual(self.behind(loads=[self.load([4, 5, 6, 7, 1], 1)]), 1)
        self.assertEqual(self.behind(cached=[("c", [2, 7], 16, 10)], resumed=["c"]), 1)


if __name__ == "__main__":
    unittest.main()
