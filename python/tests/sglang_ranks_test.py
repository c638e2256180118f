# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""CrumbLinker in two ranks of tensor parallelism: processes with a KV head each, joined by gloo.

Needs the package sglang; tests/engines/install_sglang.sh installs it.
"""

import os
import pathlib
import sys
import traceback
import unittest
from unittest import mock

import crumb
import sglang_support as one
import support

torch = support.installed("torch")
PAGE, TOKENS = one.PAGE, one.TOKENS[:5 * one.PAGE + 1]
RANKS = 2


def run_rank(rank, folder):
    """One rank stores and loads; the other does the same at the same time."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank,
                                   world_size=RANKS)
    group = distributed.group.WORLD
    one.publish_configuration()
    options = dict(history="bf16", weights="ranks", heads=1, group=group)
    writer = one.Engine(folder, 10 + rank, **options)
    written = writer.rows(writer.compute(TOKENS[:5 * PAGE]))
    assert writer.finish_offloads() == 1
    torch.save(written, f"{folder}/rows-{rank}")
    distributed.barrier()

    reader = one.Engine(folder, 20 + rank, **options)
    req, result = reader.match(TOKENS)
    assert result.host_hit_length == 5 * PAGE, result
    # One rank cannot load: then no rank does.
    refused = mock.patch.object(reader.linker._transfer, "load",
                                side_effect=crumb.Unavailable("made up"))
    with refused if rank == 1 else mock.patch.dict({}):
        assert reader.load_back(req, result) == 0
    assert reader.step(req) == []
    assert reader.allocator.available_size() == one.SLOTS
    assert torch.equal(reader.rows(reader.load(TOKENS)), written)

    # Pages that a process stores after a flush are found by all of its ranks.
    writer.cache.reset()
    writer.allocator.clear()
    writer.compute(TOKENS[:5 * PAGE])
    assert writer.finish_offloads() == 1
    distributed.barrier()
    writer.evict()
    assert len(writer.load(TOKENS)) == 5 * PAGE
    for engine in (writer, reader):
        engine.linker.close()
    distributed.destroy_process_group()


@unittest.skipIf(one.sglang is None, "needs sglang")
class SglangRanksTest(support.CrumbdTest):
    def test_two_ranks_load_together_or_not_at_all(self):
        children = []
        for rank in range(RANKS):
            child = os.fork()  # before this process has a client
            if child == 0:
                status = 1
                try:
                    run_rank(rank, self.folder)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        self.assertEqual([os.waitpid(child, 0)[1] for child in children], [0] * RANKS)

        # A single rank with all heads loads the pages that the two have stored.
        one.publish_configuration()
        whole = one.Engine(self.folder, 30, history="bf16", weights="ranks")
        self.addCleanup(whole.linker.close)
        expected = torch.cat([torch.load(pathlib.Path(self.folder) / f"rows-{rank}")
                              for rank in range(RANKS)], 2)
        self.assertTrue(torch.equal(whole.rows(whole.load(TOKENS)), expected))


if __name__ == "__main__":
    unittest.main()
