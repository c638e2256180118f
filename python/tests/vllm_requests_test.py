# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The vLLM connector's scheduler loads and stores the right pages: without vLLM and crumbd."""

import hashlib
import importlib
import pathlib
import sys
import threading
import time
import types
import unittest
from unittest import mock

SOURCES = pathlib.Path(__file__).resolve().parents[1] / "src/crumb"
# The packages themselves import vLLM and the library.
for name, folder in (("crumb", SOURCES), ("crumb.vllm", SOURCES / "vllm")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]
requests = importlib.import_module("crumb.vllm._requests")
lookups = importlib.import_module("crumb.vllm._lookups")
policy = importlib.import_module("crumb.vllm._policy")
PAGE = requests.PAGE_TOKENS
SECONDS = 30  # bound on waits that a test ends itself


class FakeLease:
    open_leases = 0

    def __init__(self, pages, arrived=0, late=False):
        self.pages, self.token = pages, b"lease"
        self.arrived_pages, self.late = arrived, late
        FakeLease.open_leases += 1

    def close(self):
        FakeLease.open_leases -= 1


class FakeStore:
    """Has pages in a set; a page's key tells all that it depends on."""

    def __init__(self):
        self.pages = set()
        self.deadlines = []
        self.may_find = threading.Event()
        self.may_find.set()
        self.arrived, self.late = 0, False
        self.may_open = threading.Event()
        self.may_open.set()
        self.hashed_pages = 0

    def keyspace(self):
        assert self.may_open.wait(SECONDS)
        return b"keyspace"

    def keys(self, keyspace, token_ids, extra, parent=requests.NO_EXTRA):
        keys, before = [], b"" if parent == requests.NO_EXTRA else parent
        self.hashed_pages += len(token_ids) // PAGE
        for page in range(len(token_ids) // PAGE):
            page_of = (before, tuple(token_ids[page * PAGE:(page + 1) * PAGE]), extra[page])
            before = hashlib.sha256(repr(page_of).encode()).digest()
            keys.append(before)
        return keys

    def acquire(self, keyspace, keys, deadline):
        self.deadlines.append(deadline)
        assert self.may_find.wait(SECONDS)
        hits = 0
        while hits < len(keys) and keys[hits] in self.pages:
            hits += 1
        return FakeLease(hits, min(hits, self.arrived), self.late)


class FakePolicy:
    """Notes what it hears."""

    def __init__(self, loading=lambda tokens: True, waiting=lambda tokens: True):
        self.loading, self.waiting = loading, waiting
        self.heard, self.queued = [], []

    def worth_loading(self, tokens, queued_tokens=0):
        self.queued.append(queued_tokens)
        return self.loading(tokens)

    def worth_waiting(self, tokens, queued_tokens=0):
        return self.waiting(tokens)

    def arrived(self, tokens, seconds):
        self.heard.append((tokens, seconds))


class Request(types.SimpleNamespace):
    def __init__(self, request_id, tokens, **members):
        super().__init__(request_id=request_id, prompt_token_ids=list(tokens),
                         all_token_ids=list(tokens), lora_request=None, cache_salt=None,
                         mm_features=[], prompt_embeds=None, skip_reading_prefix_cache=False)
        self.__dict__.update(members)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


def step(new=(), cached=(), resumed=()):
    """A SchedulerOutput. new: (request id, blocks, computed, scheduled); cached: the same, where
    blocks are the new ones or None."""
    return types.SimpleNamespace(
        scheduled_new_reqs=[types.SimpleNamespace(req_id=r, block_ids=(list(b),),
                                                  num_computed_tokens=c) for r, b, c, _ in new],
        scheduled_cached_reqs=types.SimpleNamespace(
            req_ids=[r for r, _, _, _ in cached], resumed_req_ids=set(resumed),
            new_block_ids=[None if b is None else (list(b),) for _, b, _, _ in cached],
            num_computed_tokens=[c for _, _, c, _ in cached]),
        num_scheduled_tokens={r: n for r, _, _, n in [*new, *cached]})


def wait_for(condition):
    """Waits until the condition holds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class RequestsTest(unittest.TestCase):
    def setUp(self):
        FakeLease.open_leases = 0
        self.store = FakeStore()

    def tearDown(self):
        self.assertEqual(FakeLease.open_leases, 0, "a lease was not given back")

    def make(self, block_tokens=16, exact=False, worth=lambda tokens: True, policy=None,
             patience=SECONDS, **options):
        made = requests.Requests(self.store, requests.BlockLayout(block_tokens), exact, 0.1,
                                 policy or FakePolicy(worth), patience, **options)
        self.addCleanup(made.close)
        return made

    def publish(self, jobs):
        for job in jobs:
            self.store.pages.update(job.keys)

    def run_prompt(self, tracker, request, blocks):
        """Prefills a prompt in one step; returns the matched tokens and the stores."""
        matched = tracker.matched_tokens(request, 0)
        tracker.allocated(request, [blocks], matched)
        loads = tracker.loads()
        if loads:
            tracker.load_finished(request.request_id)
        stores = tracker.stores(step(new=[(request.request_id, blocks, matched,
                                           request.num_tokens - matched)]))
        self.publish(stores)
        return matched, loads, stores

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
        # The one that waited finds nothing, and what it stores is found again.
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
            self.assertEqual(tracker.matched_tokens(Request("b", range(640)), 0), 0)  # at once
            tracker.finished("b")
        self.store.may_open.set()
        wait_for(lambda: tracker._tracked["a"].opening.done())
        # The pages are stored when crumbd responds.
        (job,) = tracker.stores(step(cached=[("a", None, 640, 0)]))
        self.assertEqual((job.first_page, len(job.keys)), (0, 10))
        tracker.finished("a")

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

    def test_the_policy_hears_how_long_pages_took_to_arrive(self):
        self.store.pages.update(self.store.keys(b"", range(640), [requests.NO_EXTRA] * 10))
        for waiting, arrived, late, heard in ((True, 0, False, []), (True, 3, False, [192]),
                                              (True, 0, True, [0]), (False, 0, True, [])):
            chooser = FakePolicy(waiting=lambda tokens, wait=waiting: wait)
            tracker = self.make(exact=True, policy=chooser)
            self.store.arrived, self.store.late = arrived, late
            self.store.deadlines.clear()
            self.assertEqual(tracker.matched_tokens(Request("a", range(640)), 0), 576)
            self.assertEqual(self.store.deadlines, [0.1 if waiting else 0.0])
            self.assertEqual([tokens for tokens, _ in chooser.heard], heard)
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


class PolicyTest(unittest.TestCase):
    def chooser(self, load=0.1, compute=1.0, random_value=1.0, kind=None):
        """A policy that has measured these seconds for 1,000 tokens."""
        made = (kind or policy.LoadPolicy)(random_value=lambda: random_value)
        for _ in range(policy.LEAST_MEASUREMENTS):
            made.computed(1000, compute)
            made.loaded(1000, load)
        return made

    def test_everything_is_loaded_until_both_times_are_known(self):
        chooser = policy.LoadPolicy(random_value=lambda: 1.0)
        for _ in range(policy.LEAST_MEASUREMENTS):
            self.assertTrue(chooser.worth_loading(100))
            chooser.computed(100, 0.001)
        for _ in range(policy.LEAST_MEASUREMENTS):
            self.assertTrue(chooser.worth_loading(100))
            chooser.loaded(100, 1.0)
        self.assertFalse(chooser.worth_loading(100))

    def test_the_choice_follows_what_is_measured(self):
        chooser = self.chooser(load=2.0)
        self.assertFalse(chooser.worth_loading(1000))
        for _ in range(20):
            chooser.loaded(1000, 0.1)
        self.assertTrue(chooser.worth_loading(1000))

    def test_slow_first_times_do_not_decide(self):
        chooser = policy.LoadPolicy(random_value=lambda: 1.0)
        for _ in range(policy.LEAST_MEASUREMENTS):
            chooser.computed(1000, 0.025)
        for seconds in (1.3, 0.4, 0.003, 0.003, 0.003):
            self.assertTrue(chooser.worth_loading(1000))
            chooser.loaded(1000, seconds)
        self.assertTrue(chooser.worth_loading(1000))

    def test_pages_that_arrive_slowly_are_not_waited_for(self):
        for tokens, seconds, worth in ((1000, 0.1, True), (1000, 0.9, False), (0, 0.1, False)):
            chooser = self.chooser()
            for _ in range(policy.LEAST_MEASUREMENTS):
                self.assertTrue(chooser.worth_waiting(1000))
                chooser.arrived(tokens, seconds)
            self.assertEqual(chooser.worth_waiting(1000), worth)
            self.assertTrue(chooser.worth_loading(1000))

    def test_a_load_starts_when_those_in_front_of_it_have_ended(self):
        chooser = self.chooser()  # 0.1 ms a token to load, 1 ms to compute
        self.assertTrue(chooser.worth_loading(1000, 6000))
        self.assertFalse(chooser.worth_loading(1000, 8000))
        for _ in range(policy.LEAST_MEASUREMENTS):
            chooser.arrived(1000, 0.5)
        self.assertTrue(chooser.worth_waiting(1000, 5000))  # pages arrive while it is queued

    def test_measurements_of_ranks_are_not_mixed(self):
        fast, slow, none = (6400, 0.1), (64, 0.01), (0, 0.0)
        for one, other, expected in ((fast, slow, slow), (slow, fast, slow), (fast, none, fast),
                                     (none, slow, slow), (none, none, none), (fast, fast, fast)):
            self.assertEqual(policy.slower(one, other), expected)

    def test_always_means_always(self):
        chooser = self.chooser(load=10.0, kind=policy.AlwaysLoad)
        for _ in range(policy.LEAST_MEASUREMENTS):
            chooser.arrived(0, 10.0)
        self.assertTrue(chooser.worth_loading(1000) and chooser.worth_waiting(1000))

    def test_a_few_are_loaded_to_correct_a_prediction(self):
        chooser = self.chooser(load=2.0, random_value=0.001)
        self.assertTrue(chooser.worth_loading(1000))


if __name__ == "__main__":
    unittest.main()
