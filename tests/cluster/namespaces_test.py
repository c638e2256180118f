#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumbds and an etcd, each in a network namespace of its own: delay, loss, a partition, kills and
an etcd that is gone, while workers on other nodes write and read all the time. Nothing wrong is
served, no request takes much longer than its deadline, a dead node costs its own share and nothing
more, and hits come back. Prints what it saw.

    namespaces_test.py CRUMBD CRUMB CLUSTER_LOAD [--nodes N]
    namespaces_test.py CRUMBD CRUMB CLUSTER_LOAD --measure

The second form tests nothing: it measures how fast a remote prefix of 200 pages of 1 MiB arrives at
a node that has just joined, beside what UCX TCP moves over the same link in the same run. It needs
namespaces, crumb-fragment-server beside CRUMBD and remote_prefix beside CLUSTER_LOAD.

Where namespaces are not permitted the processes run at loopback addresses, without the partition.
Loss needs netem and is left out, by name, where the kernel has none; the delay is then a relay's,
through which the gRPC ports pass, in a cluster whose pages travel as gRPC bytes: UCX tells its
peers addresses of its own and so cannot be relayed.
"""

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

LOOKUP_MS = 400
WAIT_MS = 1000


def run(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, text=True)


class Net:
    """One namespace a member, joined by a bridge in one more; or loopback addresses."""

    def __init__(self, members, tag):
        self.tag = f"crumb{os.getpid()}{tag}"
        self.members = members
        self.free = {}
        self.real = self._try()

    def _try(self):
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            return False
        hub = self.tag + "hub"
        try:
            run("ip", "netns", "add", hub)
            run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", hub, "link", "set", "br0", "up")
            for i in range(self.members):
                name = self.name(i)
                run("ip", "netns", "add", name)
                run("ip", "-n", hub, "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0",
                    "netns", name)
                run("ip", "-n", hub, "link", "set", f"v{i}", "master", "br0", "up")
                run("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
            return True
        except subprocess.CalledProcessError as error:
            print("no namespaces:", error.stderr.strip())
            self.close()
            return False

    def name(self, i):
        return f"{self.tag}n{i}"

    def address(self, i):
        return f"10.77.0.{i + 1}" if self.real else "127.0.0.1"

    def ports(self, i, usual):
        """Ports of member i; on loopback, where all share an address, free ones."""
        if self.real:
            return usual
        if i not in self.free:
            sockets = [socket.socket() for _ in usual]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            self.free[i] = tuple(each.getsockname()[1] for each in sockets)
            for each in sockets:
                each.close()
        return self.free[i]

    def prefix(self, i):
        return ["ip", "netns", "exec", self.name(i)] if self.real else []

    def has_netem(self):
        probe = run("ip", "netns", "exec", self.name(0), "tc", "qdisc", "replace", "dev", "lo",
                    "root", "netem", "delay", "0ms", check=False)
        if probe.returncode != 0:
            print("this kernel has no netem: skipped 1 % loss, and 50 ms over UCX")
        return probe.returncode == 0

    def netem(self, i, *rule):
        run("ip", "netns", "exec", self.name(i), "tc", "qdisc", "replace", "dev", "eth0", "root",
            "netem", *rule)

    def calm(self, i):
        run("ip", "netns", "exec", self.name(i), "tc", "qdisc", "del", "dev", "eth0", "root",
            check=False)

    def cut(self, i, up):
        run("ip", "-n", self.tag + "hub", "link", "set", f"v{i}", "up" if up else "down")

    def close(self):
        for name in [self.name(i) for i in range(self.members)] + [self.tag + "hub"]:
            run("ip", "netns", "del", name, check=False)


class Cluster:
    """`relayed`: every node is called through a relay of its own, pages travel as gRPC bytes."""

    def __init__(self, programs, nodes, folder, replicas=1, relayed=False,
                 room_mib=64, lookup_ms=LOOKUP_MS):
        self.room_mib, self.lookup_ms = room_mib, lookup_ms
        self.crumbd, self.crumb, self.load = programs
        self.nodes, self.folder, self.replicas, self.relayed = nodes, folder, replicas, relayed
        folder.mkdir()
        self.net = Net(nodes + 1, "r" if relayed else "")  # the last one is etcd's
        self.processes = {}
        self.relays = []
        (folder / "secret").write_text("a secret of the namespaces test")
        for i in range(nodes):
            self.write_config(i)

    def write_config(self, i):
        home = self.folder / str(i)
        home.mkdir()
        here, etcd = self.net.address(i), self.net.address(self.nodes)
        grpc, ucx, relay = self.net.ports(i, (7070, 7071, 7072))
        etcd_port, _ = self.net.ports(self.nodes, (2379, 2380))
        (home / "crumbd.yaml").write_text(
            f"listen:\n  socket_dir: {home}\n  tcp: {here}:{grpc}\nadmin:\n  listen: \"\"\n"
            f"store:\n  host:\n    bytes_max: {self.room_mib}MiB\n"
            f"    slab_bytes: {self.room_mib // 4}MiB\n"
            f"  ssd:\n    path: {home}/ssd\n    bytes_max: {2 * self.room_mib}MiB\n"
            "log:\n  severity: warning\n"
            f"cluster:\n  secret_file: {self.folder}/secret\n  etcd: [\"{etcd}:{etcd_port}\"]\n"
            f"  host: host-{i}\n  node_ttl: 4s\n  rpc_deadline: 1s\n  start_deadline: 2s\n"
            f"  lookup_deadline: {self.lookup_ms}ms\n  breaker_open: 500ms\n"
            f"  replicas: {self.replicas}\n"
            + (f"  advertise: {here}:{relay}\n" if self.relayed
               else f"transport:\n  listen: {here}:{ucx}\n"))

    def start_relay(self, i):
        here = self.net.address(i)
        grpc, _, relay = self.net.ports(i, (7070, 7071, 7072))
        process = subprocess.Popen(
            [*self.net.prefix(i), sys.executable,
             str(pathlib.Path(__file__).with_name("delaying_relay.py")), f"{here}:{relay}",
             f"{here}:{grpc}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True)
        self.processes[f"relay {i}"] = process
        self.relays.append(process)
        if process.stdout.readline() != "ready\n":
            sys.exit(f"the relay of node {i} does not start")

    def delay(self, milliseconds):
        """Holds all that is said to a node, and its answers, back by so much each way."""
        for relay in self.relays:
            relay.stdin.write(f"{milliseconds}\n")
            relay.stdin.flush()
            relay.stdout.readline()

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
        deadline = time.monotonic() + 20
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
        for i in members if self.relayed else []:
            self.start_relay(i)
        for i in members:
            self.start(i)
        for i in members:
            self.wait_ready(i)

    def ask(self, i, *words):
        out = run(self.crumb, "--socket-dir", str(self.folder / str(i)), "--json", *words)
        return json.loads(out.stdout)

    def wait_whole(self):
        """Until every node has all nodes in its view."""
        deadline = time.monotonic() + 30
        for i in range(self.nodes):
            while len(self.ask(i, "nodes")["nodes"]) < self.nodes:
                if time.monotonic() > deadline:
                    sys.exit(f"in 30 s node {i} did not see all: {self.ask(i, 'nodes')}")
                time.sleep(0.05)

    def id_of(self, i):
        return next(node["id"] for node in self.ask(i, "nodes")["nodes"] if node["self"])

    def homes_that_hold(self, i, key):
        """What `crumb where` says of a page, once every home of its run holds it."""
        deadline = time.monotonic() + 20
        while True:
            place = self.ask(i, "where", key)
            if set(place["homes"]) <= set(place["holders"]):
                return place
            if time.monotonic() > deadline:
                sys.exit(f"in 20 s its homes did not fetch page {key} (were pushes dropped?): "
                         f"{place}")
            time.sleep(0.05)

    def work(self, i, what, first, sequences, pages, wait_ms=WAIT_MS):
        out = subprocess.run([self.load, str(self.folder / str(i)), what, str(first),
                              str(sequences), str(pages), str(wait_ms)], capture_output=True,
                             text=True, timeout=60)
        if out.returncode != 0:
            sys.exit(f"the worker of node {i} failed: {out.stdout}{out.stderr}")
        return json.loads(out.stdout.splitlines()[-1])

    def close(self):
        for key in list(self.processes):
            self.kill(key)
        if self.net.real:
            self.net.close()


class Load:
    """Workers that go on during every phase: a writer of node 0 and readers of what it wrote."""

    def __init__(self, cluster, readers, first=100_000):
        progress = str(cluster.folder / "progress")
        self.workers = []
        for i, what in [(0, "write")] + [(reader, "read") for reader in readers]:
            self.workers.append((f"{what}s at node {i}", subprocess.Popen(
                [cluster.load, str(cluster.folder / str(i)), what, str(first), "20", "40",
                 str(WAIT_MS), progress], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True)))

    def phase(self, check, name):
        """Prints and checks what they saw since the last phase."""
        for who, worker in self.workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
            if not line:
                sys.exit(f"{name}: the worker that {who} is gone")
            check.load(f"{name}: {who}", json.loads(line))

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
        self.that(share >= least, f"{name}: hit share {share:.2f}, at least {least}")
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
        # The deadline of the lookup, and what a busy machine takes for the rest.
        self.that(result["slowest_ms"] < LOOKUP_MS + 600, f"{name}: longer than its deadline")


def until_hits(cluster, i, first, sequences, pages, share, most=10):
    """Reads until enough hit: what homes fetch in the background takes its time."""
    deadline = time.monotonic() + most
    while True:
        result = cluster.work(i, "read", first, sequences, pages)
        if result["right"] >= share * result["pages"] or time.monotonic() > deadline:
            return result
        time.sleep(0.1)


def key_of(sequence, page):
    return hashlib.sha256(f"sequence {sequence} page {page}".encode()).hexdigest()


def kill_one(cluster, check, first, name):
    """Kills the last node, and reads at node 1 before the view changes: the runs that no other
    home, of this view or the one before, holds miss, and no others."""
    runs, killed = 48, cluster.nodes - 1
    cluster.wait_whole()
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
          f"one asked that held them; {len(missed)} missed")
    check.that(missed == lost, f"{name}: runs {missed} missed, {lost} had only the dead node")
    check.that(0 < len(at) < runs, f"{name}: the dead node was home of nothing or everything")
    if cluster.replicas > 1:
        check.that(not missed, f"{name}: a run missed although it had two homes")


def scenario(cluster, check):
    sequences, pages, n = 12, 40, cluster.nodes
    cluster.start_all(range(n - 1))
    cluster.work(0, "write", 700, sequences, pages)
    for i in range(700, 700 + sequences):
        cluster.homes_that_hold(0, key_of(i, 31))
        cluster.homes_that_hold(0, key_of(i, pages - 1))
    cluster.start(n - 1)
    cluster.wait_ready(n - 1)
    check.read("read on a node that joined", cluster.work(n - 1, "read", 700, sequences, pages), 1)
    cluster.work(0, "write", 0, sequences, pages)
    check.read("read on another node", until_hits(cluster, 1, 0, sequences, pages, 1), 1)
    alone = cluster.work(1, "read", 5000, 100, 200, wait_ms=0)["median_ms"]
    asked = cluster.work(1, "read", 5000, 100, 200)["median_ms"]
    print(f"a miss of 200 pages: {alone:.2f} ms here alone, {asked:.2f} ms everywhere (medians)")
    load = Load(cluster, range(1, n - 1))
    try:
        faults(cluster, check, load, sequences, pages)
    finally:
        load.close()


def faults(cluster, check, load, sequences, pages):
    n = cluster.nodes
    if cluster.net.real and cluster.net.has_netem():
        for i in range(n):
            cluster.net.netem(i, "loss", "1%")
        cluster.work(0, "write", 100, sequences, pages)
        check.read("1 % loss", until_hits(cluster, 1, 100, sequences, pages, 0.9), 0.9)
        load.phase(check, "1 % loss")
        for i in range(n):
            cluster.net.netem(i, "delay", "50ms")
        cluster.work(0, "write", 200, sequences, pages)
        check.read("50 ms each way", until_hits(cluster, 1, 200, sequences, pages, 0.9), 0.9)
        load.phase(check, "50 ms each way")
        for i in range(n):
            cluster.net.calm(i)
    if cluster.net.real:
        cluster.net.cut(n - 1, up=False)
        check.read("partition, one side", cluster.work(1, "read", 0, sequences, pages), 0.9)
        check.read("partition, the other", cluster.work(n - 1, "read", 0, sequences, pages), 0)
        load.phase(check, "partition")
        cluster.net.cut(n - 1, up=True)
        check.read("partition over",
                   until_hits(cluster, n - 1, 0, sequences, pages, 0.9, most=15), 0.9)
        load.phase(check, "partition over")
    cluster.wait_whole()
    cluster.kill("etcd")
    cluster.work(0, "write", 300, sequences, pages)
    check.read("etcd gone", until_hits(cluster, 1, 300, sequences, pages, 0.9), 0.9)
    load.phase(check, "etcd gone")
    cluster.start_etcd()
    kill_one(cluster, check, 1000, "a node killed")
    load.phase(check, "a node killed")
    cluster.start(n - 1)
    cluster.wait_ready(n - 1)
    check.read("it is back", until_hits(cluster, 1, 1000, 48, 32, 0.9, most=15), 0.9)
    load.phase(check, "it is back")


def slow_and_doubled(cluster, check):
    """Two homes a run, and gRPC through relays that hold every byte back."""
    cluster.start_all(range(cluster.nodes))
    load = Load(cluster, range(1, cluster.nodes - 1))
    try:
        cluster.work(0, "write", 0, 12, 40)
        check.read("pages as gRPC bytes", until_hits(cluster, 1, 0, 12, 40, 1), 1)
        load.phase(check, "pages as gRPC bytes")
        cluster.delay(50)
        cluster.work(0, "write", 100, 12, 40)
        check.read("50 ms each way, relayed", until_hits(cluster, 1, 100, 12, 40, 0.9), 0.9)
        load.phase(check, "50 ms each way")
        cluster.delay(0)
        kill_one(cluster, check, 1000, "a node killed, two homes a run")
        load.phase(check, "a node killed")
    finally:
        load.close()


def measure(cluster, programs):
    """Nodes 0 and 2 hold three prefixes; node 1 joins and reads them, each once."""
    if not cluster.net.real:
        sys.exit("--measure needs network namespaces")
    prefixes, pages, last = 3, 200, cluster.nodes - 1
    tool = str(pathlib.Path(programs[2]).with_name("remote_prefix"))
    server = str(pathlib.Path(programs[0]).with_name("crumb-fragment-server"))
    cluster.start_all((0, last))
    out = run(tool, "write", str(cluster.folder / "0"), str(prefixes), str(pages))
    for key in out.stdout.split():
        cluster.homes_that_hold(0, key)
    deadline = time.monotonic() + 20
    file = cluster.folder / "fragments"
    cluster.spawn("fragments", 0, [server, str(1 << 20), str(pages), str(file),
                                   cluster.net.address(0)], cluster.folder / "fragments.log")
    while not file.exists():
        if time.monotonic() > deadline or cluster.processes["fragments"].poll() is not None:
            sys.exit((cluster.folder / "fragments.log").read_text() + "no fragment server")
        time.sleep(0.05)
    plain = []
    for in_flight in (1, 8, 32):
        out = run(*cluster.net.prefix(1), tool, "ucx", file.read_text().strip(),
                  cluster.net.address(1), str(in_flight), str(pages))
        plain.append(json.loads(out.stdout)["gb_per_s"])
        print(f"UCX TCP, {in_flight:2} fetches of 1 MiB at a time: {plain[-1]:.2f} GB/s")
    cluster.kill("fragments")
    cluster.start(1)
    cluster.wait_ready(1)
    out = run(tool, "read", str(cluster.folder / "1"), str(prefixes), str(pages))
    rates = json.loads(out.stdout)["gb_per_s"]
    print(f"remote prefixes of {pages} pages, one after another:",
          ", ".join(f"{rate:.2f}" for rate in rates), "GB/s")
    print(f"median prefix by best UCX TCP: {sorted(rates)[len(rates) // 2] / max(plain):.0%}")


def run_cluster(cluster, check, what):
    where = "in namespaces" if cluster.net.real else "on loopback, skipped the partition"
    print(f"{cluster.nodes} nodes {where}, {cluster.replicas} homes a run, pages by "
          f"{'gRPC through relays' if cluster.relayed else 'UCX'}")
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
            cluster = Cluster(programs, 3, folder / "measure", room_mib=1024, lookup_ms=20_000)
            try:
                measure(cluster, programs)
            except subprocess.CalledProcessError as error:
                sys.exit(f"{error.cmd} failed: {error.stderr}")
            finally:
                cluster.close()
            return 0
        run_cluster(Cluster(programs, arguments.nodes, folder / "ucx"), check, scenario)
        run_cluster(Cluster(programs, arguments.nodes, folder / "relayed", replicas=2,
                            relayed=True), check, slow_and_doubled)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("all held" if check.failed == 0 else f"{check.failed} failed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
