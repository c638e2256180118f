#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Real crumbds whose wall clocks differ by hours, and one whose clock is moved: tokens are judged by
the local clock, and nothing else cares.

    clocks_test.py CRUMBD CRUMB CLUSTER_LOAD OTHER_CRUMBD WALL_CLOCK
"""

import datetime
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
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
        """The wall clock of node i: the time of its last log line."""
        stamp = group.log(i).splitlines()[-1].split()[0]
        return datetime.datetime.fromisoformat(stamp)

    def moved(self, group, offset):
        """Whether node 0 says that its clock is `offset` off; a session makes it say something."""
        group.work(0, "read", 100, 1, 1)
        ahead = self.now_of(group, 0) - datetime.datetime.utcnow()
        return abs(ahead - datetime.timedelta(seconds=offset)) < datetime.timedelta(hours=1)

    def watch(self, group, i):
        """Returns a function that reads the known pages of a router that follows node i from now on."""
        router = subprocess.Popen([group.load, str(group.home(i)), "watch", "0", "0", "0", "0"],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def end():
            router.stdin.close()
            router.wait(timeout=60)
            router.stdout.close()

        def counts():
            router.stdin.write("\n")
            router.stdin.flush()
            known = json.loads(router.stdout.readline())
            self.assertEqual((known["disorder"], known["lost"], known["ended"]), (0, 0, False), known)
            return known

        self.addCleanup(end)
        wait_for(f"a snapshot of node {i}", lambda: counts()["snapshot"])
        return lambda: counts()["pages"]

    def check_group(self, etcd):
        group = self.group(etcd)
        for i in range(3):
            group.start(i)
        for i in range(3):
            group.sees(i, 2)
        known = [self.watch(group, i) for i in range(3)]
        apart = self.now_of(group, 0) - self.now_of(group, 2)
        self.assertGreater(apart, datetime.timedelta(hours=11))
        group.shares(0, 2, 100)
        group.shares(2, 0, 200)
        group.shares(1, 2, 300)
        # Three times node_ttl: no node's time is up.
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
        # A router's view of a node has the node's pages, whatever its clock did.
        for i in range(3):
            wait_for(f"the router of node {i} knows its pages", lambda i=i: known[i]()
                     == group.metric(i, 'crumb_resident_pages{tier="host"}') > 0)
        # The newest generation counts, not the latest clock.
        keyspace = group.call(2, "status")["keyspaces"][0]["keyspace"]
        group.call(2, "drop", keyspace, "--yes")
        for i in range(3):
            wait_for(f"node {i} learns of the drop", lambda i=i: group.call(
                i, "status")["keyspaces"][0]["generation"] == 2)
            self.assertEqual(group.work(i, "read", 100, 8, 40)["right"], 0)
            wait_for(f"the router of node {i} learns of the drop", lambda i=i: known[i]() == 0)
        group.shares(2, 0, 600)
        wait_for("the router of node 0 learns of the new pages", lambda: known[0]() >= 320)
        # A node that dies leaves after its time, whatever its clock was.
        group.end(0, signal.SIGKILL)
        for i in (1, 2):
            group.sees(i, 1)
        group.shares(1, 2, 700)

    def certificates(self, folder):
        """An authority and a node's certificate, valid since half a day."""
        past = folder / "past"
        past.write_text(str(-12 * HOUR))
        environment = {**os.environ, "LD_PRELOAD": os.path.abspath(PROGRAMS[4]),
                       "CRUMB_TEST_WALL_CLOCK": str(past)}
        key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
        (folder / "names").write_text("subjectAltName=DNS:crumbd.test,IP:127.0.0.1")
        for line in (
                f"req -x509 {key} -days 3 -subj /CN=ca -keyout ca.key -out ca.pem",
                f"req {key} -subj /CN=node -keyout node.key -out node.csr",
                "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 3 "
                "-out node.pem -extfile names"):
            subprocess.run(["openssl", *line.split()], cwd=folder, env=environment, check=True,
                           capture_output=True, timeout=60)

    def test_tokens_end_by_the_local_clock(self):
        token = "the-token-of-a-test"
        folder = pathlib.Path(tempfile.mkdtemp(prefix="crumb-clocks-"))
        self.addCleanup(shutil.rmtree, folder, True)
        self.certificates(folder)
        ends = datetime.datetime.utcnow() + datetime.timedelta(hours=3)
        (folder / "tenants.json").write_text(json.dumps({"tenants": [{
            "name": "a", "token_sha256": hashlib.sha256(token.encode()).hexdigest(),
            "expires": ends.strftime("%Y-%m-%dT%H:%M:%SZ")}]}))
        (folder / "tenants.json").chmod(0o600)
        (folder / "token").write_text(token)
        group = self.group(True, extra=(
            f"  tls:\n    cert_file: {folder}/node.pem\n    key_file: {folder}/node.key\n"
            f"    client_ca_file: {folder}/ca.pem\n    peer_name: crumbd.test\n"
            f"tenants:\n  file: {folder}/tenants.json\n"))
        for i in range(3):
            group.start(i)

        def ends_as(i, text):
            """Whether a call with the token ends so at node i; "": well."""
            done = subprocess.run([group.crumb, "--address", f"unix:{group.home(i)}/crumbd.sock",
                                   "--token-file", str(folder / "token"), "status"],
                                  capture_output=True, text=True, timeout=60, check=False)
            return text in done.stderr if text else done.returncode == 0

        def expired(i):
            return group.metric(i, 'crumb_unauthenticated_total{reason="expired"}')

        # Six hours ahead it has ended; where the clock is right or behind it has not.
        for i, text in enumerate(("tenant 'a' has expired", "", "")):
            self.assertTrue(ends_as(i, text), i)
            self.assertEqual(expired(i) > 0, bool(text))
        self.clock(group, 0).write_text("0")
        wait_for("node 0 takes the token", lambda: ends_as(0, ""))
        self.clock(group, 2).write_text(str(6 * HOUR))
        wait_for("node 2 does no more", lambda: ends_as(2, "tenant 'a' has expired"))
        self.assertTrue(ends_as(1, ""))
        # Nodes know each other by certificates, which are good by all three clocks.
        for i in range(3):
            group.sees(i, 2)

    def test_a_cluster_with_etcd(self):
        self.check_group(etcd=True)

    def test_a_cluster_with_a_list(self):
        self.check_group(etcd=False)


if __name__ == "__main__":
    PROGRAMS = sys.argv[1:6]
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[6:]])
