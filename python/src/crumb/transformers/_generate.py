# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""`crumb.generate`: many prompts through one model, with its keys and values in Crumb's pages.

Prompts take the places of a decode batch as these become free. A prompt's fresh tokens are computed
without padding, those of several prompts in one row of token ids; then every step computes the next
token of all places. On a GPU a step is one CUDA graph, and the host runs one step behind it:

    device   | step 1        | step 2        | step 3        |
    host       prepare 2, read the inputs of 1, advance 1; prepare 3, read the inputs of 2, ...

The inputs of a step are the tokens that the step before has sampled, which stay on the device. The
host reads them while the step runs: a sequence whose input was its last token is left out of the
following steps, and this step's outputs for it are dropped.
"""

import collections
import contextlib
import dataclasses
from typing import Any, Deque, Iterator, List, Optional, Sequence as SequenceOf, Tuple, Union

import torch

from crumb.client import Client
from crumb.errors import DeadlineExceeded, InvalidArgument
from crumb.gpu import GpuSettings
from crumb.transformers._attention import ATTENTION, active, set_active
from crumb.transformers._cache import PREFILL_TOKENS, PUBLISH_SECONDS
from crumb.transformers._model import (LENGTH_DEPENDENT_ROPE, check_supported, check_worker,
                                       open_worker, sized)
from crumb.transformers._passes import AnyPasses, AnySequence, AnyWorker, Span, passes_of

Prompt = Union[str, SequenceOf[int]]


@dataclasses.dataclass(frozen=True)
class Generated:
    """The tokens that were generated behind a prompt.

    tokens: the new tokens, with the end token if there was one. text: they as text, without special
    tokens; None: there is no tokenizer. cached_tokens: leading tokens of the prompt whose keys and
    values came from the cache. ended: by an end token, rather than by max_new_tokens.
    """

    tokens: List[int]
    text: Optional[str]
    cached_tokens: int
    ended: bool


@dataclasses.dataclass(frozen=True)
class _Sampling:
    temperature: float
    top_p: float
    generator: Any

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids [rows] for logits [rows, vocabulary], without waiting for the device."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_p < 1:
            ordered, order = logits.sort(-1, descending=True)
            behind = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            logits = torch.full_like(logits, float("-inf")).scatter(
                -1, order, ordered.masked_fill(behind >= self.top_p, float("-inf")))
        # The greatest of p / e, with e distributed exponentially, is distributed as p.
        noise = torch.empty_like(logits).exponential_(generator=self.generator)
        return (logits.softmax(-1) / noise).argmax(-1)


@dataclasses.dataclass
class _Request:
    """A prompt in a place. tokens: those that were generated and read."""

    number: int
    prompt: List[int]
    sequence: AnySequence
    tokens: List[int] = dataclasses.field(default_factory=list)


class _Read:
    """Token ids on their way from the device."""

    def __init__(self, ids: torch.Tensor, on_gpu: bool) -> None:
        self._tokens: Optional[List[int]] = None
        self._event: Any = None
        if on_gpu:
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = ids.clone()

    def tokens(self) -> List[int]:
        if self._tokens is None:
            if self._event is not None:
                self._event.synchronize()
            self._tokens = self._host.flatten().tolist()
        return self._tokens


class _Loop:
    """Generates behind prompts, at most `places` at once. Used by one call of `generate`."""

    def __init__(self, model: Any, worker: AnyWorker, passes: AnyPasses, *, places: int,
                 max_new_tokens: int, ends: SequenceOf[int], sampling: _Sampling, publish: str,
                 graphs: bool) -> None:
        self._model, self._worker, self._passes = model, worker, passes
        self._max_new_tokens, self._ends, self._sampling = max_new_tokens, set(ends), sampling
        self._publish, self._graphs = publish, graphs
        self._on_gpu = model.device.type == "cuda"
        self._active: List[_Request] = []
        # [places, 1]: the token that each place computes next, and its position.
        self._ids = torch.zeros(places, 1, dtype=torch.int64, device=model.device)
        self._positions = torch.zeros_like(self._ids)
        # transformers takes a mask of four dimensions for one that needs no preparation, which
        # would wait for the device. Attention over sequences does not look at it.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        self._read: Any = None  # the inputs of the next step
        self._graph: Any = None
        self._graph_logits: Any = None
        self._steps = 0
        self._entries = 0  # number of entries of the pass under way
        self._done: List[Tuple[_Request, bool]] = []

    def run(self, prompts: SequenceOf[List[int]]) -> List[Tuple[_Request, bool]]:
        """The requests of these prompts, in their order, and whether an end token ended them."""
        waiting = collections.deque(enumerate(prompts))
        try:
            while waiting or self._active:
                self._admit(waiting)
                if any(len(request.tokens) + 1 == self._max_new_tokens
                       for request in self._active):
                    self._retire(self._read.tokens(), only_full=True)
                elif self._active:
                    self._step()
        finally:
            for request in self._active:
                request.sequence.close()
        return sorted(self._done, key=lambda done: done[0].number)

    # -- Attention --------------------------------------------------------------------------------

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor,
               value: torch.Tensor) -> torch.Tensor:
        """Appends and attends one layer of the pass under way."""
        self._passes.append(layer, key, value)
        return self._passes.attend(layer, query)

    @contextlib.contextmanager
    def _pass(self) -> Iterator[None]:
        """The pass that was begun, which is dropped if its computation fails."""
        before = active()
        set_active(self)
        try:
            yield
        except BaseException:
            self._passes.end([[] for _ in range(self._entries)])
            raise
        finally:
            set_active(before)

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor,
                keep: Union[int, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=ids, position_ids=positions, attention_mask=self._mask, use_cache=False,
            logits_to_keep=keep).logits
        return logits

    # -- Prompts ----------------------------------------------------------------------------------

    def _admit(self, waiting: Deque[Tuple[int, List[int]]]) -> None:
        """Computes waiting prompts for the places that are free."""
        admitted: List[_Request] = []
        first = len(self._active)
        while waiting and len(self._active) < len(self._ids):
            number, prompt = waiting[0]
            sequence = self._worker.begin(prompt, publish=self._publish)
            request = _Request(number, prompt, sequence)
            waiting.popleft()
            admitted.append(request)
            self._active.append(request)
        if not admitted:
            return
        fresh = [Span(row, request.sequence.length, len(request.prompt))
                 for row, request in enumerate(admitted)]
        for piece in self._passes.pieces(fresh, [request.sequence for request in admitted]):
            self._prefill(piece, admitted, first)
        self._positions[first:len(self._active), 0] = torch.tensor(
            [len(request.prompt) for request in admitted], device=self._positions.device)
        self._read = _Read(self._ids, self._on_gpu)

    def _prefill(self, piece: List[Span], admitted: List[_Request], first: int) -> None:
        """Computes a pass over prompts, and samples behind those that end in it."""
        device = self._ids.device
        tokens = [admitted[row].prompt[begin:end] for row, begin, end in piece]
        ids = torch.tensor([sum(tokens, [])], device=device)
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in piece])
        rows, last, count = [], [], 0
        for row, begin, end in piece:
            count += end - begin
            if end == len(admitted[row].prompt):
                rows.append(row)
                last.append(count - 1)
        self._begin([(admitted[row].sequence, end - begin) for row, begin, end in piece], True)
        with self._pass():
            self._passes.start()
            if rows:
                keep = torch.tensor(last, device=device)
                logits = self._logits(ids, positions[None].to(device), keep)
                places = torch.tensor([first + row for row in rows], device=device)
                self._ids[places, 0] = self._sampling.sample(logits[0])
            else:
                self._model.base_model(input_ids=ids, position_ids=positions[None].to(device),
                                       attention_mask=self._mask, use_cache=False)
        self._passes.end(tokens)
        self._passes.leave_prompt([admitted[row].sequence for row in rows])

    def _begin(self, entries: List[Tuple[AnySequence, int]], prompts: bool) -> None:
        self._passes.begin(entries, prompts)
        self._entries = len(entries)

    # -- Steps ------------------------------------------------------------------------------------

    def _compute(self) -> torch.Tensor:
        """The next token of each place: [rows, vocabulary] logits."""
        rows = self._passes.places or len(self._active)
        self._passes.start()
        return self._logits(self._ids[:rows], self._positions[:rows], 0)[:, -1]

    def _step(self) -> None:
        """Computes the next token of every place, and ends the requests that it was not for."""
        self._begin([(request.sequence, 1) for request in self._active], False)
        with self._pass():
            if not self._graphs or self._steps == 0:  # the first one sets cuBLAS up
                logits = self._compute()
            else:
                if self._graph is None:
                    self._capture()
                self._graph.replay()
                logits = self._graph_logits
            sampled = self._sampling.sample(logits)
            self._ids[:len(sampled), 0] = sampled
            self._positions += 1
        self._steps += 1
        inputs, self._read = self._read, _Read(self._ids, self._on_gpu)
        tokens = inputs.tokens()
        self._passes.end([[] if token in self._ends else [token]
                          for token, _ in zip(tokens, self._active)])
        self._retire(tokens, only_full=False)

    def _capture(self) -> None:
        """Captures a step into a CUDA graph, which replaces it in every later step, whatever its
        sequences: their lengths and page tables are in memory that `begin` fills."""
        graph = torch.cuda.CUDAGraph()
        # The worker's threads go on calling CUDA meanwhile, for streams of their own.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(),
                              capture_error_mode="thread_local"):
            self._graph_logits = self._compute()
        self._graph = graph

    def _retire(self, tokens: List[int], only_full: bool) -> None:
        """Gives tokens, which were sampled for each place, to their requests, and ends requests.

        only_full: only to those for which it is the last one, which no step needs to compute."""
        kept, places = [], []
        for place, (request, token) in enumerate(zip(self._active, tokens)):
            full = len(request.tokens) + 1 == self._max_new_tokens
            if full or not only_full:
                request.tokens.append(token)
            if full or (not only_full and token in self._ends):
                self._end(request, token in self._ends)
            else:
                kept.append(request)
                places.append(place)
        if len(kept) < len(self._active):
            self._active = kept
            chosen = torch.tensor(places, dtype=torch.int64, device=self._ids.device)
            for held in (self._ids, self._positions):
                held[:len(places)] = held[chosen]
            self._read = _Read(self._ids, self._on_gpu)

    def _end(self, request: _Request, ended: bool) -> None:
        self._done.append((request, ended))
        self._passes.finish(request.sequence)
        request.sequence.close()


def generate(model: Any, prompts: SequenceOf[Prompt], *, tokenizer: Any = None,
             max_new_tokens: int = 128, eos_token_id: Union[None, int, SequenceOf[int]] = None,
             temperature: float = 0.0, top_p: float = 1.0, seed: Optional[int] = None,
             batch: int = 8, worker: Optional[AnyWorker] = None, socket_dir: Optional[str] = None,
             publish: str = "all", prefill_tokens: int = PREFILL_TOKENS, graphs: bool = True,
             **options: Any) -> List[Generated]:
    """Generates behind each of `prompts`, with keys and values in Crumb's pages.

    model: a transformers model that `crumb.transformers.check_supported` accepts, on the CPU or a
    CUDA device; its attention implementation becomes "crumb". prompts: lists of token ids, or
    strings if there is a tokenizer. eos_token_id: tokens that end a text; None: those of the
    model's generation config. temperature: 0 takes the most likely token; otherwise tokens are
    sampled among the most likely ones that together have the probability top_p, with `seed`.
    batch: most prompts at once; the others wait. worker: one of `open_worker`; None: one for this
    call, with `socket_dir` (None: no crumbd) and the `options` of `open_worker`. publish: "all"
    pages, those of the "prompt", or "none". prefill_tokens: most tokens of prompts that are
    computed at once on a GPU. graphs: decode by a CUDA graph on a GPU.

    Returns a Generated for each prompt. Raises InvalidArgument for unsupported features.
    """
    check_supported(model)
    ids = [_token_ids(model, prompt, tokenizer) for prompt in prompts]
    for name, wrong in (("max_new_tokens", max_new_tokens < 1), ("batch", batch < 1),
                        ("temperature", temperature < 0), ("top_p", not 0 < top_p <= 1),
                        ("prefill_tokens", prefill_tokens < 1)):
        if wrong:
            raise InvalidArgument(f"{name} is out of range")
    if not ids:
        return []
    if model.training:
        raise InvalidArgument("the model is in training mode: model.eval() before")
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    lengths = sorted((len(prompt) + max_new_tokens for prompt in ids), reverse=True)[:batch]
    random = torch.Generator(model.device)
    if seed is None:
        random.seed()
    else:
        random.manual_seed(seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_own_stream(model.device))
        if worker is None:
            worker = _open(stack, model, socket_dir, lengths, options)
        elif socket_dir is not None or options:
            raise InvalidArgument("socket_dir and the options of open_worker are the worker's: "
                                  "give them to open_worker, not with worker=")
        check_worker(model, worker)
        passes = passes_of(worker, places=len(lengths), prefill_tokens=prefill_tokens,
                           dtype=model.dtype, longest=lengths[0])
        stack.callback(passes.close)
        loop = _Loop(model, worker, passes, places=len(lengths), max_new_tokens=max_new_tokens,
                     ends=_ends(model, eos_token_id),
                     sampling=_Sampling(temperature, top_p, random), publish=publish,
                     graphs=graphs and model.device.type == "cuda" and _capturable(model))
        done = loop.run(ids)
        if socket_dir is not None:
            with contextlib.suppress(DeadlineExceeded):  # late pages are lost, the text is not
                worker.wait_published(PUBLISH_SECONDS)
    return [Generated(request.tokens, None if tokenizer is None else
                      tokenizer.decode(request.tokens, skip_special_tokens=True),
                      request.sequence.cached_tokens, ended) for request, ended in done]


def _open(stack: contextlib.ExitStack, model: Any, socket_dir: Optional[str],
          lengths: SequenceOf[int], options: Any) -> AnyWorker:
    """A worker that the stack closes, with room for sequences of these lengths."""
    client = None
    if socket_dir is not None:
        client = stack.enter_context(Client(socket_dir, process_name="crumb.generate"))
    if model.device.type == "cuda":
        options["gpu"] = sized(options.get("gpu", GpuSettings()), lengths,
                               options.get("history", "int2"))
    worker = open_worker(model, client, **options)
    stack.enter_context(worker)
    return worker


def _token_ids(model: Any, prompt: Prompt, tokenizer: Any) -> List[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidArgument("a prompt is a string, and there is no tokenizer")
        prompt = tokenizer(prompt)["input_ids"]
    ids = [int(token) for token in prompt]
    vocabulary = model.config.get_text_config().vocab_size
    if not ids or not all(0 <= token < vocabulary for token in ids):
        raise InvalidArgument(f"a prompt has at least one token, all of them from 0 to "
                              f"{vocabulary - 1}")
    return ids


def _ends(model: Any, given: Union[None, int, SequenceOf[int]]) -> List[int]:
    if given is None:
        given = getattr(model.generation_config, "eos_token_id", None)
    if given is None:
        return []
    return [given] if isinstance(given, int) else list(given)


def _capturable(model: Any) -> bool:
    """Whether a step can be captured: RoPE that depends on the length looks at the positions."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return rope.get("rope_type") not in LENGTH_DEPENDENT_ROPE


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU a stream behind the current one, because the default stream cannot be captured; the
    current one then waits for it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            before.wait_stream(stream)
