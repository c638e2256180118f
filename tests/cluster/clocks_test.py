#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Real crumbds whose wall clocks differ by hours, and one whose clock is moved: tokens are judged by
the local clock, and nothing else cares.

    clocks_test.py CRUMBD CRUMB CLUSTER_LOAD OTHER_CRUMBD WALL_CLOCK
"""

import datetime
import signal
import sys
import time
import unittest

from crumbd_group import Group, wait_for

PROGRAMS = []
HOUR = 3600
OFFSETS = (6 * HOUR, 0, -6 * HOUR)


class ClocksTest(unittest.TestCase):
    def group(self, etcd, **more):
        group = Group(PROGRAMS, 3, etcd, lambda i: ([PROGRAMS[0], "--config"], []),
                      lambda i: {"LD_PRELOAD": PROGRAMS[4],
                                 "CRUMB_TEST_WALL_CLOCK": str(self.clock(group, i))}, **more)
        self.addCleanup(group.close)
        for i, offset in enumerate(OFFSETS):
            self.clock(group, i).write_text(str(offset))
        return group

    @staticmethod
    def clock(group, i):
        return group.folder / f"clock-{i}"

    def now_of(self, group, i):
        """What node i takes for now: the time of its last log line."""
        stamp = group.log(i).splitlines()[-1].split()[0]
        return datetime.datetime.fromisoformat(stamp)

    def moved(self, group, offset):
        """Whether node 0 says that its clock is `offset` off; a session makes it say something."""
        group.work(0, "read", 100, 1, 1)
        ahead = self.now_of(group, 0) - datetime.datetime.utcnow()
        return abs(ahead - datetime.timedelta(seconds=offset)) < datetime.timedelta(hours=1)

    def check_group(self, etcd):
        group = self.group(etcd)
        for i in range(3):
            group.start(i)
        for i in range(3):
            group.sees(i, 2)
        apart = self.now_of(group, 0) - self.now_of(group, 2)
        self.assertGreater(apart, datetime.timedelta(hours=11))
        group.shares(0, 2, 100)
        group.shares(2, 0, 200)
        group.shares(1, 2, 300)
        # Three times node_ttl: nobody's time is up.
        views = [group.metric(i, "crumb_view_changes_total") for i in range(3)]
        until = time.monotonic() + 9
        while time.monotonic() < until:
            self.assertEqual(group.work(2, "read", 100, 8, 40)["right"], 320)
        # A clock that is moved while everything runs.
        for offset in (9 * HOUR, -9 * HOUR):
            self.clock(group, 0).write_text(str(offset))
            wait_for("the clock moved", lambda: self.moved(group, offset))
            group.shares(0, 2, 400 if offset > 0 else 500)
        self.assertEqual(views, [group.metric(i, "crumb_view_changes_total") for i in range(3)])
        # The newest generation counts, not the latest clock.
        keyspace = group.ask(2, "status")["keyspaces"][0]["keyspace"]
        group.ask(2, "drop", keyspace, "--yes")
        for i in range(3):
            wait_for(f"node {i} hears of the drop", lambda i=i: group.ask(
                i, "status")["keyspaces"][0]["generation"] == 2)
            self.assertEqual(group.work(i, "read", 100, 8, 40)["right"], 0)
        group.shares(2, 0, 600)
        # Who dies leaves after its time, whatever its clock was.
        group.end(0, signal.SIGKILL)
        for i in (1, 2):
            group.sees(i, 1)
        group.shares(1, 2, 700)

    def test_a_cluster_with_etcd(self):
        self.check_group(etcd=True)

    def test_a_cluster_with_a_list(self):
        self.check_group(etcd=False)


if __name__ == "__main__":
    PROGRAMS = sys.argv[1:6]
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[6:]])
