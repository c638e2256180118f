# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Lookups, keys and adapters of the vLLM connector's scheduler: without vLLM and crumbd."""

import time
import types
import unittest
from unittest import mock

from vllm_requests_support import (FakeLease, FakePolicy, PAGE, SECONDS, Request, RequestsCase,
                                   lookups, policy, requests, step, wait_for)


class LookupsTest(RequestsCase):
    def test_an_adapter_is_known_by_its_weights(self):
        def lora(name, number, path):
            return types.SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)

        digests = {"here": "a", "there": "a", "other": "b", "gone": None, "away": None}
        tracker = self.make(exact=True, adapter_digest=digests.get)
        matched = [self.run_prompt(tracker, Request(str(i), range(640), lora_request=adapter),
                                   range(40))[0]
                   for i, adapter in enumerate([
                       lora("x", 1, "here"), lora("y", 2, "there"), lora("x", 1, "other"),
                       lora("x", 1, "gone"), lora("x", 1, "gone"), lora("x", 1, "away")])]
        self.assertEqual(matched, [0, 576, 0, 0, 576, 0])
        for request_id in map(str, range(6)):
            tracker.finished(request_id)

    def test_an_adapter_whose_files_were_replaced_is_neither_stored_nor_loaded(self):
        """The engine may hold the adapter of before, and may read the new files at any time."""
        def lora(number):
            return types.SimpleNamespace(lora_name="x", lora_int_id=number, lora_path="here")

        digests = {"here": "a"}
        tracker = self.make(exact=True, adapter_digest=digests.get)

        def run(request_id, number):
            request = Request(request_id, range(640), lora_request=lora(number))
            matched, _, stores = self.run_prompt(tracker, request, range(40))
            tracker.finished(request_id)
            return matched, len(stores)

        self.assertEqual(run("a", 1), (0, 1))
        self.assertEqual(run("b", 1), (576, 0))
        running = Request("running", range(640), lora_request=lora(1))
        self.run_prompt(tracker, running, range(40))
        digests["here"] = "c"  # trained further
        self.assertEqual(run("c", 1), (0, 0))
        running.all_token_ids.extend(range(64))
        self.assertEqual(tracker.stores(step(cached=[("running", range(40, 44), 640, 64)])), [])
        tracker.finished("running")
        digests["here"] = "a"  # the engine may have read the files in between
        self.assertEqual(run("d", 1), (0, 0))
        digests["here"] = "c"
        self.assertEqual(run("e", 2), (0, 1))  # read again, under a number of its own
        self.assertEqual(run("f", 2), (576, 0))

    def test_an_adapter_without_files_is_found_by_its_own_engine_only(self):
        adapter = types.SimpleNamespace(lora_name="x", lora_int_id=1, lora_path="gone")
        for tracker, expected in ((self.make(exact=True), [0, 576]),
                                  (self.make(exact=True), [0, 576])):
            found = []
            for request_id in "ab":
                request = Request(request_id, range(640), lora_request=adapter)
                found.append(self.run_prompt(tracker, request, range(40))[0])
                tracker.finished(request_id)
            self.assertEqual(found, expected)

    def test_a_request_that_waits_for_blocks_is_looked_up_once(self):
        choices = iter([True, True, False])
        tracker = self.make(exact=True, worth=lambda tokens: next(choices))
        self.run_prompt(tracker, Request("a", range(640)), range(40))
        tracker.finished("a")
        self.store.deadlines.clear()
        request = Request("b", range(640))
        for _ in range(3):  # the scheduler calls again while there is no room
            self.assertEqual(tracker.matched_tokens(request, 0), 576)
        self.assertEqual(len(self.store.deadlines), 1)
        self.assertEqual(FakeLease.open_leases, 1)
        # The engine has computed a part of the prompt for another request meanwhile.
        for _ in range(2):
            self.assertEqual(tracker.matched_tokens(request, 128), 0)  # the third choice
        self.assertEqual(len(self.store.deadlines), 2)
        self.assertEqual(FakeLease.open_leases, 0)
        tracker.finished("b")

    def test_a_preempted_request_is_looked_up_again(self):
        tracker = self.make(exact=True)
        request = Request("a", range(640))
        self.run_prompt(tracker, request, range(40))
        self.assertEqual(tracker.matched_tokens(request, 0), 576)
        tracker.finished("a")

    def test_each_page_is_hashed_once(self):
        tracker = self.make()
        request = Request("a", range(1000))
        self.run_prompt(tracker, request, range(63))
        self.store.hashed_pages = 0
        for length in range(1000, 1000 + 10 * PAGE):
            request.all_token_ids.append(7)
            for job in tracker.stores(step(cached=[("a", range(63, 104) if length == 1000 else None,
                                                    length, 1)])):
                self.publish([job])
        self.assertLessEqual(self.store.hashed_pages, 11)
        tracker.finished("a")
        # The keys are those of the whole sequence.
        longer = Request("b", [*range(1000), *[7] * 640])
        self.assertEqual(tracker.matched_tokens(longer, 0), (1640 - 256) // PAGE * PAGE)
        tracker.finished("b")

    def test_a_block_that_running_requests_attend_is_not_written(self):
        """The engine's own hit ends inside of a page, in a block that it shares."""
        tracker = self.make(exact=True)
        self.run_prompt(tracker, Request("a", range(640)), range(40))
        tracker.finished("a")
        request = Request("b", range(640))
        self.assertEqual(tracker.matched_tokens(request, 80), 0)
        tracker.allocated(request, [range(40)], 0)
        self.assertEqual(tracker.loads(), [])
        # It is looked up all the same, so that it is not stored again.
        self.assertEqual(tracker.stores(step(new=[("b", range(40), 80, 560)])), [])
        tracker.finished("b")

    def test_hits_of_rounded_blocks_in_the_engines_own_cache_are_computed_over_int2(self):
        tracker = self.make()
        self.run_prompt(tracker, Request("a", range(1000)), range(63))
        tracker.finished("a")
        matched, loads, _ = self.run_prompt(tracker, Request("b", range(1100)), range(63, 132))
        self.assertGreater(matched, 0)
        tracker.finished("b")

        def over_int2(request_id, own, tokens):
            request = Request(request_id, tokens)
            self.store.pages.clear()
            self.assertEqual(tracker.matched_tokens(request, own), 0)
            tracker.allocated(request, [range(100)], 0)
            jobs = tracker.stores(step(new=[(request_id, range(100), own,
                                             request.num_tokens - own)]))
            tracker.finished(request_id)
            return [job.over_int2_prefix for job in jobs]

        other = [9] * 600
        self.assertEqual(over_int2("c", 640, [*range(640), *other]), [True])
        self.assertEqual(over_int2("d", 64, [*range(64), *other]), [False])  # page 0 is exact
        self.assertEqual(over_int2("e", 80, [*range(80), *other]), [True])
        self.assertEqual(over_int2("f", 0, [*range(640), *other]), [False])

    def test_loads_that_are_queued_are_counted(self):
        chooser = FakePolicy()
        tracker = self.make(exact=True, policy=chooser)
        self.store.pages.update(self.store.keys(b"", range(640), [requests.NO_EXTRA] * 10))
        first, second, third = (Request(name, range(640)) for name in "abc")
        self.assertEqual(tracker.matched_tokens(first, 0), 576)
        tracker.allocated(first, [range(40)], 576)
        tracker.loads()
        self.assertEqual(tracker.matched_tokens(second, 0), 576)
        tracker.load_finished("a")
        self.assertEqual(tracker.matched_tokens(third, 0), 576)
        self.assertEqual(chooser.queued, [0, 576, 0])
        for name in "abc":
            tracker.finished(name)

    def test_the_scheduler_does_not_wait_for_a_crumbd_that_hangs(self):
        tracker = self.make(exact=True, patience=0.01)
        self.store.pages.update(self.store.keys(b"", range(640), [requests.NO_EXTRA] * 10))
        self.store.may_open.clear()
        self.addCleanup(self.store.may_open.set)
        with mock.patch.object(requests, "OPENING_PATIENCE_SECONDS", 0.1, create=True):
            begin = time.monotonic()
            request = Request("a", range(640))
            self.assertIsNone(tracker.matched_tokens(request, 0))
            self.assertLess(time.monotonic() - begin, SECONDS / 2)
            time.sleep(0.1)
            self.assertEqual(tracker.matched_tokens(request, 0), 0)  # it is computed
            tracker.allocated(request, [range(40)], 0)
            output = step(new=[("a", range(40), 0, 640)])
            self.assertEqual(tracker.stores(output), [])
            self.assertEqual(tracker.matched_tokens(Request("b", range(640)), 0), 0)  # a response without a wait
            tracker.finished("b")
        self.store.may_open.set()
        wait_for(lambda: tracker._tracked["a"].opening.done())
        # The pages are stored when crumbd responds.
        (job,) = tracker.stores(step(cached=[("a", None, 640, 0)]))
        self.assertEqual((job.first_page, len(job.keys)), (0, 10))
        tracker.finished("a")

    def found_later(self, tracker, request):
        """The result of a lookup that the test holds up until now."""
        self.store.may_find.set()
        lookup = tracker._tracked[request.request_id].lookup
        self.assertTrue(lookup.done(SECONDS))
        return tracker.matched_tokens(request, 0)

    def test_other_requests_run_while_a_lookup_waits(self):
        tracker = self.make(exact=True, patience=0.0)
        self.store.pages.update(self.store.keys(b"", range(640), [requests.NO_EXTRA] * 10))
        self.store.may_find.clear()
        request = Request("a", range(640))
        for _ in range(3):
            self.assertIsNone(tracker.matched_tokens(request, 0))
        self.assertEqual(self.found_later(tracker, request), 576)
        self.assertEqual(self.store.deadlines, [0.1])
        tracker.allocated(request, [range(40)], 576)
        self.assertEqual([job.first_page for job in tracker.loads()], [0])
        tracker.finished("a")

    def test_leases_of_requests_that_end_during_their_lookups_are_given_back(self):
        tracker = self.make(exact=True, patience=0.0)
        self.store.pages.update(self.store.keys(b"", range(640), [requests.NO_EXTRA] * 10))
        self.store.may_find.clear()
        for number in range(2 * lookups.LOOKUPS_MAX):
            request_id = str(number)
            self.assertIsNone(tracker.matched_tokens(Request(request_id, range(640)), 0))
            tracker.finished(request_id)
        self.store.may_find.set()
        tracker.close()
        self.assertEqual(FakeLease.open_leases, 0)

    def test_the_policy_receives_the_time_that_pages_took_to_arrive(self):
        self.store.pages.update(self.store.keys(b"", range(640), [requests.NO_EXTRA] * 10))
        none = policy.NO_PATIENCE
        for patience, arrived, late, received in (
                (None, 0, False, []), (None, 3, False, [(192, False)]), (None, 0, True, [(0, True)]),
                (none, 0, True, [])):
            chooser = FakePolicy(patience=patience)
            tracker = self.make(exact=True, policy=chooser)
            self.store.arrived, self.store.late = arrived, late
            self.store.deadlines.clear()
            self.assertEqual(tracker.matched_tokens(Request("a", range(640)), 0), 576)
            self.assertEqual(self.store.deadlines, [0.0 if patience else 0.1])
            self.assertEqual(chooser.received, received)
            tracker.finished("a")

    def waited(self, first, second, slowest):
        """Looks up with a first look after 10 ms and 10 s in total, and leases of (pages, arrived,
        late); returns the tokens to load, the deadlines and the measurements of the policy."""
        chooser = FakePolicy(patience=policy.Patience(0.01, 10.0, slowest))
        tracker = self.make(exact=True, policy=chooser)
        self.store.leases = [lambda given=given: FakeLease(*given) for given in (first, second)]
        self.store.deadlines.clear()
        tokens = tracker.matched_tokens(Request("a", range(640)), 0)
        tracker.finished("a")
        return tokens, self.store.deadlines, chooser.received

    def test_a_lookup_waits_on_while_pages_arrive_fast_enough(self):
        tokens, deadlines, received = self.waited((2, 2, True), (9, 7, False), slowest=1.0)
        self.assertEqual((tokens, received), (576, [(576, False)]))
        self.assertEqual(deadlines[0], 0.01)
        self.assertTrue(0 < deadlines[1] <= 10.0, deadlines)

    def test_a_lookup_ends_early_when_pages_arrive_slowly(self):
        """The others are computed; those that have arrived are loaded."""
        tokens, deadlines, received = self.waited((2, 2, True), (9, 7, False), slowest=0.0)
        self.assertEqual((tokens, deadlines, received), (128, [0.01], [(128, True)]))


if __name__ == "__main__":
    unittest.main()
