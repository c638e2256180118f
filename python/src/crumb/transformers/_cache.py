# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""A transformers cache whose rows lie in sequences of a worker, and the hooks around a pass."""

import dataclasses
import inspect
from types import TracebackType
from typing import Any, Dict, List, Optional, Set, Tuple, Type

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from crumb.client import Client
from crumb.errors import FailedPrecondition, InvalidArgument, Unimplemented
from crumb.gpu import GpuSettings
from crumb.transformers._attention import ATTENTION, active, set_active
from crumb.transformers._inputs import (check_inputs, check_mask, check_prompt, pads_of,
                                        positions_of)
from crumb.transformers._model import check_supported, check_worker, open_worker, sized
from crumb.transformers._passes import (AnyPasses, AnySequence, AnyWorker, Span,
                                        passes_of)

# Seconds that a cache with a worker of its own waits at its end until its pages are published.
PUBLISH_SECONDS = 10.0
# Most fresh tokens of a pass over prompts on a GPU: more are cut into several. The matrix products
# of such a pass fill an H100, and its activations take 0.4 GB in a model of 8B parameters.
PREFILL_TOKENS = 4096
# A cache on a GPU with a worker of its own has room for so many tokens behind each prompt, or for
# so many rows of so many tokens if it does not know the prompts, where GpuSettings names nothing.
NEW_TOKENS, ROWS, ROW_TOKENS = 4096, 8, 32768


@dataclasses.dataclass
class _Row:
    """One row of the batch: `pads` pad columns on the left, and then the sequence's tokens."""

    sequence: AnySequence
    pads: int

    @property
    def end(self) -> int:
        """The column of the next token."""
        return self.pads + self.sequence.length


@dataclasses.dataclass
class _Pass:
    """A forward pass of the decoder that is under way, as one or several passes over sequences.

    ids: [batch, columns] on the CPU. pieces: the fresh columns of each pass over sequences; none if
    nothing is fresh. packed: each piece is computed as one row of its fresh tokens alone, and its
    outputs are put in their columns; otherwise there is one piece at most, computed as it came.
    """

    ids: torch.Tensor
    prompts: bool
    pieces: List[List[Span]]
    packed: bool
    piece: List[Span] = dataclasses.field(default_factory=list)  # the piece under way
    outputs: List[torch.Tensor] = dataclasses.field(default_factory=list)
    appended: Set[int] = dataclasses.field(default_factory=set)
    attended: Set[int] = dataclasses.field(default_factory=set)

    def packed_rows(self, columns: torch.Tensor) -> torch.Tensor:
        """The piece's part of [batch, columns] as [1, fresh tokens]."""
        return torch.cat([columns[row, begin:end] for row, begin, end in self.piece])[None]

    def place(self, output: Any) -> None:
        """Puts the piece's outputs in their columns of `outputs`; columns that are not fresh are
        zeros."""
        parts = [output.last_hidden_state, *(output.get("hidden_states") or ())]
        if not self.outputs:
            self.outputs = [part.new_zeros(*self.ids.shape, part.shape[-1]) for part in parts]
        for whole, part in zip(self.outputs, parts):
            offset = 0
            for row, begin, end in self.piece:
                whole[row, begin:end] = part[0, offset:offset + end - begin]
                offset += end - begin


class _Layer(CacheLayerMixin):
    """One layer of a CrumbCache, as transformers sees it."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: "CrumbCache", layer: int) -> None:
        super().__init__()
        self._cache, self._layer = cache, layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: rows lie in the cache's sequences."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        self._cache._append(self._layer, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> Tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Nothing: `CrumbCache.reset` closes the sequences."""

    def _refuse(self, *args: Any) -> None:
        raise Unimplemented("the sequences of a CrumbCache cannot be shortened, reordered or "
                            "repeated: beam search and assisted generation need another cache")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
    offload = prefetch = _refuse


class CrumbCache(Cache):
    """A transformers cache whose history is INT2 pages. Used by one thread at a time.

    model: a transformers model that `check_supported` accepts; its attention implementation becomes
    "crumb", which computes as "sdpa" does wherever no CrumbCache is used. On a CUDA device pages
    are in its memory, and passes are enqueued on torch's current stream.
    input_ids: [batch, columns] int64, the prompts; attention_mask: [batch, columns], 0 at the pad
    columns, which must be on the left; None: no padding. With the prompts the cache takes their
    cached pages before the model runs, and they may come in passes of any length (chunked
    prefill). Without them the first pass of the model is the prompt, all of it, and nothing of it
    is taken from the cache.
    worker: one of `open_worker`, which several caches may use; None: one of this cache's own.
    socket_dir: crumbd's folder of sockets, for a worker of its own; None: no crumbd.
    publish: "all" pages, those of the "prompt", or "none". prefill_tokens: most fresh tokens that
    are computed at once on a GPU. options: those of `open_worker`.

    Leaving a `with` block calls `finish` and `close`. Raises InvalidArgument for models, masks and
    arguments that cannot be served.
    """

    def __init__(self, model: Any, input_ids: Optional[torch.Tensor] = None,
                 attention_mask: Optional[torch.Tensor] = None, *,
                 worker: Optional[AnyWorker] = None, socket_dir: Optional[str] = None,
                 publish: str = "all", prefill_tokens: int = PREFILL_TOKENS,
                 **options: Any) -> None:
        check_supported(model)
        if prefill_tokens < 1:
            raise InvalidArgument(f"prefill_tokens is {prefill_tokens}; it must be 1 at least")
        self._rows: List[_Row] = []
        self._prompt: Optional[torch.Tensor] = None
        self._pads: Any = None  # [batch, 1], on the model's device
        self._pass: Optional[_Pass] = None
        self._finished = False
        self._publish = publish
        self._client: Optional[Client] = None
        self._own_worker: Optional[AnyWorker] = None
        pads = None if input_ids is None else pads_of(attention_mask, input_ids)
        lengths = ([ROW_TOKENS] * ROWS if input_ids is None or pads is None else
                   [input_ids.shape[1] - skipped + NEW_TOKENS for skipped in pads])
        if worker is None:
            if model.device.type == "cuda":
                options["gpu"] = sized(options.get("gpu", GpuSettings()), lengths,
                                       options.get("history", "int2"))
            if socket_dir is not None:
                self._client = Client(socket_dir, process_name="transformers")
            worker = self._own_worker = open_worker(model, self._client, **options)
        elif socket_dir is not None or options:
            raise InvalidArgument("socket_dir and the options of open_worker are the worker's: "
                                  "give them to open_worker, not with worker=")
        check_worker(model, worker)
        self.worker = worker
        self._decoder = _hooked(model)
        self._passes: Optional[AnyPasses] = None  # once there are rows
        self._sizes: Dict[str, Any] = dict(prefill_tokens=prefill_tokens, longest=max(lengths),
                                           dtype=model.dtype)
        super().__init__(layers=[_Layer(self, layer) for layer in range(worker.layers)])
        if input_ids is not None and pads is not None:
            self._begin(input_ids, pads)

    @property
    def cached_tokens(self) -> List[int]:
        """Number of leading prompt tokens of each row that came from the cache: multiples of 64.
        Empty before the prompts are known."""
        return [row.sequence.cached_tokens for row in self._rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns, padding included, that every row has in the cache."""
        return min((row.end for row in self._rows), default=0)

    def finish(self, timeout: float = 0.0) -> None:
        """Publishes every full page, those of the recent window included; no pass may follow.

        timeout: seconds to wait until they are published; 0: they are published in the background.
        Raises DeadlineExceeded if they were not.
        """
        if not self._finished:
            self._finished = True
            for row in self._rows:
                self._of_rows().finish(row.sequence)
        if timeout > 0:
            self.worker.wait_published(timeout)

    def reset(self) -> None:
        """Ends the sequences without publishing their recent windows; the next pass is a prompt."""
        self._end_piece(complete=False)
        for row in self._rows:
            row.sequence.close()
        if self._passes is not None:
            self._passes.close()
        self._rows, self._prompt, self._pass, self._passes = [], None, None, None

    def close(self) -> None:
        """Ends the sequences, and the worker if it is this cache's own. Pages that are not
        published yet are lost then: `finish` with a timeout waits for them."""
        self.reset()
        if self._own_worker is not None:
            self._own_worker.close()
        if self._client is not None:
            self._client.close()

    def __enter__(self) -> "CrumbCache":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        try:
            if kind is None:
                self.finish(PUBLISH_SECONDS if self._client is not None else 0.0)
        finally:
            self.close()

    # -- A pass ---------------------------------------------------------------------------------

    def _begin(self, ids: torch.Tensor, pads: List[int],
               cached_tokens_max: Optional[int] = None) -> None:
        """Starts a sequence for each row of [batch, columns] token ids."""
        on_host = ids.cpu()
        rows: List[_Row] = []
        try:
            for row, skipped in enumerate(pads):
                rows.append(_Row(self.worker.begin(on_host[row, skipped:], publish=self._publish,
                                                   cached_tokens_max=cached_tokens_max), skipped))
        except BaseException:
            for begun in rows:
                begun.sequence.close()
            raise
        self._passes = passes_of(self.worker, places=len(rows), **self._sizes)
        self._rows, self._prompt, self._finished = rows, ids.clone(), False
        self._pads = torch.tensor(pads, device=ids.device)[:, None]

    def _of_rows(self) -> AnyPasses:
        """The passes over the rows, which exist."""
        assert self._passes is not None
        return self._passes

    def _begin_pass(self, inputs: Dict[str, Any]) -> None:
        """Prepares a pass of the decoder, and computes all of its pieces but the last; `inputs` are
        its arguments by name, which it changes to those of the last."""
        check_inputs(inputs, self._decoder)
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        self._end_piece(complete=False)
        if not self._rows:
            self._begin(ids, pads_of(mask, ids), cached_tokens_max=0)
        assert self._prompt is not None
        if ids.shape[0] != len(self._rows):
            raise InvalidArgument(f"the pass has {ids.shape[0]} rows, and the cache was made for "
                                  f"{len(self._rows)} (num_return_sequences and beams need rows of "
                                  "their own)")
        positions, have = inputs.get("position_ids"), self.get_seq_length()
        first = self._first_column(ids, mask, positions)
        check_mask(mask, self._pads, first + ids.shape[1])
        if first < 0 or first > have:
            raise InvalidArgument(f"the pass begins at column {first}, and the cache has the "
                                  f"columns before {have}")
        check_prompt(ids, self._prompt, self._pads, first)
        if first < have >= self._prompt.shape[1]:
            raise InvalidArgument(f"the pass begins at column {first}, and the cache has the whole "
                                  f"prompt and {have} columns: it does not go back, make another "
                                  "cache")
        # A chunked prefill of generate() passes columns again that the cache has. They need not be
        # computed, but the model cannot compute fewer columns than one.
        drop = max(0, min(have - first, ids.shape[1] - 1))
        if drop > 0:
            ids = inputs["input_ids"] = ids[:, drop:]
            positions = None if positions is None else positions[:, drop:]
            first += drop
        inputs["position_ids"] = positions_of(first, ids.shape[1], self._pads, positions)
        inputs["attention_mask"] = None
        self._pass = self._cut(ids, first)
        self._compute_pieces(inputs)

    def _first_column(self, ids: torch.Tensor, mask: Optional[torch.Tensor],
                      positions: Optional[torch.Tensor]) -> int:
        """The column that a pass begins with: generate() leaves masks without padding out."""
        if mask is not None:
            return int(mask.shape[1] - ids.shape[1])
        if positions is not None and not any(row.pads for row in self._rows):
            return int(positions[0, 0])
        return self.get_seq_length()

    def _cut(self, ids: torch.Tensor, first: int) -> _Pass:
        """The pass over columns from `first` on. Behind the prompts all columns are fresh."""
        assert self._prompt is not None
        columns = ids.shape[1]
        skipped = [min(max(row.end - first, 0), columns) for row in self._rows]
        fresh = [Span(row, begin, columns) for row, begin in enumerate(skipped) if begin < columns]
        prompts = first < self._prompt.shape[1]
        pieces = ([fresh] if not prompts else
                  self._of_rows().pieces(fresh, [row.sequence for row in self._rows]))
        packed = len(pieces) > 1 or bool(pieces) and any(skipped)
        return _Pass(ids.cpu(), prompts, pieces, packed)

    def _compute_pieces(self, inputs: Dict[str, Any]) -> None:
        running = self._pass
        assert running is not None
        ids, positions = inputs["input_ids"], inputs["position_ids"]
        for piece in running.pieces:
            self._begin_piece(piece)
            if not running.packed:
                return
            inputs.update(input_ids=running.packed_rows(ids), return_dict=True,
                          position_ids=running.packed_rows(positions))
            if piece is running.pieces[-1]:
                return
            # Without the hooks of the pass, which is under way.
            running.place(self._decoder.forward(**inputs))
            self._end_piece(complete=True)

    def _begin_piece(self, piece: List[Span]) -> None:
        """Begins a pass over the sequences with these fresh columns."""
        running = self._pass
        assert running is not None
        try:
            self._of_rows().begin([(self._rows[row].sequence, end - begin)
                                for row, begin, end in piece], running.prompts)
        except InvalidArgument as error:
            raise _with_advice(error) from None
        running.piece, running.appended, running.attended = piece, set(), set()
        self._of_rows().start()

    def _append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Appends the fresh rows of key and value, [batch, kv_heads, columns, head_dim]."""
        running = self._pass
        if running is None or active() is not self:
            raise FailedPrecondition("this CrumbCache is used outside a forward pass of the model "
                                     "that it was made for")
        if running.piece:
            try:
                self._of_rows().append(layer, key, value)
            except InvalidArgument as error:
                raise _with_advice(error) from None
        running.appended.add(layer)

    def attend(self, layer: int, query: torch.Tensor, key: Any = None,
               value: Any = None) -> torch.Tensor:
        """Attention of query, [batch, q_heads, columns, head_dim]: [batch, columns, q_heads,
        head_dim] in the same dtype. NaN if no column of the pass is fresh: its logits mean nothing.
        key and value are in the cache already."""
        running = self._pass
        if running is None or layer not in running.appended:
            raise FailedPrecondition(f"layer {layer} attends before it updates its CrumbCache")
        running.attended.add(layer)
        if not running.piece:
            return query.new_full(query.transpose(1, 2).shape, float("nan"))
        return self._of_rows().attend(layer, query)

    def _end_piece(self, complete: bool) -> None:
        """Adds the fresh tokens of the piece under way to the sequences, or drops them. Raises
        FailedPrecondition, and drops them, if the pass left layers out."""
        running = self._pass
        if running is None or not running.piece:
            return
        piece, running.piece = running.piece, []
        layers = set(range(len(self.layers)))
        missing = layers - (running.appended & running.attended)
        keep = complete and not missing
        self._of_rows().end([running.ids[row, begin:end if keep else begin]
                          for row, begin, end in piece])
        if complete and missing:
            raise FailedPrecondition(f"layers {sorted(missing)} of {type(self._decoder).__name__} "
                                     "did not attend over the CrumbCache")
        if keep and running.prompts:
            assert self._prompt is not None
            columns = self._prompt.shape[1]
            self._of_rows().leave_prompt([self._rows[row].sequence for row, _, _ in piece
                                       if self._rows[row].end == columns])

    def _end_pass(self, output: Any) -> Any:
        """Ends a pass of the decoder. Returns its output; None: it failed, and its last piece is
        dropped."""
        running = self._pass
        if running is not None:
            if output is not None and running.packed:
                running.place(output)
                output.last_hidden_state = running.outputs[0]
                if len(running.outputs) > 1:
                    output.hidden_states = tuple(running.outputs[1:])
            try:
                self._end_piece(complete=output is not None)
            finally:
                self._pass = None
        return output


def _with_advice(error: InvalidArgument) -> InvalidArgument:
    return InvalidArgument(
        f"{error}. A prompt in several passes must be known before: CrumbCache(model, input_ids). "
        "To go on with many tokens at once, make a cache for all tokens so far")


def _before_pass(decoder: Any, args: Tuple[Any, ...],
                 kwargs: Dict[str, Any]) -> Optional[Tuple[Tuple[Any, ...], Dict[str, Any]]]:
    names = inspect.signature(decoder.forward).parameters if args else ()
    inputs = {**dict(zip(names, args)), **kwargs}
    cache = inputs.get("past_key_values")
    if not isinstance(cache, CrumbCache):
        return None
    if cache._decoder is not decoder:
        raise InvalidArgument("this CrumbCache was made for another model")
    set_active(cache)
    try:
        cache._begin_pass(inputs)
    except BaseException:
        set_active(None)
        cache._end_pass(None)
        raise
    return (), inputs


def _after_pass(decoder: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> Any:
    cache = active()
    if isinstance(cache, CrumbCache) and cache._decoder is decoder:
        set_active(None)
        return cache._end_pass(output)  # `output` is None if the pass raised an exception
    return None


def _hooked(model: Any) -> Any:
    """The model's decoder, with the hooks of this module, and "crumb" as its attention."""
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    decoder = model.base_model
    if _before_pass not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_before_pass, with_kwargs=True)
        decoder.register_forward_hook(_after_pass, with_kwargs=True, always_call=True)
    return decoder
