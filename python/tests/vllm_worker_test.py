# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""How the vLLM connector's workers move pages, without vLLM, crumbd and a device."""

import contextlib
import importlib
import logging
import pathlib
import sys
import threading
import types
import unittest

SECONDS = 30  # bound on waits that end at once in a test that passes
SOURCES = pathlib.Path(__file__).resolve().parents[1] / "src/crumb"


def stand_in(name, **members):
    """A module in place of one that needs the library or vLLM."""
    made = sys.modules[name] = types.ModuleType(name)
    made.__dict__.update(members)
    return made


class Error(Exception):
    """crumb.errors.Error"""


errors = stand_in("crumb.errors", Error=Error, Unavailable=type("Unavailable", (Error,), {}),
                  ResourceExhausted=type("ResourceExhausted", (Error,), {}))
stand_in("crumb.transfer", Transfer=object, Load=object)
stand_in("crumb", __path__=[str(SOURCES)])
stand_in("crumb.vllm", __path__=[str(SOURCES / "vllm")])
requests = importlib.import_module("crumb.vllm._requests")
worker = importlib.import_module("crumb.vllm._worker")


class Handle:
    """A load or a store that notes its calls."""

    def __init__(self, calls, pages=0):
        self.calls, self.pages = calls, pages

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.calls.append("close")

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


class SlowHandle(Handle):
    """A load that writes a layer for each release of `may_write`."""

    def __init__(self, calls, pages, may_write):
        super().__init__(calls, pages)
        self.may_write = may_write

    def layers(self, begin, end):
        assert self.may_write.acquire(timeout=SECONDS)
        self.calls.append(("layers", begin, end))


class FakeTransfer:
    """Has room for `room` pages."""

    layers = 4

    def __init__(self, room=1 << 20):
        self.room, self.stores, self.calls = room, [], []
        self.load_error = None
        self.loadable = 1 << 20
        self.may_write = None  # loads are SlowHandles if it is set

    def store(self, keyspace, keys, first_page, blocks, parent, over_int2_prefix):
        if len(keys) > self.room:
            raise errors.ResourceExhausted("staging memory is used up")
        self.room -= len(keys)
        self.stores.append((first_page, tuple(keys), parent, blocks, over_int2_prefix))
        return Handle(self.calls)

    def load(self, lease, keys, first_page, end_page, blocks, deadline):
        if self.load_error is not None:
            raise self.load_error
        pages = min(end_page - first_page, self.loadable)
        if self.may_write is not None:
            return SlowHandle(self.calls, pages, self.may_write)
        return Handle(self.calls, pages)

    def wait_published(self, timeout):
        pass


class FakeStreams:
    """Streams on which work takes `took` seconds."""

    def __init__(self, calls, took=0.0):
        self.calls, self.took, self.marks, self.stored = calls, took, 0, False
        self.may_load = threading.Event()
        self.may_load.set()

    def begin_store(self):
        self.calls.append("begin store")
        return 11

    def mark_stores(self):
        self.marks += 1
        return types.SimpleNamespace(name=f"stores {self.marks}", query=lambda: self.stored)

    def wait_for(self, point):
        self.calls.append(("wait for", point.name))

    def mark(self):
        return "mark"

    def begin_load(self, behind):
        self.may_load.wait(SECONDS)
        self.calls.append(("begin", behind))
        return types.SimpleNamespace(stream=22, end=lambda: self.calls.append("end"),
                                     seconds=lambda: self.took, mark=self.mark_load)

    def mark_load(self):
        self.marks += 1
        return types.SimpleNamespace(name=f"load {self.marks}")


def store_job(first, pages, request_id="a"):
    return requests.StoreJob(request_id, b"keyspace", tuple(b"%d" % (first + i)
                                                            for i in range(pages)),
                             first, b"parent", (3, 4, 5), True)


def load_job(first, end, request_id="a"):
    return requests.LoadJob(request_id, b"lease", tuple(b"%d" % i for i in range(end)), first,
                            tuple(range(100, 100 + 4 * end)))


class PageMoverTest(unittest.TestCase):
    def make(self, transfer, streams=None, layout=worker.BlockLayout(16)):
        mover = worker.PageMover(transfer, layout, 0.1)
        self.addCleanup(mover.close)
        if streams is not None:
            mover.use_device(streams)
        return mover

    def finish(self, mover):
        """Waits for all loads; returns the finished requests."""
        for future in list(mover._loading.values()):
            future.result(SECONDS)
        return mover.take_finished()

    def test_a_store_goes_out_in_parts(self):
        transfer = FakeTransfer()
        mover = self.make(transfer, FakeStreams(transfer.calls))
        mover.store([store_job(5, 150)])
        self.assertEqual([(first, len(keys), parent) for first, keys, parent, _, _
                          in transfer.stores],
                         [(5, 64, b"parent"), (69, 64, b"68"), (133, 22, b"132")])
        self.assertEqual({(blocks, over) for _, _, _, blocks, over in transfer.stores},
                         {((3, 4, 5), True)})
        self.assertEqual(transfer.calls,
                         ["begin store", *[("enqueue", 11), ("finish",), "close"] * 3])
        moved = mover.take_moved()
        self.assertEqual((moved.stored_pages, moved.refused_stores), (150, 0))
        self.assertEqual(mover.take_refused(), [])

    def test_a_step_waits_for_stores_that_may_still_read_its_blocks(self):
        transfer = FakeTransfer()
        streams = FakeStreams(transfer.calls)
        mover = self.make(transfer, streams)

        def waits(step):
            transfer.calls.clear()
            mover.wait_for_stores(step)
            return transfer.calls

        for step in (3, 5, 8):
            mover.store([store_job(0, 1)], step)
        mover.store([], 9)
        self.assertEqual(waits(3), [("wait for", "stores 1")])
        self.assertEqual(waits(4), [("wait for", "stores 2")])  # step 4 stored nothing
        self.assertEqual(waits(8), [("wait for", "stores 3")])
        self.assertEqual(waits(9), [])
        streams.stored = True
        mover.store([store_job(0, 1)], 12)  # those before have ended
        self.assertEqual(waits(5), [("wait for", "stores 4")])
        # All jobs of a step are left out: it waits for the stores before it.
        mover._failed_by_layer["a"] = 1  # pylint: disable=protected-access
        mover.store([store_job(0, 1)], 14)
        self.assertEqual(len(waits(14)), 1)

    def test_pages_without_memory_are_named_and_the_others_stored(self):
        transfer = FakeTransfer(room=100)
        mover = self.make(transfer)
        with self.assertLogs("crumb.vllm", logging.WARNING) as logs:
            for _ in range(3):  # the scheduler tries again
                mover.store([store_job(5, 150), store_job(0, 30, "b"), store_job(0, 20, "c")])
        self.assertEqual([(first, len(keys)) for first, keys, _, _, _ in transfer.stores],
                         [(5, 64), (0, 30)])
        self.assertEqual(mover.take_refused()[:2], [("a", 69, 155), ("c", 0, 20)])
        self.assertEqual(mover.take_refused(), [])
        moved = mover.take_moved()
        self.assertEqual((moved.stored_pages, moved.refused_stores), (94, 8))
        self.assertEqual(len(logs.output), 1, "a warning for each refused store")

    def test_a_load_of_which_pages_are_missing_names_their_blocks(self):
        transfer = FakeTransfer()
        transfer.loadable = 3
        mover = self.make(transfer)
        mover.start_loads([load_job(2, 10)])
        self.assertEqual(self.finish(mover), {"a"})
        self.assertEqual(mover.take_failed_blocks(), set(range(120, 140)))
        self.assertEqual(mover.take_failed_requests(), {"a"})
        moved = mover.take_moved()
        self.assertEqual((moved.loaded_pages, moved.failed_pages), (3, 5))

    def test_with_several_groups_of_blocks_the_request_is_named(self):
        transfer = FakeTransfer()
        transfer.loadable = 3
        mover = self.make(transfer, layout=worker.BlockLayout(64, 0, 1, 8))
        mover.start_loads([load_job(2, 10), load_job(0, 3, "b")])
        self.assertEqual(self.finish(mover), {"a", "b"})
        self.assertEqual((mover.take_failed_blocks(), mover.take_failed_loads()), (set(), {"a"}))
        self.assertEqual((mover.take_failed_requests(), mover.take_failed_loads()), ({"a"}, set()))

    def test_a_load_that_fails_in_any_way_ends(self):
        for error in (errors.Unavailable("crumbd is away"), RuntimeError("a CUDA error")):
            transfer = FakeTransfer()
            transfer.load_error = error
            mover = self.make(transfer)
            with self.assertLogs("crumb.vllm", logging.WARNING):
                mover.start_loads([load_job(0, 2)])
                self.assertEqual(self.finish(mover), {"a"})
            self.assertEqual(mover.take_failed_blocks(), set(range(100, 108)))
            self.assertEqual(mover.take_moved().failed_pages, 2)

    def test_the_time_of_a_load_is_the_devices_and_does_not_count_steps_in_front_of_it(self):
        transfer = FakeTransfer()
        streams = FakeStreams(transfer.calls, took=1000.0)
        mover = self.make(transfer, streams)
        mover.start_loads([load_job(0, 2)])
        self.finish(mover)
        self.assertEqual(transfer.calls, [("begin", "mark"), ("enqueue", 22), "end", ("wait",),
                                          "close"])
        seconds = mover.take_moved().load_seconds
        self.assertTrue(1000.0 <= seconds < 1030.0, seconds)

    def test_an_idle_engine_waits_for_a_load_that_is_under_way(self):
        transfer = FakeTransfer()
        streams = FakeStreams(transfer.calls)
        mover = self.make(transfer, streams)
        mover.wait_for_load(SECONDS)  # there is none
        streams.may_load.clear()
        mover.start_loads([load_job(0, 2)])
        mover.wait_for_load(0.001)
        self.assertEqual(mover.take_finished(), set())
        threading.Timer(0.05, streams.may_load.set).start()
        while not (finished := mover.take_finished()):
            mover.wait_for_load(SECONDS)
        self.assertEqual(finished, {"a"})
        mover.start_loads([load_job(0, 2, "b")])
        mover._loading["b"].result(SECONDS)
        mover.wait_for_load(SECONDS)  # it has ended already

    def loaded_by_layer(self, mover):
        """The requests whose loads by layer have ended, once there are some."""
        mover._loader.submit(lambda: None).result(SECONDS)
        return mover.take_loaded_by_layer()

    def test_a_step_goes_on_with_a_layer_while_the_next_ones_are_loaded(self):
        transfer = FakeTransfer()
        transfer.may_write = threading.Semaphore(0)
        mover = self.make(transfer)
        mover.wait_for_layer(0)  # a step without loads
        mover.start_layer_loads([load_job(0, 2)])
        for layer in range(transfer.layers - 1):
            transfer.may_write.release()
            mover.wait_for_layer(layer)
            # The load waits for the next release, and has not ended.
            self.assertEqual(transfer.calls, [("layers", i, i + 1) for i in range(layer + 1)])
            self.assertEqual(mover.take_loaded_by_layer(), set())
        transfer.may_write.release()
        mover.wait_for_layers()
        self.assertEqual(self.loaded_by_layer(mover), {"a"})
        self.assertEqual(mover.take_moved().loaded_pages, 2)
        self.assertEqual(mover.take_finished(), set())  # the engine did not give it up meanwhile

    def test_on_a_device_the_stream_of_the_step_waits_for_each_layer(self):
        transfer = FakeTransfer()
        mover = self.make(transfer, FakeStreams(transfer.calls))
        mover.start_layer_loads([load_job(0, 2), load_job(0, 3, "b")])
        self.assertEqual(self.loaded_by_layer(mover), {"a", "b"})
        self.assertEqual(transfer.calls[0], ("begin", "mark"))
        self.assertEqual([call for call in transfer.calls if call[0] == "enqueue"],
                         [("enqueue", 22, i, i + 1) for i in range(4) for _ in range(2)])
        transfer.calls.clear()
        mover.wait_for_layer(0)
        mover.wait_for_layer(2)
        mover.wait_for_layers()
        mover.wait_for_layers()  # the next step has no loads
        self.assertEqual(transfer.calls, [("wait for", f"load {i}") for i in (1, 3, 4)])

    def test_a_step_over_pages_that_did_not_arrive_stores_nothing_of_the_request(self):
        for error, loadable in ((errors.Unavailable("crumbd is away"), 0), (None, 1)):
            transfer = FakeTransfer()
            transfer.load_error, transfer.loadable = error, loadable
            mover = self.make(transfer)
            with contextlib.ExitStack() as logs:
                if error is not None:
                    logs.enter_context(self.assertLogs("crumb.vllm", logging.ERROR))
                mover.start_layer_loads([load_job(0, 2)])
                mover.wait_for_layer(3)
                mover.wait_for_layers()
            self.assertEqual(mover.take_failed_blocks(), set(range(100 + 4 * loadable, 108)))
            self.assertEqual(mover.take_failed_requests(), {"a"})
            for stored in ((), (), ("a",)):  # the second step was scheduled before the failure
                transfer.stores.clear()
                mover.store([store_job(0, 1), store_job(0, 1, "b")])
                self.assertEqual(len(transfer.stores), 1 + len(stored))


if __name__ == "__main__":
    unittest.main()
