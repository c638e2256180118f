# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Some real crumbds of one cluster on loopback, with an etcd or a static list."""

import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request

WAIT_SECONDS = 60


def free_ports(count):
    """Below those that outgoing connections take: a node may start much later."""
    ports = []
    while len(ports) < count:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as place:
            try:
                place.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports


def wait_for(what, condition, seconds=WAIT_SECONDS):
    """Returns the first true result of `condition`; fails naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.05)


class Group:
    """`words(i)`: the command that starts node i, before its configuration file, and behind it;
    `extra`: text for every configuration; `more(i)`: for that of node i."""

    def __init__(self, programs, count, etcd, words, environment=None, extra="", cluster=""):
        self.crumbd, self.crumb, self.load = programs[:3]
        self.words, self.environment, self.etcd = words, environment, etcd
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="crumb-group-"))
        self.processes = {}
        (self.folder / "secret").write_text("a secret of a test")
        ports = free_ports(2 * count + 2)
        self.etcd_ports, self.admin = ports[:2], ports[2 + count:]
        addresses = [f"127.0.0.1:{port}" for port in ports[2:2 + count]]
        where = (f'etcd: ["127.0.0.1:{ports[0]}"]' if etcd else f"nodes: {json.dumps(addresses)}")
        for i in range(count):
            home = self.home(i)
            home.mkdir()
            (home / "crumbd.yaml").write_text(
                f"listen:\n  socket_dir: {home}\n  tcp: {addresses[i]}\n{extra}"
                f"admin:\n  listen: 127.0.0.1:{self.admin[i]}\n"
                "store:\n  host:\n    bytes_max: 32MiB\n    slab_bytes: 16MiB\n"
                f"  ssd:\n    path: {home}/ssd\n    bytes_max: 64MiB\n"
                f"cluster:\n  secret_file: {self.folder}/secret\n  {where}\n  host: host-{i}\n"
                "  node_ttl: 3s\n  heartbeat: 100ms\n  rpc_deadline: 2s\n  start_deadline: 10s\n"
                f"  lookup_deadline: 5s\n{cluster}")
        if etcd:
            client, peer = (f"http://127.0.0.1:{port}" for port in self.etcd_ports)
            self.spawn("etcd", ["etcd", "--data-dir", str(self.folder / "etcd"),
                                "--listen-client-urls", client, "--advertise-client-urls", client,
                                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                                "--initial-cluster", f"default={peer}"])

    def home(self, i):
        return self.folder / str(i)

    def spawn(self, key, words, environment=None):
        with open(self.folder / f"{key}.log", "ab") as out:
            self.processes[key] = subprocess.Popen(
                words, stdout=out, stderr=out, env={**os.environ, **(environment or {})})

    def log(self, key):
        return (self.folder / f"{key}.log").read_text(errors="replace")

    def start(self, i):
        ready = self.home(i) / "crumbd.endpoints.json"
        ready.unlink(missing_ok=True)
        before, behind = self.words(i)
        self.spawn(i, [*before, str(self.home(i) / "crumbd.yaml"), *behind],
                   self.environment(i) if self.environment else None)

        def is_ready():
            if self.processes[i].poll() is not None:
                raise AssertionError(f"node {i} ended: {self.log(i)}")
            return ready.exists()

        wait_for(f"node {i}", is_ready)

    def end(self, key, how=signal.SIGTERM):
        process = self.processes.pop(key)
        process.send_signal(how)
        process.wait(timeout=WAIT_SECONDS)

    def call(self, i, *words):
        out = subprocess.run([self.crumb, "--socket-dir", str(self.home(i)), "--json",
                              "--timeout", str(WAIT_SECONDS), *words],
                             capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
        assert out.returncode == 0, out.stderr
        return json.loads(out.stdout)

    def nodes(self, i):
        return self.call(i, "nodes")

    def id_of(self, i):
        return next(node["id"] for node in self.nodes(i)["nodes"] if node["self"])

    def sees(self, i, others):
        """Waits until node i has as many neighbours."""
        wait_for(f"node {i} has {others} neighbours",
                 lambda: len(self.nodes(i)["nodes"]) == others + 1)

    def metric(self, i, series):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin[i]}/metrics",
                                    timeout=WAIT_SECONDS) as response:
            for line in response.read().decode().splitlines():
                if line.startswith(series + " "):
                    return float(line.split()[-1])
        raise AssertionError(f"no series {series}")

    def work(self, i, what, first, sequences, pages, wait_ms=10_000):
        out = subprocess.run([self.load, str(self.home(i)), what, str(first), str(sequences),
                              str(pages), str(wait_ms)], capture_output=True, text=True,
                             timeout=120, check=False)
        assert out.returncode == 0, out.stdout + out.stderr
        result = json.loads(out.stdout.splitlines()[-1])
        assert result["wrong"] == 0 and result["errors"] == 0, result
        return result

    def shares(self, writer, reader, first, sequences=8, pages=40, least=1):
        """Waits until a fraction `least` of the pages that `writer` commits are hits at `reader`."""
        result = self.work(writer, "write", first, sequences, pages)
        assert result["right"] == result["pages"], result
        wait_for(f"node {reader} hits what node {writer} wrote", lambda: self.work(
            reader, "read", first, sequences, pages)["right"] >= least * sequences * pages)

    def close(self):
        for key in list(self.processes):
            process = self.processes.pop(key)
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
