# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for crumbd and vLLM, for tests of the connector's scheduler."""

import hashlib
import importlib
import pathlib
import sys
import threading
import time
import types
import unittest

SOURCES = pathlib.Path(__file__).resolve().parents[1] / "src/crumb"
# The packages themselves import vLLM and the library.
for name, folder in (("crumb", SOURCES), ("crumb.vllm", SOURCES / "vllm")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]
jobs = importlib.import_module("crumb.vllm._jobs")
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
    """Has pages in a set; a page's key contains everything that it depends on."""

    def __init__(self):
        self.pages = set()
        self.deadlines = []
        self.may_find = threading.Event()
        self.may_find.set()
        self.arrived, self.late = 0, False
        self.leases = []  # functions that make the next leases
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
        if self.leases:
            return self.leases.pop(0)()
        hits = 0
        while hits < len(keys) and keys[hits] in self.pages:
            hits += 1
        return FakeLease(hits, min(hits, self.arrived), self.late)


class FakePolicy:
    """Records its calls."""

    def __init__(self, loading=lambda tokens: True, patience=None):
        self.loading, self.waits = loading, patience
        self.received, self.queued = [], []

    def worth_loading(self, tokens, queued_tokens=0):
        self.queued.append(queued_tokens)
        return self.loading(tokens)

    def patience(self, tokens, queued_tokens, deadline):
        return self.waits or policy.Patience(deadline, deadline)

    def arrived(self, tokens, seconds, late):
        self.received.append((tokens, late))


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


class RequestsCase(unittest.TestCase):
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
