#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumbds and an etcd, each in a network namespace of its own: delay, loss, a partition, kills and
an etcd that is gone, while workers on other nodes write and read all the time. Nothing wrong is
served, no request takes much longer than its deadline, a dead node costs its own share and nothing
more, and hits come back. Prints its measurements.

    namespaces_test.py CRUMBD CRUMB CLUSTER_LOAD [--nodes N]
    namespaces_test.py CRUMBD CRUMB CLUSTER_LOAD --measure

The second form tests nothing: it measures how fast a remote prefix of 200 pages of 1 MiB arrives at
a node that has just joined, beside the rate of UCX TCP over the same link in the same run. The node
that reads has one core and the others another, as nodes of different hosts do. It needs namespaces,
two cores, crumb-fragment-server beside CRUMBD and remote_prefix beside CLUSTER_LOAD.

Delay and loss are netem's, or frame_switch's beside CLUSTER_LOAD where the kernel has no netem: it
joins the namespaces by TAP devices. Where there are neither, or namespaces are not permitted and the
processes run at loopback addresses, phases that cannot run are left out and named.
"""

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from crumbd_group import free_ports

LOOKUP_MS = 400
# A worker would wait no longer: a request that takes so long has missed its deadline by far, and a
# busy machine keeps none waiting for half of it.
WAIT_MS = 16_000
PATIENCE_S = 60  # limit of work in the background
SEED = 20_26
# Names of links, delay each way in milliseconds, share of packets lost.
LONG_LINKS = [("1 % loss", 0, 0.01), ("50 ms each way", 50, 0), ("50 ms each way, 1 % loss", 50, 0.01)]


def run(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, text=True)


class Net:
    """One namespace a member; or loopback addresses. `switch`, the program, joins them where the
    kernel has no netem; without it, or without TAP devices, a bridge does."""

    def __init__(self, members, tag, switch=None):
        self.tag = f"crumb{os.getpid()}{tag}"
        self.members = members
        self.cores = {}  # cores of members; other members run on any
        self.free = {}
        self.switch = None
        self.netem = False
        self.real = self._try(switch)

    def _try(self, switch):
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            return False
        try:
            for name in [self.tag + "hub", *map(self.name, range(self.members))]:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            self.netem = self._has_netem()
            if switch is None or self.netem or not os.path.exists("/dev/net/tun"):
                self._join_by_bridge()
            else:
                self._join_by_switch(switch)
            for i in range(self.members):
                run("ip", "-n", self.name(i), "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
                run("ip", "-n", self.name(i), "link", "set", "eth0", "up")
            return True
        except subprocess.CalledProcessError as error:
            print("no namespaces:", error.stderr.strip())
            self.close()
            return False

    def _has_netem(self):
        return run("ip", "netns", "exec", self.tag + "hub", "tc", "qdisc", "replace", "dev", "lo",
                   "root", "netem", "delay", "0ms", check=False).returncode == 0

    def _join_by_bridge(self):
        hub = self.tag + "hub"
        run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "br0", "up")
        for i in range(self.members):
            run("ip", "-n", hub, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0",
                "netns", self.name(i))
            run("ip", "-n", hub, "link", "set", f"v{i}", "master", "br0", "up")

    def _join_by_switch(self, program):
        self.switch = subprocess.Popen(
            ["ip", "netns", "exec", self.tag + "hub", program, str(self.members), str(SEED)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.switch.stdout.readline() != "ready\n":
            sys.exit("frame_switch does not start")
        for i in range(self.members):
            run("ip", "-n", self.tag + "hub", "link", "set", f"tap{i}", "netns", self.name(i))
            run("ip", "-n", self.name(i), "link", "set", f"tap{i}", "name", "eth0", "address",
                f"02:00:00:00:00:{i + 1:02x}", "txqueuelen", "8192")

    def rule(self, *words):
        """Sends a rule to the switch; returns the counts of all frames so far."""
        self.switch.stdin.write(" ".join(map(str, words)) + "\n")
        self.switch.stdin.flush()
        return json.loads(self.switch.stdout.readline())

    def name(self, i):
        return f"{self.tag}n{i}"

    def address(self, i):
        return f"10.77.0.{i + 1}" if self.real else "127.0.0.1"

    def ports(self, i, usual):
        """Ports of member i; on loopback, where all share an address, free ones."""
        if self.real:
            return usual
        if i not in self.free:
            self.free[i] = free_ports(len(usual))
        return self.free[i]

    def prefix(self, i):
        space = ["ip", "netns", "exec", self.name(i)] if self.real else []
        return space + (["taskset", "-c", str(self.cores[i])] if i in self.cores else [])

    def shapes(self):
        return self.real and (self.netem or self.switch is not None)

    def shape(self, delay_ms, loss):
        """Delays every packet that leaves a member and drops a fraction. Returns how many were
        lost so far, or None if that is not known."""
        if self.switch:
            self.rule("delay", delay_ms)
            return self.rule("loss", loss)["lost"]
        for name in map(self.name, range(self.members)):
            # Without segmentation offload: a packet that is lost is one of the link's MTU.
            run("ip", "-n", name, "link", "set", "eth0", "gso_max_segs", "1")
            run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root",
                "netem", "limit", "16384", "delay", f"{delay_ms}ms", "loss", f"{loss:.3%}")
        return None

    def cut(self, i, up):
        if self.switch:
            self.rule("join" if up else "cut", i)
        else:
            run("ip", "-n", self.tag + "hub", "link", "set", f"v{i}", "up" if up else "down")

    def close(self):
        if self.switch:
            self.switch.stdin.close()
            self.switch.wait()
        for name in [self.name(i) for i in range(self.members)] + [self.tag + "hub"]:
            run("ip", "netns", "del", name, check=False)


class Cluster:
    """Without `ucx` pages travel as gRPC bytes. Unless `shaped` links are as fast as can be."""

    def __init__(self, programs, nodes, folder, replicas=1, ucx=True, shaped=True,
                 room_mib=64, lookup_ms=LOOKUP_MS):
        self.room_mib, self.lookup_ms = room_mib, lookup_ms
        self.crumbd, self.crumb, self.load = programs
        self.nodes, self.folder, self.replicas, self.ucx = nodes, folder, replicas, ucx
        folder.mkdir()
        switch = str(pathlib.Path(self.load).with_name("frame_switch")) if shaped else None
        self.net = Net(nodes + 1, "u" if ucx else "g", switch)  # the last one is etcd's
        self.processes = {}
        (folder / "secret").write_text("a secret of the namespaces test")
        for i in range(nodes):
            self.write_config(i)

    def write_config(self, i):
        home = self.folder / str(i)
        home.mkdir()
        here, etcd = self.net.address(i), self.net.address(self.nodes)
        grpc, ucx = self.net.ports(i, (7070, 7071))
        etcd_port, _ = self.net.ports(self.nodes, (2379, 2380))
        (home / "crumbd.yaml").write_text(
            f"listen:\n  socket_dir: {home}\n  tcp: {here}:{grpc}\nadmin:\n  listen: \"\"\n"
            f"store:\n  host:\n    bytes_max: {self.room_mib}MiB\n"
            f"    slab_bytes: {self.room_mib // 4}MiB\n"
            f"  ssd:\n    path: {home}/ssd\n    bytes_max: {8 * self.room_mib}MiB\n"
            "log:\n  severity: warning\n"
            f"cluster:\n  secret_file: {self.folder}/secret\n  etcd: [\"{etcd}:{etcd_port}\"]\n"
            f"  host: host-{i}\n  node_ttl: 4s\n  rpc_deadline: 1s\n  start_deadline: 2s\n"
            f"  lookup_deadline: {self.lookup_ms}ms\n  breaker_open: 500ms\n"
            f"  replicas: {self.replicas}\n"
            + (f"transport:\n  listen: {here}:{ucx}\n" if self.ucx else ""))

    def spawn(self, key, i, words, log):
        with open(log, "ab") as out:
            self.processes[key] = subprocess.Popen([*self.net.prefix(i), *words], stdout=out,
                                                   stderr=out)

    def start_etcd(self):
        here = self.net.address(self.nodes)
        client, peer = self.net.ports(self.nodes, (2379, 2380))
        self.spawn("etcd", self.nodes, [
            "etcd", "--data-dir", str(self.folder / "etcd"),
            "--listen-client-urls", f"http://{here}:{client}",
            "--advertise-client-urls", f"http://{here}:{client}",
            "--listen-peer-urls", f"http://{here}:{peer}",
            "--initial-advertise-peer-urls", f"http://{here}:{peer}",
            "--initial-cluster", f"default=http://{here}:{peer}"], self.folder / "etcd.log")

    def start(self, i):
        home = self.folder / str(i)
        (home / "crumbd.endpoints.json").unlink(missing_ok=True)
        self.spawn(i, i, [self.crumbd, "--config", str(home / "crumbd.yaml")], home / "log")

    def wait_ready(self, i):
        deadline = time.monotonic() + PATIENCE_S
        while not (self.folder / str(i) / "crumbd.endpoints.json").exists():
            if time.monotonic() > deadline or self.processes[i].poll() is not None:
                sys.exit((self.folder / str(i) / "log").read_text() + f"node {i} does not start")
            time.sleep(0.02)

    def kill(self, key):
        process = self.processes.pop(key)
        process.kill()
        process.wait()

    def start_all(self, members):
        self.start_etcd()
        for i in members:
            self.start(i)
        for i in members:
            self.wait_ready(i)

    def call(self, i, *words):
        out = run(self.crumb, "--socket-dir", str(self.folder / str(i)), "--json", *words)
        return json.loads(out.stdout)

    def id_of(self, i):
        return next(node["id"] for node in self.call(i, "nodes")["nodes"] if node["self"])

    def wait_for_view(self, count):
        """Until the view of each of the first `count` nodes has all of them."""
        deadline = time.monotonic() + PATIENCE_S
        for i in range(count):
            while sum(node["state"] == "active" for node in self.call(i, "nodes")["nodes"]) != count:
                if time.monotonic() > deadline:
                    sys.exit(f"in {PATIENCE_S} s node {i} did not see {count} nodes")
                time.sleep(0.05)

    def homes_that_hold(self, i, key):
        """Returns the output of `crumb where` for a page, once every home of its run holds it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            place = self.call(i, "where", key)
            if set(place["homes"]) <= set(place["holders"]):
                return place
            if time.monotonic() > deadline:
                sys.exit(f"in {PATIENCE_S} s its homes did not fetch page {key} (were pushes dropped?): "
                         f"{place}")
            time.sleep(0.05)

    def work(self, i, what, first, sequences, pages, wait_ms=WAIT_MS):
        out = subprocess.run([self.load, str(self.folder / str(i)), what, str(first),
                              str(sequences), str(pages), str(wait_ms)], capture_output=True,
                             text=True, timeout=180)
        if out.returncode != 0:
            sys.exit(f"the worker of node {i} failed: {out.stdout}{out.stderr}")
        return json.loads(out.stdout.splitlines()[-1])

    def close(self):
        for key in list(self.processes):
            self.kill(key)
        if self.net.real:
            self.net.close()


class Load:
    """Workers that go on during every phase: a writer at node 0 and readers of its pages."""

    def __init__(self, cluster, readers, first=100_000):
        progress = str(cluster.folder / "progress")
        self.workers = []
        for i, what in [(0, "write")] + [(reader, "read") for reader in readers]:
            self.workers.append((f"{what}s at node {i}", subprocess.Popen(
                [cluster.load, str(cluster.folder / str(i)), what, str(first), "20", "20",
                 str(WAIT_MS), progress], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True)))

    def phase(self, check, name):
        """Prints and checks the workers' results since the last phase: at least one request."""
        for who, worker in self.workers:
            deadline = time.monotonic() + PATIENCE_S
            result = {"requests": 0, "errors": 0, "wrong": 0}
            while not (result["requests"] or result["errors"] or result["wrong"] or
                       time.monotonic() > deadline):
                time.sleep(0.02)
                worker.stdin.write("\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
                if not line:
                    sys.exit(f"{name}: the worker that {who} is gone")
                result = json.loads(line)
            check.load(f"{name}: {who}", result)

    def close(self):
        for _, worker in self.workers:
            worker.kill()
            worker.wait()


class Check:
    def __init__(self):
        self.failed = 0

    def that(self, holds, what):
        if not holds:
            self.failed += 1
            print("FAILED:", what)

    def read(self, name, result, least):
        share = result["right"] / result["pages"]
        print(f"{name:34} {share:6.1%} hit, {result['remote']:4} pages from others, "
              f"slowest {result['slowest_ms']:6.1f} ms, wrong {result['wrong']}")
        self.that(result["wrong"] == 0, f"{name}: wrong bytes")
        self.that(result["errors"] == 0, f"{name}: failed calls")
        self.that(share >= least - 1e-9, f"{name}: hit share {share:.2f}, at least {least}")
        self.in_time(name, result)

    def load(self, name, result):
        share = result["right"] / max(1, result["pages"])
        done = "stored" if " writes" in name else "hit"
        print(f"  {name:38} {result['requests']:5} requests, {share:6.1%} {done}, "
              f"slowest {result['slowest_ms']:6.1f} ms, errors {result['errors']}, "
              f"wrong {result['wrong']}")
        self.that(result["wrong"] == 0, f"{name}: wrong bytes")
        self.that(result["errors"] == 0, f"{name}: failed calls")
        self.that(result["requests"] > 0, f"{name}: no requests")
        self.in_time(name, result)

    def in_time(self, name, result):
        self.that(result["slowest_ms"] < WAIT_MS / 2, f"{name}: longer than its deadline")


def until_hits(cluster, i, first, sequences, pages, share, most=PATIENCE_S):
    """Reads until enough pages hit: homes fetch them in the background, which takes time."""
    deadline = time.monotonic() + most
    while True:
        result = cluster.work(i, "read", first, sequences, pages)
        if result["right"] >= share * result["pages"] or time.monotonic() > deadline:
            return result
        time.sleep(0.1)


def until(read, holds):
    """Reads until the result is right, or patience ends; returns the last result."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds(result := read()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result


def key_of(sequence, page):
    return hashlib.sha256(f"sequence {sequence} page {page}".encode()).hexdigest()


def tools(cluster, check, first):
    """`crumb lookup`, `prefetch` and `get` at node 1 of pages that node 0's worker wrote."""
    sequences, pages = 6, 40
    cluster.work(0, "write", first, sequences, pages)
    others = {cluster.id_of(i) for i in range(cluster.nodes) if i != 1}
    keys = {i: [key_of(i, page) for page in range(pages)]
            for i in range(first, first + sequences)}
    remote = 0
    for i, prefix in keys.items():
        cluster.homes_that_hold(0, prefix[31])
        keyspace = cluster.homes_that_hold(0, prefix[-1])["keyspace"]
        rows = until(lambda: cluster.call(1, "lookup", keyspace, *prefix)["rows"],
                     lambda rows: all(row["tier"] != "miss" for row in rows))
        check.that(all(row["tier"] != "miss" for row in rows), f"lookup of {i}: {rows}")
        at = [row["node"] for row in rows if row["tier"] == "remote"]
        check.that(set(at) <= others, f"lookup of {i} names {set(at)}, not of {others}")
        remote += len(at)
    check.that(remote > 0, "lookup found nothing on other nodes")
    # A page in the middle, whose run the caller does not know.
    for i in (0, 1):
        cluster.call(i, "get", keyspace, keys[first][35], "--out", str(cluster.folder / f"page{i}"))
    check.that((cluster.folder / "page0").read_bytes() == (cluster.folder / "page1").read_bytes(),
               "get read other bytes on another node")
    for i, prefix in keys.items():
        cluster.call(1, "prefetch", keyspace, *prefix)
        rows = until(lambda: cluster.call(1, "lookup", keyspace, *prefix)["rows"],
                     lambda rows: all(row["tier"] == "host" for row in rows))
        check.that(all(row["tier"] == "host" for row in rows), f"prefetch of {i}: {rows}")
    print(f"crumb lookup named other nodes for {remote} of {sequences * pages} pages, get and "
          "prefetch brought them")


def kill_one(cluster, check, first, name):
    """Kills the last node, and reads at node 1 before the view changes: the runs that no other
    home, of this view or the one before, holds miss, and no others."""
    runs, killed = 48, cluster.nodes - 1
    cluster.wait_for_view(cluster.nodes)
    dead = cluster.id_of(killed)
    written = cluster.work(0, "write", first, runs, 32)
    check.that(written["right"] == written["pages"], f"{name}: not all was written")
    places = [cluster.homes_that_hold(0, key_of(first + i, 31)) for i in range(runs)]
    check.that(all(len(place["homes"]) == cluster.replicas for place in places),
               f"{name}: {cluster.replicas} homes a run")
    at = [i for i in range(runs) if dead in places[i]["homes"]]
    lost = [i for i in range(runs) if
            {*places[i]["homes"], *places[i]["previous_homes"]} & {*places[i]["holders"]} == {dead}]
    cluster.kill(killed)
    result = cluster.work(1, "read", first, runs, 32)
    missed = [i for i in range(runs) if result["hits"][i] < 32]
    check.read(name, result, 1 - len(lost) / runs)
    print(f"  of {runs} runs the dead node was a home of {len(at)}, and of {len(lost)} the only "
          f"one queried that held them; {len(missed)} missed")
    check.that(missed == lost, f"{name}: runs {missed} missed, {lost} had only the dead node")
    check.that(0 < len(at) < runs, f"{name}: the dead node was home of nothing or everything")
    if cluster.replicas > 1:
        check.that(not missed, f"{name}: a run missed although it had two homes")


def scenario(cluster, check):
    sequences, pages, n = 12, 40, cluster.nodes
    cluster.start_all(range(n - 1))
    cluster.wait_for_view(n - 1)
    cluster.work(0, "write", 700, sequences, pages)
    for i in range(700, 700 + sequences):
        cluster.homes_that_hold(0, key_of(i, 31))
        cluster.homes_that_hold(0, key_of(i, pages - 1))
    cluster.start(n - 1)
    cluster.wait_ready(n - 1)
    check.read("read on a node that joined",
               until_hits(cluster, n - 1, 700, sequences, pages, 1), 1)
    cluster.wait_for_view(n)
    cluster.work(0, "write", 0, sequences, pages)
    check.read("read on another node", until_hits(cluster, 1, 0, sequences, pages, 1), 1)
    alone = cluster.work(1, "read", 5000, 100, 200, wait_ms=0)["median_ms"]
    everywhere = cluster.work(1, "read", 5000, 100, 200)["median_ms"]
    print(f"a miss of 200 pages: {alone:.2f} ms here alone, {everywhere:.2f} ms everywhere (medians)")
    tools(cluster, check, 800)
    load = Load(cluster, range(1, n - 1))
    try:
        faults(cluster, check, load, sequences, pages)
    finally:
        load.close()


def slowest_miss(cluster, sequence, least_ms):
    """Reads at node 1 pages that no node has, until one read took so long: reads whose first
    run has no home but node 1 end at once, and a node whose breaker is open is not queried."""
    deadline = time.monotonic() + PATIENCE_S
    slowest = 0
    while slowest <= least_ms and time.monotonic() < deadline:
        slowest = max(slowest, cluster.work(1, "read", sequence, 3, 40)["slowest_ms"])
        sequence += 3
    return slowest


def long_links(cluster, check, load, links):
    """Writes at node 0 and reads at node 1 while packets take long and get lost."""
    if not cluster.net.shapes():
        return print("links cannot be made long here: skipped", ", ".join(each[0] for each in links))
    for number, (name, delay_ms, loss) in enumerate(links):
        first = 10_000 + 100 * number
        before = cluster.net.shape(delay_ms, loss)
        cluster.work(0, "write", first, 6, 40)
        check.read(name, until_hits(cluster, 1, first, 6, 40, 0.9), 0.9)
        slowest = slowest_miss(cluster, 1_000_000 + first, 2 * delay_ms)
        print(f"  a miss everywhere: slowest {slowest:.1f} ms")
        check.that(slowest >= 2 * delay_ms, f"{name}: no node was queried over the long link")
        load.phase(check, name)
        after = cluster.net.shape(0, 0)
        if before is not None:
            print(f"  {after - before} packets lost")
            check.that((after > before) == (loss > 0), f"{name}: {after - before} packets lost")


def faults(cluster, check, load, sequences, pages):
    n = cluster.nodes
    long_links(cluster, check, load, LONG_LINKS)
    if cluster.net.real:
        cluster.net.cut(n - 1, up=False)
        check.read("partition, one side", cluster.work(1, "read", 0, sequences, pages), 0.9)
        check.read("partition, the other", cluster.work(n - 1, "read", 0, sequences, pages), 0)
        load.phase(check, "partition")
        cluster.net.cut(n - 1, up=True)
        check.read("partition over",
                   until_hits(cluster, n - 1, 0, sequences, pages, 0.9), 0.9)
        load.phase(check, "partition over")
    cluster.wait_for_view(n)
    cluster.kill("etcd")
    cluster.work(0, "write", 300, sequences, pages)
    check.read("etcd gone", until_hits(cluster, 1, 300, sequences, pages, 0.9), 0.9)
    load.phase(check, "etcd gone")
    cluster.start_etcd()
    kill_one(cluster, check, 1000, "a node killed")
    load.phase(check, "a node killed")
    cluster.start(n - 1)
    cluster.wait_ready(n - 1)
    check.read("it is back", until_hits(cluster, 1, 1000, 48, 32, 0.9), 0.9)
    load.phase(check, "it is back")


def doubled(cluster, check):
    """Two homes a run, pages as gRPC bytes."""
    cluster.start_all(range(cluster.nodes))
    cluster.wait_for_view(cluster.nodes)
    load = Load(cluster, range(1, cluster.nodes - 1))
    try:
        cluster.work(0, "write", 0, 12, 40)
        check.read("pages as gRPC bytes", until_hits(cluster, 1, 0, 12, 40, 1), 1)
        load.phase(check, "pages as gRPC bytes")
        long_links(cluster, check, load, LONG_LINKS[-1:])
        kill_one(cluster, check, 1000, "a node killed, two homes a run")
        load.phase(check, "a node killed")
    finally:
        load.close()


def measure(cluster, programs):
    """Nodes 0 and 2 hold prefixes; node 1 joins and reads them, each once. Before each, bare UCX TCP
    over the same link, since the machine may be busier at one time than at another. The host of a
    virtual machine may move its cores between caches that they share and ones that they do not,
    which changes the rates by half: a round in which that happened does not count."""
    cores = sorted(os.sched_getaffinity(0))
    if not cluster.net.real or len(cores) < 2:
        sys.exit("--measure needs network namespaces and two cores")
    cluster.net.cores = {i: cores[i == 1] for i in range(cluster.nodes)}
    rounds, pages, last = 7, 200, cluster.nodes - 1
    tool = str(pathlib.Path(programs[2]).with_name("remote_prefix"))
    server = str(pathlib.Path(programs[0]).with_name("crumb-fragment-server"))
    cluster.start_all((0, last))
    out = run(tool, "write", str(cluster.folder / "0"), str(rounds), str(pages))
    keys = out.stdout.split()
    homes = [cluster.homes_that_hold(0, key)["homes"] for key in keys]
    file = cluster.folder / "fragments"
    cluster.spawn("fragments", 0, [server, str(1 << 20), str(pages), str(file),
                                   cluster.net.address(0)], cluster.folder / "fragments.log")
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists():
        if time.monotonic() > deadline or cluster.processes["fragments"].poll() is not None:
            sys.exit((cluster.folder / "fragments.log").read_text() + "no fragment server")
        time.sleep(0.05)
    cluster.start(1)
    cluster.wait_ready(1)
    read_json = lambda *words: json.loads(run(*words).stdout)
    distance = lambda: read_json(tool, "cores", *map(str, cores[:2]))["ns"]
    other = cluster.id_of(last)
    shares = []
    for prefix in range(rounds):
        before = distance()
        plain = [read_json(*cluster.net.prefix(1), tool, "ucx", file.read_text().strip(),
                     cluster.net.address(1), str(in_flight), str(pages))["gb_per_s"]
                 for in_flight in (1, 8)]
        read = read_json(tool, "read", str(cluster.folder / "1"), str(prefix), str(pages))["gb_per_s"]
        after = distance()
        moved = max(before, after) > 2 * min(before, after)
        if not moved:
            shares.append(read / max(plain))
        runs = len(keys) // rounds
        there = sum(other in each for each in homes[prefix * runs:(prefix + 1) * runs])
        print(f"UCX TCP, 1 and 8 fetches of 1 MiB at a time: {plain[0]:.2f}, {plain[1]:.2f} GB/s; "
              f"a remote prefix of {pages} pages: {read:.2f} GB/s, {read / max(plain):.0%}; "
              f"{there} of {runs} runs at the one node, the rest at the other; "
              f"cores {before:.0f} ns apart, then {after:.0f}{': not counted' if moved else ''}")
    if not shares:
        sys.exit("the cores moved in every round")
    print(f"prefix by the better UCX TCP of its round: median {sorted(shares)[len(shares) // 2]:.0%}, "
          f"least {min(shares):.0%}, of {len(shares)} rounds")


def run_cluster(cluster, check, what):
    where = ("on loopback, skipped the partition" if not cluster.net.real else
             "in namespaces that frame_switch joins" if cluster.net.switch else "in namespaces")
    print(f"{cluster.nodes} nodes {where}, {cluster.replicas} homes a run, pages by "
          f"{'UCX' if cluster.ucx else 'gRPC'}")
    try:
        what(cluster, check)
    finally:
        cluster.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("crumbd")
    parser.add_argument("crumb")
    parser.add_argument("load")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="crumb-ns-"))
    programs = (arguments.crumbd, arguments.crumb, arguments.load)
    check = Check()
    try:
        if arguments.measure:
            cluster = Cluster(programs, 3, folder / "measure", shaped=False, room_mib=1792,
                              lookup_ms=20_000)
            try:
                measure(cluster, programs)
            except subprocess.CalledProcessError as error:
                sys.exit(f"{error.cmd} failed: {error.stderr}")
            finally:
                cluster.close()
            return 0
        run_cluster(Cluster(programs, arguments.nodes, folder / "ucx"), check, scenario)
        run_cluster(Cluster(programs, arguments.nodes, folder / "grpc", replicas=2,
                            ucx=False), check, doubled)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("all held" if check.failed == 0 else f"{check.failed} failed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
