#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Real crumbds of several versions, side by side: those that can work together do, the others are
left out by name, and no other node is harmed.

    upgrade_test.py CRUMBD CRUMB CLUSTER_LOAD OTHER_CRUMBD WALL_CLOCK
"""

import shutil
import signal
import sys
import unittest

from crumbd_group import Group, wait_for

PROGRAMS = []


def supported(versions):
    """Node i supports versions[i]: (wire_min, wire_max, layout), and (frames_min, frames_max) of UCX."""
    return lambda i: ([PROGRAMS[3]], [str(number) for number in versions[i]])


class UpgradeTest(unittest.TestCase):
    def group(self, versions, etcd, **more):
        group = Group(PROGRAMS, len(versions), etcd, supported(versions), **more)
        self.addCleanup(group.close)
        return group

    def refused(self, group, i, text, count):
        """Node i leaves `count` others out for the reason `text`: checks crumb nodes, counter and log."""
        def listed():
            refused = [why for why in group.nodes(i)["refused"] if text in why]
            return len(refused) == count
        wait_for(f"node {i} refuses {count}: {text}", listed)
        self.assertEqual(group.metric(i, "crumb_nodes_refused_total"), count)
        self.assertEqual(group.log(i).count(text), count, group.log(i))

    def check_wire_versions(self, etcd):
        group = self.group([(1, 1, 1), (1, 2, 1), (2, 2, 1)], etcd)
        for i in range(3):
            group.start(i)
        for i, others in enumerate((1, 2, 1)):
            group.sees(i, others)
        self.refused(group, 0, "supports wire versions 2 to 2, this node 1 to 1", 1)
        self.refused(group, 2, "supports wire versions 1 to 1, this node 2 to 2", 1)
        self.refused(group, 1, "supports wire versions", 0)
        first = 100
        for writer, reader in ((0, 1), (1, 0), (1, 2), (2, 1)):
            # Their views differ: pages at a node at which the reader's view does not place them
            # are misses.
            group.shares(writer, reader, first, sequences=24, pages=8, least=0.4)
            first += 100
        # Both others learn the keyspaces that the one in the middle knows.
        keyspace = group.call(1, "status")["keyspaces"][0]["keyspace"]
        group.call(1, "drop", keyspace, "--yes")
        for i in (0, 2):
            wait_for(f"node {i} learns of the drop", lambda i=i: group.call(
                i, "status")["keyspaces"][0]["generation"] == 2)
        # The upgrade is finished: the old one comes back as a new one.
        group.end(0)
        group.words = supported([(2, 2, 1), (1, 2, 1), (2, 2, 1)])
        group.start(0)
        for i in range(3):
            group.sees(i, 2)
            wait_for(f"node {i} refuses none", lambda i=i: not group.nodes(i)["refused"])
        group.shares(0, 2, first)

    def test_wire_versions_with_etcd(self):
        self.check_wire_versions(etcd=True)

    def test_wire_versions_with_a_list(self):
        self.check_wire_versions(etcd=False)

    def test_versions_of_frames(self):
        """Builds of two releases of the transport: the one between supports both."""
        group = self.group([(1, 1, 1, 1, 1), (1, 1, 1, 1, 2), (1, 1, 1, 2, 2)], etcd=True,
                           extra="transport:\n  listen: 127.0.0.1:0\n")
        for i in range(3):
            group.start(i)
        for i in range(3):
            group.sees(i, 2)
            self.assertEqual({node["transport"] for node in group.nodes(i)["nodes"]
                              if not node["self"]}, {"ucx"})
        first = 100
        for writer, reader in ((0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)):
            group.shares(writer, reader, first, sequences=24, pages=8)
            first += 100
        # Those that have no version in common say so, and send each other bytes by gRPC: no bytes
        # of one are taken for something else (shares would have failed), and calls do not fail.
        for i, theirs, own in ((0, "2 to 2", "1 to 1"), (2, "1 to 1", "2 to 2")):
            wait_for(f"node {i} counts it", lambda i=i: group.metric(
                i, "crumb_transport_version_mismatches_total") > 0)
            self.assertIn(f"peer supports versions {theirs} of the transport, this node {own}",
                          group.log(i))
        self.assertEqual(group.metric(1, "crumb_transport_version_mismatches_total"), 0)
        for i in range(3):
            self.assertEqual(group.metric(i, "crumb_transport_frames_refused_total"), 0)
        # The upgrade is finished: the old one comes back as a new one.
        group.end(0)
        group.words = supported([(1, 1, 1, 1, 2), (1, 1, 1, 1, 2), (1, 1, 1, 2, 2)])
        group.start(0)
        for i in range(3):
            group.sees(i, 2)
        group.shares(0, 2, first)
        group.shares(2, 0, first + 100)

    def test_another_page_layout(self):
        group = self.group([(1, 1, 1), (1, 1, 1), (1, 1, 2)], etcd=True)
        for i in range(3):
            group.start(i)
        for i, others in enumerate((1, 1, 0)):
            group.sees(i, others)
        self.refused(group, 0, "keeps page tiles of layout 2, this node of layout 1", 1)
        self.refused(group, 2, "keeps page tiles of layout 1, this node of layout 2", 2)
        group.shares(0, 1, 100)
        group.work(2, "write", 100, 8, 40)
        self.assertEqual(group.work(2, "read", 100, 8, 40)["right"], 320)  # alone

    def test_a_second_node_with_the_same_id(self):
        group = self.group([(1, 1, 1)] * 3, etcd=True)
        group.start(0)
        group.start(1)
        first = group.id_of(1)
        group.sees(0, 1)
        # A copy of node 1's folder, while it runs elsewhere.
        group.end(1)
        shutil.copytree(group.home(1) / "ssd", group.home(2) / "ssd")
        group.start(1)
        group.sees(0, 1)
        group.start(2)
        trouble = wait_for("the second knows", lambda: group.nodes(2)["trouble"])
        self.assertIn(f"registered with this node's id {first}", trouble)
        self.assertIn("give it a new one", group.log(2))
        self.assertEqual(group.metric(2, 'crumb_etcd_state{state="refused"}'), 1)
        group.shares(0, 1, 100)
        # Neither its going nor its dying takes the first one along.
        for how in (signal.SIGTERM, signal.SIGKILL):
            group.end(2, how)
            nodes = {node["address"]: node["id"] for node in group.nodes(0)["nodes"]}
            self.assertIn(first, nodes.values())
            group.shares(0, 1, 200 if how == signal.SIGTERM else 300)
            self.assertEqual(group.nodes(1)["trouble"], "")
            if how == signal.SIGTERM:
                group.start(2)
        group.sees(0, 1)


if __name__ == "__main__":
    PROGRAMS = sys.argv[1:6]
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[6:]])
