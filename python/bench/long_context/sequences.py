# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Documents that are read once and continued by many questions, over Crumb's pages or in torch.

Both back ends keep the same rules (docs/quality/methods.md): a prompt token attends its own prefill
block of 8,192 positions exactly and earlier blocks as stored; behind the prompt the sink and the
recent window are exact and everything between them is as stored.
"""

import contextlib
from typing import Callable, Iterator, List, Optional, Tuple

import torch

from crumb.client import PAGE_TOKENS
from crumb.transformers._passes import PREFILL_BLOCK, AnyWorker, passes_of
from model import Decoder

RECENT_TOKENS = 256

Round = Callable[[torch.Tensor], torch.Tensor]


class PagedDocument:
    """A document in a Worker's or GpuWorker's pages. REQUIRES: at most `places` questions."""

    def __init__(self, model: Decoder, worker: AnyWorker, tokens: torch.Tensor,
                 places: int) -> None:
        self._model, self._places = model, places
        self._on_gpu = tokens.is_cuda
        self._passes = passes_of(worker, places=places, prefill_tokens=PREFILL_BLOCK,
                                 dtype=torch.float32, longest=tokens.numel() + PAGE_TOKENS)
        self._sequence = worker.begin(tokens.to("cpu", torch.int32), publish="none")
        self._length = tokens.numel()
        while self._sequence.length < self._length:
            begin = self._sequence.length
            count = min(self._length - begin, PREFILL_BLOCK - begin % PREFILL_BLOCK)
            piece = tokens[begin:begin + count]
            self._pass([(self._sequence, count)], True, piece,
                       torch.arange(begin, begin + count, device=tokens.device))
            self._passes.end([piece.tolist()])
        self._passes.leave_prompt([self._sequence])
        self._forks: List = []

    def _pass(self, entries: List, prompt: bool, tokens: torch.Tensor,
              positions: torch.Tensor) -> torch.Tensor:
        self._passes.begin(entries, prompt)
        self._passes.start()

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor,
                      v: torch.Tensor) -> torch.Tensor:
            # [tokens, heads, dim] -> [1, heads, tokens, dim]
            self._passes.append(layer, k.transpose(0, 1)[None], v.transpose(0, 1)[None])
            return self._passes.attend(layer, q.transpose(0, 1)[None])[0]

        return self._model.hidden(tokens, positions, attention)

    def fork(self, count: int) -> None:
        """Makes `count` sequences that continue the document."""
        if self._on_gpu:
            batch = self._passes.batch(False, 1, self._length)
            self._forks = [batch.fork(self._sequence) for _ in range(count)]
        else:
            self._forks = [self._sequence.fork() for _ in range(count)]

    def advance(self, numbers: List[int], tokens: List[int]) -> torch.Tensor:
        """questions.Advance."""
        entries = [(self._forks[number], 1) for number in numbers]
        positions = [fork.length for fork, _ in entries]
        unused = (self._places if self._on_gpu else len(entries)) - len(entries)
        device = self._model.embed_tokens.weight.device
        hidden = self._pass(entries, False, torch.tensor(tokens + [0] * unused, device=device),
                            torch.tensor(positions + [0] * unused, device=device))
        self._passes.end([[token] for token in tokens])
        return self._model.logits(hidden[:len(entries)].float())

    def close(self) -> None:
        """Ends the sequences."""
        for fork in self._forks:
            fork.close()
        self._sequence.close()
        self._passes.close()


class TorchDocument:
    """A document whose attention torch computes. rounding: makes the stored rows of K or V rows
    [tokens, heads, head_dim]; None: they are stored as they are."""

    def __init__(self, model: Decoder, tokens: torch.Tensor, rounding: Optional[Round]) -> None:
        self._model, self._rounding = model, rounding
        shape = model.shape
        self._length = tokens.numel()
        dtype = model.embed_tokens.weight.dtype
        rows = (shape.num_hidden_layers, 2, self._length, shape.num_key_value_heads,
                shape.head_dim)
        self._exact = torch.empty(rows, dtype=dtype, device=tokens.device)
        self._stored = self._exact if rounding is None else torch.empty_like(self._exact)
        self._forks: List[List[Tuple[torch.Tensor, torch.Tensor]]] = []
        for begin in range(0, self._length, PREFILL_BLOCK):
            self._prefill(tokens, begin, min(begin + PREFILL_BLOCK, self._length))
        end = max(PAGE_TOKENS, (self._length + 1 - RECENT_TOKENS) // PAGE_TOKENS * PAGE_TOKENS)
        if rounding is not None:
            self._stored[:, :, :PAGE_TOKENS] = self._exact[:, :, :PAGE_TOKENS]
            self._stored[:, :, end:] = self._exact[:, :, end:]

    def _prefill(self, tokens: torch.Tensor, begin: int, end: int) -> None:
        def attention(layer: int, q: torch.Tensor, k: torch.Tensor,
                      v: torch.Tensor) -> torch.Tensor:
            exact, stored = self._exact[layer], self._stored[layer]
            exact[0, begin:end], exact[1, begin:end] = k, v
            if self._rounding is not None:
                for part in range(2):
                    stored[part, begin:end] = self._rounding(exact[part, begin:end])
                if begin == 0:
                    stored[:, :PAGE_TOKENS] = exact[:, :PAGE_TOKENS]
            held = [torch.cat([stored[part, :begin], exact[part, begin:end]]) for part in range(2)]
            return _block_attention(q, held[0], held[1])

        self._model.hidden(tokens[begin:end],
                           torch.arange(begin, end, device=tokens.device), attention)

    def fork(self, count: int) -> None:
        """Makes `count` sequences that continue the document."""
        layers = self._model.shape.num_hidden_layers
        empty = self._exact[0, 0, :0]
        self._forks = [[(empty, empty)] * layers for _ in range(count)]

    def advance(self, numbers: List[int], tokens: List[int]) -> torch.Tensor:
        """questions.Advance."""
        device = self._exact.device
        lengths = {len(self._forks[number][0][0]) for number in numbers}
        assert len(lengths) == 1  # all questions begin together
        own = lengths.pop()

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor,
                      v: torch.Tensor) -> torch.Tensor:
            rows = []
            for i, number in enumerate(numbers):
                before = self._forks[number][layer]
                rows.append((torch.cat([before[0], k[i:i + 1]]),
                             torch.cat([before[1], v[i:i + 1]])))
                self._forks[number][layer] = rows[-1]
            return _shared_attention(q, self._stored[layer, 0], self._stored[layer, 1],
                                     torch.stack([r[0] for r in rows]),
                                     torch.stack([r[1] for r in rows]))

        position = torch.full((len(tokens),), self._length + own, device=device)
        hidden = self._model.hidden(torch.tensor(tokens, device=device), position, attention)
        return self._model.logits(hidden.float())

    def close(self) -> None:
        """Nothing but memory is held."""


def _block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens of k: q [tokens, q heads, dim]; k, v [all, heads, dim]"""
    from torch.nn import functional
    from torch.nn.attention.bias import causal_lower_right
    group = q.shape[1] // k.shape[1]
    heads = [x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(group, 1),
                                               v.repeat_interleave(group, 1))]
    out = functional.scaled_dot_product_attention(
        *heads, attn_mask=causal_lower_right(q.shape[0], k.shape[0]))
    return out[0].transpose(0, 1)


def _shared_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own_k: torch.Tensor,
                      own_v: torch.Tensor) -> torch.Tensor:
    """Attention in float32 of one token of each sequence over rows that all have, k and v [tokens,
    heads, dim], and rows of its own [sequences, tokens, heads, dim]. q: [sequences, q heads,
    dim]."""
    sequences, _, dim = q.shape
    heads = k.shape[1]
    grouped = q.float().view(sequences, heads, -1, dim) * dim**-0.5
    shared = torch.einsum("shgd,thd->shgt", grouped, k.float())
    own = torch.einsum("shgd,sthd->shgt", grouped, own_k.float())
    weights = torch.cat([shared, own], -1).softmax(-1)
    split = k.shape[0]
    out = (torch.einsum("shgt,thd->shgd", weights[..., :split], v.float()) +
           torch.einsum("shgt,sthd->shgd", weights[..., split:], own_v.float()))
    return out.reshape(sequences, -1, dim)


def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """The orthogonal symmetric Hadamard matrix of a power of two."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def int4_hadamard(rows: torch.Tensor) -> torch.Tensor:
    """The method int4-hadamard (docs/quality/methods.md): each row times a Hadamard matrix, 4 bits
    per element with an fp16 scale and minimum, and back."""
    matrix = hadamard(rows.shape[-1], rows.device)
    rotated = rows.float() @ matrix
    low = rotated.amin(-1, keepdim=True)
    scale = ((rotated.amax(-1, keepdim=True) - low) / 15).half().float()
    low = low.half().float()
    codes = ((rotated - low) / scale.clamp(min=1e-20)).round().clamp(0, 15)
    return ((low + codes * scale) @ matrix).to(rows.dtype)


@contextlib.contextmanager
def closing(document: "PagedDocument | TorchDocument"
            ) -> Iterator["PagedDocument | TorchDocument"]:
    """Closes a document at the end."""
    try:
        yield document
    finally:
        document.close()
