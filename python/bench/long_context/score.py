#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Scores the retrieval model over quantized history: score.py MODEL --json FILE

Every method reads the same documents and answers the same questions, each in a sequence of its own
that continues the document:

    bf16           history in BF16, in the worker's pages
    hadamard       INT2 pages, data-free rotation
    oscar, crumb   INT2 pages, rotation files that are made of documents of other seeds
    int4           the method int4-hadamard, attended by torch: workers have no such pages
    torch          no rounding of history, attended by torch
    float32        as `torch`, the model in float32 as well

The device decides which worker has the pages: GpuWorker on cuda, Worker on cpu.
docs/quality/long_context.md describes the tasks and the results.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time
from typing import Any, Dict, Iterator, List, Tuple

import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "bench")]
import questions as ask_about  # noqa: E402
import run_facts  # noqa: E402
import sequences  # noqa: E402
import tasks  # noqa: E402
from model import Decoder, causal_attention, load  # noqa: E402
from train import counts_of  # noqa: E402

import crumb  # noqa: E402
from crumb import calibrate  # noqa: E402

PAGED = ("bf16", "hadamard", "oscar", "crumb")
ORACLES = ("torch", "float32")
METHODS = (*PAGED, "int4", *ORACLES)
QUESTION_TOKENS = 64  # part of the context that documents leave to a question and its answers
CALIBRATION_SEED, SCORE_SEED = 1_000_003, 2_000_003

Items = Dict[Tuple[str, int, str], List[List[bool]]]  # (method, length, task) -> documents


def record(model: Decoder, vocabulary: tasks.Vocabulary, options: argparse.Namespace,
           folder: pathlib.Path) -> List[pathlib.Path]:
    """Activation files of calibration sequences, which are those of training."""
    generator = torch.Generator(options.device).manual_seed(CALIBRATION_SEED)
    shape = model.shape
    metadata = {"model": "retrieval", "rope_theta": repr(shape.rope_theta),
                "max_position_embeddings": str(shape.max_position_embeddings)}
    files = []
    for number in range(options.calibration_sequences):
        counts = counts_of(options.calibration_length, number % 3 == 0, vocabulary)
        batch = tasks.training_batch(generator, 1, options.calibration_length, counts, vocabulary)
        rows: Dict[str, torch.Tensor] = {}

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor,
                      v: torch.Tensor) -> torch.Tensor:
            for name, value in zip("qkv", (q, k, v)):
                rows[f"layers.{layer}.{name}"] = value[0].to("cpu", torch.bfloat16).contiguous()
            return causal_attention(layer, q, k, v)

        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        model.hidden(batch.tokens, positions, attention)
        rows["positions"] = positions.cpu()
        files.append(folder / f"activations-{number:03}.safetensors")
        calibrate.write_safetensors(files[-1], rows, metadata)
    return files


class Scorer:
    """Scores methods on documents of one length after the other."""

    def __init__(self, options: argparse.Namespace, folder: pathlib.Path) -> None:
        self._options, self._device = options, options.device
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        self._model = load(options.model, options.device, dtype)
        self._exact = load(options.model, options.device, torch.float32)
        self.vocabulary = tasks.Vocabulary(*map(int, options.vocabulary.split(",")))
        self._rotations = {"hadamard": "hadamard"}
        begin = time.monotonic()
        self._calibrate(folder)
        self.calibration_seconds = time.monotonic() - begin
        self._workers: Dict[str, Any] = {}

    def _calibrate(self, folder: pathlib.Path) -> None:
        """Makes the rotation files of methods that need one, and have none in --rotations."""
        kept = self._options.rotations or folder
        kept.mkdir(parents=True, exist_ok=True)
        files: List[pathlib.Path] = []
        for method in ("oscar", "crumb"):
            if method in self._options.methods:
                self._rotations[method] = str(kept / f"{method}.rotation")
                if not (kept / f"{method}.rotation").exists():
                    files = files or record(self._model, self.vocabulary, self._options, folder)
                    calibrate.rotation_file(files, self._rotations[method],
                                            ["--method", method])

    def _worker(self, method: str) -> Any:
        """The worker with a method's pages, opened once."""
        if method not in self._workers:
            shape = self._model.shape
            described = crumb.Model(
                "retrieval", "retrieval", layers=shape.num_hidden_layers,
                kv_heads=shape.num_key_value_heads, q_heads=shape.num_attention_heads,
                head_dim=shape.head_dim, history="bf16" if method == "bf16" else "int2",
                rotation=self._rotations.get(method, "hadamard"))
            if self._device == "cuda":
                pages = max(self._options.lengths) // sequences.PAGE_TOKENS + 256
                settings = crumb.GpuSettings(
                    sequences=ask_about.QUESTIONS_MAX + 1, pages=pages,
                    bf16_pages=pages if method == "bf16" else 0)
                self._workers[method] = crumb.GpuWorker(None, described, gpu=settings)
            else:
                self._workers[method] = crumb.Worker(None, described)
        return self._workers[method]

    def _open(self, method: str, tokens: torch.Tensor) -> Any:
        if method in PAGED:
            return sequences.PagedDocument(self._model, self._worker(method), tokens,
                                           ask_about.QUESTIONS_MAX)
        model = self._exact if method == "float32" else self._model
        rounding = sequences.int4_hadamard if method == "int4" else None
        return sequences.TorchDocument(model, tokens, rounding)

    def documents(self, length: int) -> Iterator[Tuple[torch.Tensor, List[ask_about.Question]]]:
        """Documents of a context and their questions; the same for all methods."""
        for kind, counts in ask_about.counts_of(length - QUESTION_TOKENS,
                                                self.vocabulary).items():
            generator = torch.Generator(self._device).manual_seed(
                SCORE_SEED + length + (kind == "dense"))
            for _ in range(self._options.documents):
                made = tasks.make_documents(generator, 1, length - QUESTION_TOKENS, counts,
                                            self.vocabulary)
                yield made.tokens[0], ask_about.questions_of(made, 0, counts)

    def score(self, length: int, items: Items) -> Dict[str, float]:
        """Adds a context's items; returns the seconds of each method."""
        seconds = {method: 0.0 for method in self._options.methods}
        for number, (tokens, asked) in enumerate(self.documents(length)):
            for method in self._options.methods:
                if method in ORACLES and number % self._options.documents >= (
                        self._options.oracle_documents):
                    continue
                begin = time.monotonic()
                with sequences.closing(self._open(method, tokens)) as document:
                    document.fork(len(asked))
                    given = ask_about.ask(asked, document.advance)
                seconds[method] += time.monotonic() - begin
                for task in {question.task for question in asked}:
                    items.setdefault((method, length, task), []).append(
                        [right for question, answers in zip(asked, given)
                         if question.task == task for right in question.right(answers)])
        return seconds

    def close(self) -> None:
        """Closes the workers."""
        for worker in self._workers.values():
            worker.close()


def rows_of(items: Items) -> List[dict]:
    """One row for each method, length and task, with the difference to bf16."""
    rows = []
    for (method, length, task), documents in items.items():
        row = {"method": method, "length": length, "task": task,
               **ask_about.summary(documents)}
        base = items.get(("bf16", length, task))
        if base is not None and method != "bf16":
            below, low, high = ask_about.paired_difference(documents, base[:len(documents)])
            row["points_below_bf16"] = {"value": below, "low": low, "high": high}
        rows.append(row)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")],
                        default=[4096, 16384, 65536, 131072])
    parser.add_argument("--documents", type=int, default=25, help="of each kind and length")
    parser.add_argument("--oracle-documents", type=int, default=2,
                        help="documents of each kind and length for torch and float32")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--vocabulary", default="3072,512", help="symbols,words")
    parser.add_argument("--calibration-length", type=int, default=4096)
    parser.add_argument("--calibration-sequences", type=int, default=8)
    parser.add_argument("--rotations", type=pathlib.Path,
                        help="folder of METHOD.rotation, which are made there if there are none")
    options = parser.parse_args()
    unknown = set(options.methods) - set(METHODS)
    if unknown:
        parser.error(f"unknown methods: {', '.join(sorted(unknown))}")
    begin = time.monotonic()
    items: Items = {}
    timings = {}
    of_run = {**run_facts.of_run(options.device), "torch": torch.__version__,
              "weights_sha256": run_facts.weights_digest(options.model)}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        scorer = Scorer(options, pathlib.Path(folder))
        for length in options.lengths:
            timings[length] = scorer.score(length, items)
            rows = rows_of(items)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(
                {**of_run, "seconds": time.monotonic() - begin, "documents": options.documents,
                 "calibration_seconds": scorer.calibration_seconds,
                 "seconds_by_length_and_method": timings, "rows": rows}, indent=1) + "\n",
                encoding="utf-8")
            for row in rows:
                if row["length"] == length:
                    print(f"{length:7} {row['task']:13} {row['method']:9} {row['score']:.4f} "
                          f"[{row['low']:.4f}, {row['high']:.4f}] {row['items']}", flush=True)
            print(f"{time.monotonic() - begin:.1f} s", flush=True)
        scorer.close()


if __name__ == "__main__":
    main()
