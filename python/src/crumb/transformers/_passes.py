# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Forward passes over several sequences of a Worker or a GpuWorker, in the shapes that models of
transformers compute with.

A pass is `begin`, `start`, `append` and `attend` of every layer, `end`. Its rows are those of a
tensor [batch, heads, columns, head_dim] in the order (batch, columns): they belong to the entries
of the pass one after the other. A decode pass brings the same number of tokens for each entry; on a
GPU it always has rows for all `places`, those behind the entries unused, so that a captured graph
serves every pass.

A pass over prompts has limits on a GPU, where the rows of a prefill block are in device memory:
`pieces` cuts the fresh tokens into passes that keep them. On the CPU one pass has all of it.
"""

import contextlib
from typing import Any, List, NamedTuple, Optional, Sequence as SequenceOf, Tuple, Union

import torch

from crumb.client import PAGE_TOKENS
from crumb.errors import InvalidArgument, ResourceExhausted
from crumb.gpu import Batch, GpuSequence, GpuWorker, current_stream
from crumb.worker import Sequence, Worker

AnyWorker = Union[Worker, GpuWorker]
AnySequence = Union[Sequence, GpuSequence]
Entries = List[Tuple[AnySequence, int]]
# Positions of a prefill block where the model names none: crumb.Model.prefill_block.
PREFILL_BLOCK = 8192
# Pages of one sequence that the tables of a batch begin with, 131,072 tokens: the default of
# crumb_device_batch_options. A longer sequence doubles it.
TABLE_PAGES = 2048
# Sequences inside their prompt at once: the default of crumb_device_worker_options.
PROMPTS = 2


class Span(NamedTuple):
    """Columns [begin, end) of a row that are fresh."""

    row: int
    begin: int
    end: int


class CpuPasses:
    """Passes over sequences in host memory, each attended by itself on the calling thread."""

    places = 0  # a decode pass has rows for its entries alone

    def __init__(self, worker: Worker) -> None:
        self._parts: List[Tuple[Any, int, int]] = []  # a sequence and its rows of the pass
        self._heads = worker.q_heads

    def pieces(self, fresh: List[Span], sequences: SequenceOf[AnySequence]) -> List[List[Span]]:
        """The spans of each pass that together bring the fresh tokens of prompts."""
        return [fresh] if fresh else []

    def begin(self, entries: Entries, prompts: bool) -> None:
        """Begins a pass of these sequences, each with its number of fresh tokens."""
        self._parts, rows = [], 0
        for sequence, tokens in entries:
            self._parts.append((sequence, rows, rows + tokens))
            rows += tokens

    def start(self) -> None:
        """Nothing: the CPU prepares nothing before the first layer."""

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Adds the fresh rows of one layer, [batch, kv_heads, columns, head_dim]."""
        k, v = _rows(key), _rows(value)
        for sequence, begin, end in self._parts:
            sequence.append(layer, k[begin:end], v[begin:end])

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of query, [batch, q_heads, columns, head_dim]: [batch, columns, q_heads,
        head_dim] in the same dtype."""
        q = _rows(query)
        out = torch.empty(q.shape, dtype=torch.float32)
        for sequence, begin, end in self._parts:
            sequence.attend(layer, q[begin:end], out[begin:end])
        return out.view(query.transpose(1, 2).shape).to(query.dtype)

    def end(self, accepted: SequenceOf[Any]) -> None:
        """Ends the pass: of entry i the tokens accepted[i] become part of its sequence."""
        parts, self._parts = self._parts, []
        for (sequence, _, _), tokens in zip(parts, accepted):
            sequence.advance(tokens)

    def leave_prompt(self, sequences: SequenceOf[AnySequence]) -> None:
        """Nothing: prompts have no memory of their own on the CPU."""

    def finish(self, sequence: AnySequence) -> None:
        """Publishes every full page of a sequence."""
        assert isinstance(sequence, Sequence)
        sequence.finish()

    def close(self) -> None:
        """Nothing is held."""


class GpuPasses:
    """Passes over sequences on a GPU, by batches on torch's current stream, which are made when
    they are needed.

    places: most sequences of a decode pass. prompts: most sequences that are inside their prompt
    at once, as in the worker's settings. prefill_tokens: most fresh tokens of a pass over
    prompts. pages: of one sequence, as far as it is known. output: "bf16" or "f32".
    """

    def __init__(self, worker: GpuWorker, *, places: int, prompts: int, prefill_tokens: int,
                 output: str, pages: int = 0) -> None:
        self._worker, self.places, self._output = worker, places, output
        self._prompts, self._prefill_tokens = prompts, prefill_tokens
        self._pages = max(pages, TABLE_PAGES)
        self._block = worker.model.prefill_block or PREFILL_BLOCK
        self._stream: Optional[int] = None
        self._batches: dict[Tuple[bool, int], Batch] = {}
        self._running: Optional[Batch] = None
        self._entries = 0
        self._held: Any = None  # rows that the batch reads until their layer is attended

    def pieces(self, fresh: List[Span], sequences: SequenceOf[AnySequence]) -> List[List[Span]]:
        """The spans of each pass that together bring the fresh tokens of prompts."""
        pieces: List[List[Span]] = []
        piece: List[Span] = []
        room = self._prefill_tokens
        for row, begin, end in fresh:
            length = sequences[row].length
            while begin < end:
                if piece and (room == 0 or len(piece) == self._prompts or piece[-1].row == row):
                    pieces.append(piece)
                    piece, room = [], self._prefill_tokens
                count = min(end - begin, self._block - length % self._block, room)
                piece.append(Span(row, begin, begin + count))
                begin, length, room = begin + count, length + count, room - count
        return pieces + [piece] if piece else pieces

    def begin(self, entries: Entries, prompts: bool) -> None:
        """Begins a pass of these sequences, each with its number of fresh tokens."""
        for sequence, tokens in entries:
            assert isinstance(sequence, GpuSequence)
            if tokens > sequence.pass_tokens_max:
                raise InvalidArgument(f"{tokens} tokens in a pass over a sequence that takes "
                                      f"{sequence.pass_tokens_max}")
        tokens = self._prefill_tokens if prompts else entries[0][1]
        longest = max(sequence.length + count for sequence, count in entries)
        batch = self.batch(prompts, tokens, longest)
        batch.prepare(entries)  # type: ignore[arg-type]
        self._running, self._entries = batch, len(entries)

    def batch(self, prompts: bool, tokens: int, longest: int = 0) -> Batch:
        """The batch of such passes on torch's current stream, with tables for `longest` tokens."""
        stream = current_stream(self._worker.device)
        pages = self._pages
        while pages * PAGE_TOKENS < longest:
            pages *= 2
        if (stream, pages) != (self._stream, self._pages):
            self.close()
            self._stream, self._pages = stream, pages
        batch = self._batches.get((prompts, tokens))
        if batch is None:
            batch = self._batches[prompts, tokens] = self._worker.batch(
                sequences=self._prompts if prompts else self.places, tokens=tokens, pages=pages,
                prompts=prompts, output=self._output, stream=stream)
        return batch

    def _pass(self) -> Batch:
        assert self._running is not None
        return self._running

    def start(self) -> None:
        """Enqueues the work before the first layer."""
        self._pass().start()

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Adds the fresh rows of one layer, [batch, kv_heads, columns, head_dim]."""
        self._held = _rows(key), _rows(value)
        self._pass().append(layer, *self._held)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of query, [batch, q_heads, columns, head_dim]: [batch, columns, q_heads,
        head_dim] in the same dtype."""
        out = self._pass().attend(layer, _rows(query))
        self._held = None
        result: torch.Tensor = out.view(query.transpose(1, 2).shape).to(query.dtype)
        return result

    def end(self, accepted: SequenceOf[Any]) -> None:
        """Ends the pass: of entry i the tokens accepted[i] become part of its sequence. A pass
        whose tokens are refused is dropped."""
        batch, self._running, self._held = self._running, None, None
        if batch is None:
            return
        try:
            tokens = [token for part in accepted for token in (
                part.tolist() if isinstance(part, torch.Tensor) else part)]
            batch.advance(tokens, [len(part) for part in accepted])
        except InvalidArgument:
            batch.advance([], [0] * self._entries)
            raise

    def leave_prompt(self, sequences: SequenceOf[AnySequence]) -> None:
        """Gives back the memory that sequences had for their prompt, for which there is room in
        `prompts` sequences only, at the end of it: an empty decode pass moves their recent rows."""
        if sequences:
            batch = self.batch(False, 1, max(sequence.length for sequence in sequences))
            batch.prepare([(sequence, 1) for sequence in sequences])  # type: ignore[misc]
            batch.start()
            batch.advance([], [0] * len(sequences))

    def finish(self, sequence: AnySequence) -> None:
        """Publishes every full page of a sequence. Those in its recent window stay unpublished if
        the worker has no memory left for them."""
        assert isinstance(sequence, GpuSequence)
        with contextlib.suppress(ResourceExhausted):
            self.batch(False, 1, sequence.length).finish(sequence)

    def close(self) -> None:
        """Closes the batches, after their passes have run."""
        for batch in self._batches.values():
            batch.close()
        self._batches, self._running = {}, None


AnyPasses = Union[CpuPasses, GpuPasses]


def passes_of(worker: AnyWorker, *, places: int, prefill_tokens: int, dtype: torch.dtype,
              longest: int = 0) -> AnyPasses:
    """Passes over sequences of a worker, of at most `longest` tokens as far as it is known; a model
    of `dtype` computes them."""
    if isinstance(worker, Worker):
        return CpuPasses(worker)
    return GpuPasses(worker, places=places, prompts=worker.gpu.prompts or PROMPTS,
                     prefill_tokens=prefill_tokens, pages=-(-longest // PAGE_TOKENS),
                     output="bf16" if dtype is torch.bfloat16 else "f32")


def _rows(rows: torch.Tensor) -> torch.Tensor:
    """[batch, heads, columns, head_dim] -> contiguous [batch x columns, heads, head_dim] BF16."""
    by_column = rows.detach().transpose(1, 2).to(torch.bfloat16).contiguous()
    return by_column.view(-1, *by_column.shape[2:])
