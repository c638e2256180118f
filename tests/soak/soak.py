# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Two crumbds and the workers of three tenants under load, with processes that are killed: see
tests/soak.sh --help. Started by that script."""

import argparse
import hashlib
import json
import os
import pathlib
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "cluster"))
from crumbd_group import free_ports, wait_for  # noqa: E402

NODES = 2
# This node's crumbd is taken over and never killed, so that its leaks add up.
STEADY_NODE = 0
TENANTS = 3
# The load as a fraction of the rate of the slower of disk and network.
LOAD_SHARE = 0.8
# Part of the run before values are compared, and seconds after a restart in which a process's own
# values are not.
WARM_UP_SHARE = 0.2
SETTLE_SECONDS = 20
SAMPLE_SECONDS = 2
# Fewer samples of a value say nothing about it.
SAMPLES_MIN = 10
# A value is flat when the line through its samples changes by no more than this part of its mean
# over the run, or by no more than its floor.
FLAT_SHARE = 0.10
# The samples of each node, with the floor: sessions come and go, memory is given back late, and an
# SSD tier that fills opens an extent for each 64 MiB.
FLOORS = {"memory MiB": 32, "descriptors": 48, "leases": 16, "leased slots": 16,
          "reservations": 64, "staging MiB": 64}
# Tables that grow up to a bound must be full when the warm-up ends. The directory of holders keeps
# pages that their holders have evicted until it is full, and would grow for hours otherwise.
DIRECTORY_PAGES = 16384
METRICS = {"leases": "crumb_leases", "leased slots": "crumb_leased_slots",
           "reservations": "crumb_reservations"}


def disk_rate(folder):
    """MiB/s of synchronous writes into the folder, over a second or 512 MiB."""
    block = secrets.token_bytes(4 << 20)
    path = pathlib.Path(folder) / "rate"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    begin = time.monotonic()
    blocks = 0
    while blocks < 128 and time.monotonic() - begin < 1:
        os.write(file, block)
        os.fdatasync(file)
        blocks += 1
    rate = blocks * 4 / (time.monotonic() - begin)
    os.close(file)
    path.unlink()
    return rate


def network_rate():
    """MiB/s of one TCP connection over loopback, over half a second."""
    listener = socket.create_server(("127.0.0.1", 0))
    received = [0]

    def receive():
        connection = listener.accept()[0]
        while True:
            part = connection.recv(1 << 20)
            if not part:
                return
            received[0] += len(part)

    thread = threading.Thread(target=receive)
    thread.start()
    block = bytes(1 << 20)
    begin = time.monotonic()
    with socket.create_connection(listener.getsockname()) as sender:
        while time.monotonic() - begin < 0.5:
            sender.sendall(block)
    thread.join(10)
    listener.close()
    return received[0] / 1048576 / (time.monotonic() - begin)


def slope(samples):
    """Change a second of (time, value, life) samples: one slope for all lives of a process, each with
    a level of its own, so that a leak that ends with its process shows nevertheless."""
    lives = {}
    for time_, value, life in samples:
        lives.setdefault(life, []).append((time_, value))
    covariance = spread = 0.0
    for life in lives.values():
        mean_time = sum(t for t, _ in life) / len(life)
        mean_value = sum(v for _, v in life) / len(life)
        covariance += sum((t - mean_time) * (v - mean_value) for t, v in life)
        spread += sum((t - mean_time) ** 2 for t, _ in life)
    return covariance / spread if spread > 0 else 0.0


def judge(node, name, samples, begin, seconds):
    """Returns a line of the table, and the complaint about samples behind the warm-up, or None."""
    flat = [s for s in samples if s[0] - begin >= WARM_UP_SHARE * seconds]
    if len(flat) < SAMPLES_MIN:
        return (f"{node:>4} {name:>14} {len(flat):>8}",
                f"{name} of node {node}: {len(flat)} samples are too few to judge")
    if node != STEADY_NODE:  # its lives are short: their first minutes are no trend
        flat = [(t, v, 0) for t, v, _ in flat]
    mean = sum(v for _, v, _ in flat) / len(flat)
    change = slope(flat) * seconds * (1 - WARM_UP_SHARE)
    bound = max(FLAT_SHARE * mean, FLOORS[name])
    line = f"{node:>4} {name:>14} {len(flat):>8} {mean:>10.1f} {change:>+10.1f} {bound:>10.1f}"
    if change > bound:
        return line, f"{name} of node {node} grew by {change:.1f}, {bound:.1f} is allowed"
    return line, None


class Soak:
    def __init__(self, arguments):
        self.arguments = arguments
        if arguments.folder:
            pathlib.Path(arguments.folder).mkdir(parents=True, exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="crumb-soak-", dir=arguments.folder))
        self.random = random.Random(arguments.seed)
        self.crumbds = [None] * NODES
        self.started = [0.0] * NODES
        self.lives = [0] * NODES  # processes that have served as the node's crumbd
        self.workers = {}  # (tenant, node) -> process
        self.lines = {}  # (tenant, node) -> latest totals
        self.done = {}  # (tenant, node) -> totals of its processes that have ended
        self.samples = {}  # (node, name) -> [(time, value, life)]
        self.violations = []
        self.kills = self.takeovers = self.drops = 0
        self.ending = False

    def violation(self, text):
        print("VIOLATION:", text, flush=True)
        self.violations.append(text)

    def home(self, node):
        return self.folder / str(node)

    def prepare(self):
        key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
        (self.folder / "names").write_text("subjectAltName=DNS:crumbd.soak,IP:127.0.0.1")
        for line in (f"req -x509 {key} -days 3 -subj /CN=ca -keyout ca.key -out ca.pem",
                     f"req {key} -subj /CN=node -keyout node.key -out node.csr",
                     "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 3 "
                     "-out node.pem -extfile names"):
            subprocess.run(["openssl", *line.split()], cwd=self.folder, check=True,
                           capture_output=True, timeout=60)
        tenants = []
        for tenant in range(TENANTS):
            token = f"token of tenant {tenant}"
            (self.folder / f"token-{tenant}").write_text(token)
            digest = hashlib.sha256(token.encode()).hexdigest()
            tenants.append({"name": f"tenant-{tenant}", "token_sha256": digest})
        (self.folder / "tenants.json").write_text(json.dumps({"tenants": tenants}))
        (self.folder / "tenants.json").chmod(0o600)
        (self.folder / "secret").write_text("a secret of the soak test")
        ports = free_ports(2 * NODES)
        self.admin = ports[NODES:]
        addresses = [f"127.0.0.1:{port}" for port in ports[:NODES]]
        for node in range(NODES):
            self.home(node).mkdir()
            (self.home(node) / "crumbd.yaml").write_text(
                f"listen:\n  socket_dir: {self.home(node)}\n  tcp: {addresses[node]}\n"
                f"  tls:\n    cert_file: {self.folder}/node.pem\n"
                f"    key_file: {self.folder}/node.key\n"
                f"    client_ca_file: {self.folder}/ca.pem\n    peer_name: crumbd.soak\n"
                f"admin:\n  listen: 127.0.0.1:{self.admin[node]}\n"
                f"tenants:\n  file: {self.folder}/tenants.json\n  shared_memory: own\n"
                f"store:\n  host:\n    bytes_max: {self.arguments.host_mib}MiB\n"
                f"    slab_bytes: {max(self.arguments.host_mib // 16, 1)}MiB\n"
                f"  ssd:\n    path: {self.home(node)}/ssd\n"
                f"    bytes_max: {self.arguments.ssd_mib}MiB\n"
                f"cluster:\n  secret_file: {self.folder}/secret\n"
                f"  directory_pages_max: {DIRECTORY_PAGES}\n"
                f"  nodes: {json.dumps(addresses)}\n  host: host-{node}\n"
                "  node_ttl: 3s\n  heartbeat: 200ms\n  start_deadline: 10s\n")

    def spawn_crumbd(self, node, *flags):
        with open(self.home(node) / "crumbd.log", "ab") as log:
            return subprocess.Popen([self.arguments.crumbd, "--config",
                                     str(self.home(node) / "crumbd.yaml"), *flags],
                                    stderr=log, stdout=log, stdin=subprocess.DEVNULL)

    def serves(self, node, process):
        if process.poll() is not None:
            log = (self.home(node) / "crumbd.log").read_text(errors="replace")[-2000:]
            raise AssertionError(f"crumbd {node} ended with {process.returncode}:\n{log}")
        try:
            url = f"http://127.0.0.1:{self.admin[node]}/readyz"
            with urllib.request.urlopen(url, timeout=2) as response:
                return response.status == 200
        except OSError:
            return False

    def start_crumbd(self, node):
        process = self.spawn_crumbd(node)
        self.crumbds[node] = process
        wait_for(f"crumbd {node} serves", lambda: self.serves(node, process), 60)
        self.started[node] = time.monotonic()
        self.lives[node] += 1

    def start_worker(self, tenant, node):
        with open(self.folder / f"worker-{tenant}-{node}.log", "ab") as log:
            process = subprocess.Popen(
                [self.arguments.worker, str(self.home(node)), str(self.folder / f"token-{tenant}"),
                 str(tenant + 1), str(node), str(NODES), str(self.folder), str(self.pace)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.workers[tenant, node] = process
        threading.Thread(target=self.read_lines, args=(tenant, node, process), daemon=True).start()

    def read_lines(self, tenant, node, process):
        """Reads a worker's output until it ends. Its last line may be incomplete."""
        last = {}
        for line in process.stdout:
            try:
                last = json.loads(line)
            except ValueError:
                continue
            self.lines[tenant, node] = last
        before = self.done.get((tenant, node), {})
        self.done[tenant, node] = {k: before.get(k, 0) + last.get(k, 0)
                                   for k in set(before) | set(last)}
        self.lines[tenant, node] = {}

    def totals(self):
        sums = {}
        for part in [*list(self.lines.values()), *list(self.done.values())]:
            for name, value in part.items():
                sums[name] = sums.get(name, 0) + value
        return sums

    def sample(self, now):
        for node, process in enumerate(self.crumbds):
            if now - self.started[node] < SETTLE_SECONDS * self.scale or process.poll() is not None:
                continue
            try:
                status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                values = {
                    "memory MiB": int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024,
                    "descriptors": len(os.listdir(f"/proc/{process.pid}/fd"))}
                url = f"http://127.0.0.1:{self.admin[node]}/metrics"
                with urllib.request.urlopen(url, timeout=5) as response:
                    text = response.read().decode()
            except (OSError, TypeError):
                continue
            for name, metric in METRICS.items():
                found = re.search(rf"^{metric} (\S+)$", text, re.M)
                if found:
                    values[name] = float(found[1])
            found = re.search(r"^crumb_staging_bytes (\S+)$", text, re.M)
            if found:
                values["staging MiB"] = float(found[1]) / 1048576
            for name, value in values.items():
                self.samples.setdefault((node, name), []).append(
                    (now, value, self.lives[node]))

    def kill_one(self):
        victims = [("crumbd", node) for node in range(NODES) if node != STEADY_NODE]
        victims += list(self.workers)
        victim = self.random.choice(victims)
        self.kills += 1
        if victim[0] == "crumbd":
            node = victim[1]
            self.crumbds[node].kill()
            self.crumbds[node].wait(30)
            self.start_crumbd(node)
            return f"crumbd {node}"
        self.workers[victim].kill()
        self.workers[victim].wait(30)
        self.start_worker(*victim)
        return f"worker {victim[0]} of node {victim[1]}"

    def takeover(self):
        node = self.random.randrange(NODES)
        old = self.crumbds[node]
        successor = self.spawn_crumbd(node, "--takeover")
        old.wait(90)
        self.crumbds[node] = successor
        wait_for(f"crumbd {node} has been taken over", lambda: self.serves(node, successor), 60)
        self.started[node] = time.monotonic()
        self.lives[node] += 1
        self.takeovers += 1
        return f"takeover of crumbd {node}"

    def drop(self):
        worker = self.random.choice(list(self.workers))
        self.workers[worker].stdin.write("drop\n")
        self.workers[worker].stdin.flush()
        self.drops += 1
        return f"drop by worker {worker[0]} of node {worker[1]}"

    def look_after(self):
        """A process that ends by itself is a violation."""
        for node, process in enumerate(self.crumbds):
            if process.poll() is not None:
                self.violation(f"crumbd {node} ended by itself with {process.returncode}")
                self.start_crumbd(node)
        for (tenant, node), process in list(self.workers.items()):
            if process.poll() is not None:
                self.violation(f"worker {tenant} of node {node} ended by itself with "
                               f"{process.returncode}")
                self.start_worker(tenant, node)

    def run(self):
        seconds = self.arguments.hours * 3600
        # In short runs a minute is shorter, so that each kind of event happens.
        minute = min(60.0, seconds / 8)
        self.scale = minute / 60
        hour = min(3600.0, seconds / 2)
        disk, network = disk_rate(self.folder), network_rate()
        wanted = min(LOAD_SHARE * min(disk, network), self.arguments.mib_per_second)
        self.pace = wanted / (TENANTS * NODES)
        print(f"disk {disk:.0f} MiB/s, loopback {network:.0f} MiB/s, "
              f"{wanted:.0f} MiB/s of pages from {TENANTS * NODES} workers", flush=True)
        self.prepare()
        for node in range(NODES):  # each waits for the others no longer than start_deadline
            self.crumbds[node] = self.spawn_crumbd(node)
        for node in range(NODES):
            process = self.crumbds[node]
            wait_for(f"crumbd {node} serves", lambda n=node, p=process: self.serves(n, p), 60)
            self.started[node] = time.monotonic()
        for tenant in range(TENANTS):
            for node in range(NODES):
                self.start_worker(tenant, node)
        begin = time.monotonic()
        events = [(begin + minute, minute, self.kill_one),
                  (begin + hour / 2, hour, self.takeover), (begin + hour * 0.75, hour, self.drop)]
        next_print, before, happened = begin + minute, {}, []
        while time.monotonic() - begin < seconds:
            now = time.monotonic()
            self.look_after()
            self.sample(now)
            for i, (due, period, act) in enumerate(events):
                if now >= due:
                    happened.append(act())
                    events[i] = (due + period, period, act)
            if now >= next_print:
                before = self.print_progress(now - begin, minute, before, happened)
                next_print, happened = next_print + minute, []
            time.sleep(SAMPLE_SECONDS * min(1.0, self.scale * 2))
        self.check(begin, seconds)

    def print_progress(self, passed, minute, before, happened):
        now = self.totals()
        rate = (now.get("bytes", 0) - before.get("bytes", 0)) / 1048576 / minute
        memory = [f"{self.samples[node, 'memory MiB'][-1][1]:.0f}"
                  for node in range(NODES) if self.samples.get((node, "memory MiB"))]
        print(f"{passed / 60:6.1f} min: {rate:.1f} MiB/s published, {now.get('hits', 0)} hits, "
              f"{now.get('misses', 0)} misses, {now.get('refused', 0)} refused, "
              f"{now.get('errors', 0)} errors, {now.get('wrong', 0)} wrong; memory "
              f"{'/'.join(memory)} MiB; {'; '.join(happened) or 'nothing killed'}", flush=True)
        for name, what in (("wrong", "pages with a wrong byte"),
                           ("dropped", "pages served after their drop")):
            if now.get(name, 0) > before.get(name, 0):
                self.violation(f"{now[name] - before.get(name, 0)} {what}")
        return now

    def check(self, begin, seconds):
        self.end_workers()
        totals = self.totals()
        for name, what in (("wrong", "pages with a wrong byte"),
                           ("dropped", "pages served after their drop")):
            if totals.get(name, 0) > 0:
                self.violation(f"{totals[name]} {what} in all")
        if totals.get("drops", 0) == 0:
            self.violation("no drop was acknowledged")
        if totals.get("hits", 0) == 0 or totals.get("published", 0) == 0:
            self.violation("nothing was published, or nothing was hit")
        print(f"\n{'node':>4} {'value':>14} {'samples':>8} {'mean':>10} {'change':>10} "
              f"{'bound':>10}")
        for node, name in [(node, name) for node in range(NODES) for name in FLOORS]:
            samples = self.samples.get((node, name), [])
            line, problem = judge(node, name, samples, begin, seconds)
            print(line)
            if problem is not None:
                self.violation(problem)
        self.check_given_back()
        print(f"\n{totals.get('published', 0)} pages published, {totals.get('hits', 0)} hits with "
              f"every byte right, {totals.get('misses', 0)} misses, {totals.get('errors', 0)} "
              f"calls failed; {self.kills} processes killed, {self.takeovers} takeovers, "
              f"{totals.get('drops', 0)} of {self.drops} drops")

    def end_workers(self):
        self.ending = True
        for process in self.workers.values():
            try:
                process.stdin.write("end\n")
                process.stdin.close()
            except OSError:
                pass
        for process in self.workers.values():
            process.wait(60)

    def check_given_back(self):
        """Without workers crumbd holds nothing for them."""
        for node in range(NODES):
            def left(node=node):
                url = f"http://127.0.0.1:{self.admin[node]}/metrics"
                with urllib.request.urlopen(url, timeout=5) as response:
                    text = response.read().decode()
                return {name: float(found[1]) for name in (
                    "crumb_sessions", "crumb_leases", "crumb_leased_slots", "crumb_reservations",
                    "crumb_staging_bytes")
                    if (found := re.search(rf"^{name} (\S+)$", text, re.M)) and float(found[1])}
            try:
                wait_for("everything is given back", lambda: not left(), 30)
            except AssertionError:
                self.violation(f"node {node} holds without workers: {left()}")

    def close(self):
        for process in [*self.workers.values(), *self.crumbds]:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(30)
        if self.violations:
            print(f"logs are in {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


def interrupt(number, _frame):
    """Ends the run as Ctrl-C does, so that no process of it is left behind."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def main():
    parser = argparse.ArgumentParser(prog="tests/soak.sh", description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--mib-per-second", type=float, default=1e9,
                        help="no more than this, all workers together")
    parser.add_argument("--host-mib", type=int, default=256, help="host memory of a node")
    parser.add_argument("--ssd-mib", type=int, default=2048, help="SSD tier of a node")
    parser.add_argument("--folder", default=None, help="where the nodes' folders go")
    parser.add_argument("--seed", type=int, default=1, help="chooses what is killed")
    parser.add_argument("--crumbd", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--worker", required=True, help=argparse.SUPPRESS)
    for number in (signal.SIGINT, signal.SIGTERM):  # nohup ignores SIGINT otherwise
        signal.signal(number, interrupt)
    soak = Soak(parser.parse_args())
    try:
        soak.run()
    except (AssertionError, KeyboardInterrupt, subprocess.TimeoutExpired) as error:
        soak.violation(f"{type(error).__name__}: {error}")
    finally:
        soak.close()
    print("the soak test passed" if not soak.violations
          else f"the soak test FAILED: {len(soak.violations)} violations")
    sys.exit(1 if soak.violations else 0)


if __name__ == "__main__":
    main()
