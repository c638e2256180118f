#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the retrieval model for long contexts: train.py --out FOLDER

The model reads documents of tasks.py with their questions; the loss is on answers alone. Lengths
grow in stages, from 128 tokens to 131,072. One NVIDIA H100 trains it; `--stages`, `--vocabulary`
and `--shape` make smaller models for tests on a CPU. docs/quality/long_context.md has the figures.
"""

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import sys
import time
from typing import Any, Deque, Dict, Iterable, List, NamedTuple, Sequence

import torch
from torch import nn

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "bench")]
import run_facts  # noqa: E402
import tasks  # noqa: E402
from model import Decoder, Shape, causal_attention, save  # noqa: E402

# length:batch:steps:rate. A stage ends after so many steps, or when the model finds LEAVE of all
# answers but common words; the last one does not end early, and its rate falls to 0.
STAGES = ("128:64:5000:1,512:32:3000:.7,2048:16:1500:.5,8192:8:500:.4,32768:4:200:.3,"
          "131072:1:150:.2")
LEAVE = 0.99
WARMUP_STEPS = 20
MUON_RATE, MUON_MOMENTUM = 0.02, 0.95
EMBEDDING_RATE, GAIN_RATE = 3e-3, 1e-2
ADAM_BETAS = (0.9, 0.95)
QK_GAIN = 1.0      # gain of the norms of queries and keys before training
COMMON_LOSS = 0.3  # weight of the question about common words; that of other tasks is 1
DENSE_EVERY = 3    # one batch of so many has dense documents
CHUNK = 16         # batches that are made at once
EAGER_STEPS = 3    # steps of a shape before its CUDA graph is captured
WINDOW = 100       # steps over which accuracy is judged


class Stage(NamedTuple):
    """Steps over sequences of one length. rate: scales all learning rates."""

    length: int
    batch: int
    steps: int
    rate: float


def stages_of(text: str) -> List[Stage]:
    """Stages from length:batch:steps:rate,..."""
    return [Stage(*map(int, part.split(":")[:3]), float(part.split(":")[3]))
            for part in text.split(",")]


def counts_of(length: int, dense: bool, vocabulary: tasks.Vocabulary) -> tasks.Counts:
    """The contents of sequences of `length` tokens. Sparse documents of more than 2,048 tokens hide
    no more than those of 2,048."""
    if dense:
        asked = min(length // 8, vocabulary.names_max // 4)
        slots = (length - 3 * asked - 1) // tasks.RECORD_TOKENS - 1
        return tasks.Counts(asked, 0, 0, 0,
                            max(1, min(slots * 9 // 10, vocabulary.names_max) - asked))
    part = max(1, min(length, 2048, 4 * vocabulary.symbols) // 128)
    return tasks.Counts(single=4 * part, multi_value=part, multi_query=part, chains=part)


@torch.no_grad()
def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Approximately the nearest (semi-)orthogonal matrices of [n, rows, columns], by five steps of
    a Newton-Schulz iteration with the coefficients of Muon."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Steps along the orthogonalised momentum of matrices (Jordan et al., 2024)."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._groups: Dict[torch.Size, List[nn.Parameter]] = {}
        for parameter in parameters:
            self._groups.setdefault(parameter.shape, []).append(parameter)
        self._momentum = {shape: torch.zeros(len(group), *shape, device=group[0].device)
                          for shape, group in self._groups.items()}

    @torch.no_grad()
    def step(self, rate: torch.Tensor) -> None:
        """One step from the gradients."""
        for shape, group in self._groups.items():
            gradients = torch.stack([parameter.grad for parameter in group])
            momentum = self._momentum[shape].lerp_(gradients, 1 - MUON_MOMENTUM)
            update = orthogonal(gradients.lerp(momentum, MUON_MOMENTUM)) * (
                rate * MUON_RATE * math.sqrt(max(1.0, shape[0] / shape[1])))
            for parameter, change in zip(group, update):
                parameter.sub_(change)


class Adam:
    """Adam whose rate is on the device, so that a CUDA graph can have its steps."""

    def __init__(self, parameters: Sequence[nn.Parameter], rate: float) -> None:
        self._parameters, self._rate = list(parameters), rate
        self._means = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._squares = [torch.zeros_like(parameter) for parameter in self._parameters]

    @torch.no_grad()
    def step(self, rate: torch.Tensor) -> None:
        """One step from the gradients. rate: with the correction of `Rates`."""
        for parameter, mean, square in zip(self._parameters, self._means, self._squares):
            mean.lerp_(parameter.grad, 1 - ADAM_BETAS[0])
            square.lerp_(parameter.grad.square(), 1 - ADAM_BETAS[1])
            parameter.sub_(rate * self._rate * mean / (square.sqrt() + 1e-10))


class Trainer:
    """A model with its optimizers: Muon for matrices, Adam for the embedding and gains of norms."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        named = list(model.named_parameters())
        self._muon = Muon(parameter for name, parameter in named
                          if parameter.ndim == 2 and name != "embed_tokens.weight")
        self._adams = [Adam([model.embed_tokens.weight], EMBEDDING_RATE),
                       Adam([parameter for _, parameter in named if parameter.ndim == 1],
                            GAIN_RATE)]
        self._rates = torch.zeros(2, device=self.device)
        self._steps = 0

    def set_rate(self, rate: float) -> None:
        """Sets the factor of all learning rates in the next step."""
        self._steps += 1
        first, second = (1 - beta**self._steps for beta in ADAM_BETAS)
        rate *= min(1.0, self._steps / WARMUP_STEPS)
        self._rates.copy_(torch.tensor([rate, rate * math.sqrt(second) / first]))

    def compute(self, batch: tasks.TrainingBatch) -> torch.Tensor:
        """One step. Returns the loss and each task's fraction of right answers."""
        positions = torch.arange(batch.tokens.shape[1], device=self.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        hidden = self.model.hidden(batch.tokens, positions, causal_attention, dtype)
        loss, weight, right = torch.zeros((), device=self.device), 0.0, []
        for task, (at, targets) in batch.answers.items():
            scores = self.model.logits(hidden.index_select(1, at)).float().log_softmax(-1)
            own = COMMON_LOSS if task == "common-words" else 1.0
            loss, weight = loss - own * scores.gather(2, targets).mean(), weight + own
            best = scores.detach().topk(targets.shape[2], dim=-1)[1]
            right.append((best[..., :, None] == targets[..., None, :]).any(-1).float().mean())
        loss = loss / weight
        loss.backward()
        self._muon.step(self._rates[0])
        for adam in self._adams:
            adam.step(self._rates[1])
        return torch.stack([loss.detach(), *right])


class Steps:
    """Training steps over batches of one shape; on a GPU they become a CUDA graph."""

    def __init__(self, trainer: Trainer, eager: bool) -> None:
        self._trainer, self._eager = trainer, eager or trainer.device.type != "cuda"
        self._graph: Any = None
        self._batch: Any = None  # the tensors that the graph reads
        self._result: Any = None
        self._done = 0

    def run(self, batch: tasks.TrainingBatch) -> torch.Tensor:
        """One step; see Trainer.compute."""
        self._done += 1
        model = self._trainer.model
        if self._eager:
            model.zero_grad()
            return self._trainer.compute(batch)
        if self._done <= EAGER_STEPS:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                model.zero_grad(set_to_none=True)
                result = self._trainer.compute(batch)
            torch.cuda.current_stream().wait_stream(stream)
            return result
        if self._graph is None:
            self._batch = batch.clone()
            model.zero_grad(set_to_none=True)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._result = self._trainer.compute(self._batch)
        else:
            self._batch.copy_(batch)
        self._graph.replay()
        return self._result.clone()


class Batches:
    """Batches of a stage and a kind, CHUNK of which are made at once."""

    def __init__(self, generator: torch.Generator, stage: Stage, dense: bool,
                 vocabulary: tasks.Vocabulary) -> None:
        self._generator, self._stage, self._vocabulary = generator, stage, vocabulary
        self._counts = counts_of(stage.length, dense, vocabulary)
        self._made: Any = None
        self._next = CHUNK

    def next(self) -> tasks.TrainingBatch:
        """The next batch."""
        size = self._stage.batch
        if self._next == CHUNK:
            self._made = tasks.training_batch(self._generator, size * CHUNK, self._stage.length,
                                              self._counts, self._vocabulary)
            self._next = 0
        self._next += 1
        return self._made.rows((self._next - 1) * size, self._next * size)


class Progress:
    """Prints the loss and the accuracy by task, means over the steps since the last line."""

    def __init__(self, seconds: float) -> None:
        self._every, self._begin = seconds, time.monotonic()
        self._last, self._kept = self._begin, []
        self.lines: List[dict] = []

    def add(self, step: int, stage: Stage, names: Sequence[str], figures: torch.Tensor,
            last: bool) -> None:
        """One step; the figures stay on the device until a line is due."""
        self._kept.append((names, figures))
        now = time.monotonic()
        if now - self._last < self._every and not last:
            return
        means = means_of(self._kept)
        now = time.monotonic()
        line = {"seconds": round(now - self._begin, 1), "length": stage.length, "step": step,
                "loss": round(means.pop("loss"), 4),
                "ms_per_step": round(1000 * (now - self._last) / len(self._kept), 2),
                "right": {task: round(value, 4) for task, value in sorted(means.items())}}
        self._last, self._kept = now, []
        self.lines.append(line)
        print(json.dumps(line), flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin


def means_of(kept: Iterable["tuple[Sequence[str], torch.Tensor]"]) -> Dict[str, float]:
    """The means of named figures of several steps."""
    values: Dict[str, List[float]] = {}
    for names, figures in kept:
        for name, value in zip(names, figures.tolist()):
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def run_stage(trainer: Trainer, stage: Stage, last: bool, generator: torch.Generator,
              vocabulary: tasks.Vocabulary, progress: Progress,
              options: argparse.Namespace) -> float:
    """Trains through a stage. Returns the mean accuracy of its last WINDOW steps, without common
    words."""
    kinds = {dense: (Batches(generator, stage, dense, vocabulary), Steps(trainer, options.eager))
             for dense in (False, True)}
    window: Deque["tuple[Sequence[str], torch.Tensor]"] = collections.deque(maxlen=WINDOW)
    accuracy = 0.0
    for step in range(stage.steps):
        trainer.set_rate(stage.rate * (1 - step / stage.steps if last else 1))
        batches, steps = kinds[step % DENSE_EVERY == 0]
        batch = batches.next()
        window.append((("loss", *batch.answers), steps.run(batch)))
        over = progress.seconds > options.seconds_max or step == stage.steps - 1
        if over or step % WINDOW == WINDOW - 1:
            means = means_of(window)
            found = [means[task] for task in means if task not in ("loss", "common-words")]
            accuracy = sum(found) / len(found)
            over = over or (accuracy >= LEAVE and not last)
        progress.add(step + 1, stage, *window[-1], over)
        if over:
            break
    return accuracy


def train(model: Decoder, options: argparse.Namespace,
          vocabulary: tasks.Vocabulary) -> List[dict]:
    """Trains in place; returns the lines of progress. Raises SystemExit if half of all answers are
    wrong at the end of a stage: longer sequences would not help."""
    trainer, progress = Trainer(model), Progress(options.progress_seconds)
    generator = torch.Generator(trainer.device).manual_seed(options.seed)
    stages = stages_of(options.stages)
    for stage in stages:
        accuracy = run_stage(trainer, stage, stage is stages[-1], generator, vocabulary, progress,
                             options)
        save(model, options.out)
        if progress.seconds > options.seconds_max:
            print(f"stopped: {options.seconds_max} s are over", flush=True)
            break
        if accuracy < 0.5:
            raise SystemExit(f"no progress: {accuracy:.3f} at length {stage.length}")
    return progress.lines


def write_course(options: argparse.Namespace, of_run: Dict[str, str], lines: List[dict]) -> None:
    """Writes training.json beside the weights: the run, and its lines of progress."""
    (options.out / "training.json").write_text(
        json.dumps({**of_run, "weights_sha256": run_facts.weights_digest(options.out),
                    "stages": options.stages, "seed": options.seed, "progress": lines},
                   indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stages", default=STAGES)
    parser.add_argument("--seconds-max", type=float, default=1200)
    parser.add_argument("--progress-seconds", type=float, default=5)
    parser.add_argument("--vocabulary", default="3072,512", help="symbols,words")
    parser.add_argument("--shape", default="{}", help="JSON, fields of model.Shape")
    options = parser.parse_args()
    vocabulary = tasks.Vocabulary(*map(int, options.vocabulary.split(",")))
    shape = dataclasses.replace(Shape(vocabulary.size), **json.loads(options.shape))
    model = Decoder(shape, QK_GAIN)
    model.initialize(torch.Generator().manual_seed(options.seed))
    model.to(options.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    of_run = {**run_facts.of_run(options.device), "torch": torch.__version__}
    write_course(options, of_run, train(model, options, vocabulary))


if __name__ == "__main__":
    main()
