# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that the tests of this folder start: crumbd, workers and monitors."""

import json
import pathlib
import signal
import subprocess
import sys
import threading
import urllib.request

START_SECONDS = 30
WORKER_SECONDS = 120
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/cluster"))
from crumbd_group import free_ports, wait_for  # noqa: E402,F401 pylint: disable=wrong-import-position,unused-import
MODEL = ROOT / "models/data/tiny-lm"


def http(url, timeout=10):
    with urllib.request.urlopen(url, timeout=timeout) as response:
        return response.read().decode("utf-8")


def make_certificates(folder, name, days=365):
    """An authority ca.pem, and a node's node.pem and node.key for 127.0.0.1 and this DNS name.

    A node's certificate of -1 days ended yesterday; authorities last a day at least.
    """
    folder = pathlib.Path(folder)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]

    def openssl(*arguments):
        done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True,
                              timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    openssl("req", "-x509", *key, "-days", max(days, 1), "-subj", "/CN=test-ca", "-keyout",
            folder / "ca.key", "-out", folder / "ca.pem")
    openssl("req", *key, "-subj", f"/CN={name}", "-keyout", folder / "node.key", "-out",
            folder / "node.csr")
    (folder / "node.ext").write_text(f"subjectAltName=DNS:{name},IP:127.0.0.1\n")
    openssl("x509", "-req", "-in", folder / "node.csr", "-CA", folder / "ca.pem", "-CAkey",
            folder / "ca.key", "-CAcreateserial", "-days", days, "-extfile", folder / "node.ext",
            "-out", folder / "node.pem")


class Process:
    """A child process that writes to a log file and that only this object ends."""

    def __init__(self, command, log, **options):
        self.log = pathlib.Path(log)
        with self.log.open("ab") as out:
            self.child = subprocess.Popen([str(c) for c in command], stdout=out, stderr=out,
                                          **options)

    def alive(self):
        return self.child.poll() is None

    def tail(self):
        return self.log.read_text(errors="replace")[-3000:]

    def stop(self, how=signal.SIGTERM):
        if not self.alive():
            return self.child.returncode
        self.child.send_signal(how)
        try:
            return self.child.wait(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return self.child.wait()


class Crumbd:
    """A crumbd with sockets and SSD tier in `folder`."""

    def __init__(self, binaries, folder, host_bytes="64MiB", tcp="", extra="", listen="",
                 slab_bytes="2MiB", ssd_bytes="256MiB"):
        self.binary = pathlib.Path(binaries) / "crumbd"
        self.folder = pathlib.Path(folder)
        self.process = None
        self.endpoints = {}
        (self.folder / "crumbd.yaml").write_text(
            f"listen:\n  socket_dir: {self.folder}\n  tcp: \"{tcp}\"\n{listen}"
            "admin:\n  listen: 127.0.0.1:0\n  history_interval: 1s\n"
            f"store:\n  host:\n    bytes_max: {host_bytes}\n    slab_bytes: {slab_bytes}\n"
            f"  ssd:\n    path: {self.folder}/ssd\n    bytes_max: {ssd_bytes}\n{extra}",
            encoding="utf-8")

    def start(self, prefix=(), **options):
        endpoints = self.folder / "crumbd.endpoints.json"
        endpoints.unlink(missing_ok=True)
        self.process = Process([*prefix, self.binary, "--config", self.folder / "crumbd.yaml"],
                               self.folder / "crumbd.log", **options)

        def ready():
            assert self.process.alive(), f"crumbd ended:\n{self.process.tail()}"
            return endpoints.exists()

        wait_for("crumbd's endpoints", ready)
        self.endpoints = json.loads(endpoints.read_text(encoding="utf-8"))

    def get(self, path):
        return http(f"http://{self.endpoints['admin']}{path}")

    def stop(self, how=signal.SIGTERM):
        return self.process.stop(how) if self.process else 0


def prompt_of(number, characters=4000):
    """A different text for each number, of words that the model knows best."""
    documents = "".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").glob("*.md")))
    start = number * 1500 % max(1, len(documents) - characters)
    return f"# {number}\n" + documents[start:start + characters]


def run_worker(binaries, socket_dir, prompt, *options, prefix=(), model=MODEL, **run_options):
    """Runs one crumb-tiny-lm with this prompt and returns its report."""
    done = subprocess.run(
        [*map(str, prefix), str(pathlib.Path(binaries) / "crumb-tiny-lm"), "--model", str(model),
         "--prompt-file", "-", "--store", str(socket_dir), "--generate", "1", "--json", *options],
        input=prompt, capture_output=True, text=True, timeout=WORKER_SECONDS, check=False,
        **run_options)
    assert done.returncode == 0, f"worker failed: {done.stderr}"
    return json.loads(done.stdout)


class Load:
    """Runs workers one after the other, with repeating prompts, until it is stopped."""

    def __init__(self, binaries, socket_dir, prompts):
        self.binaries = binaries
        self.socket_dir = socket_dir
        self.prompts = prompts
        self.reports = []
        self.error = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            while not self.stopping.is_set():
                number = self.prompts[len(self.reports) % len(self.prompts)]
                self.reports.append(
                    run_worker(self.binaries, self.socket_dir, prompt_of(number)))
        except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as problem:
            self.error = problem

    def stop(self):
        self.stopping.set()
        self.thread.join()
        if self.error is not None:
            raise self.error
