# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""A transformers cache whose rows lie in sequences of a Worker, and the hooks around a pass."""

import dataclasses
import inspect
from types import TracebackType
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple, Type

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from crumb.client import Client
from crumb.errors import FailedPrecondition, InvalidArgument, Unimplemented
from crumb.transformers._attention import ATTENTION, active_cache, set_active_cache
from crumb.transformers._model import check_supported, check_worker, open_worker
from crumb.worker import Sequence, Worker

# Seconds that a cache with a worker of its own waits at its end until its pages are published.
PUBLISH_SECONDS = 10.0


@dataclasses.dataclass
class _Row:
    """One row of the batch: `pads` pad columns on the left, and then the sequence's tokens."""

    sequence: Sequence
    pads: int

    @property
    def end(self) -> int:
        """The column of the next token."""
        return self.pads + self.sequence.length


@dataclasses.dataclass
class _Pass:
    """A forward pass that is under way. skipped: for each row how many leading columns of the pass
    are not fresh; equal to the number of columns if none is fresh."""

    ids: torch.Tensor
    skipped: List[int]
    appended: Set[int] = dataclasses.field(default_factory=set)
    attended: Set[int] = dataclasses.field(default_factory=set)

    def fresh(self) -> List[Tuple[int, int]]:
        """(row, first fresh column) of the rows that have fresh columns."""
        return [(row, skipped) for row, skipped in enumerate(self.skipped)
                if skipped < self.ids.shape[1]]


class _Layer(CacheLayerMixin):
    """What transformers sees of one layer of a CrumbCache."""

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
    "crumb", which computes as "sdpa" does wherever no CrumbCache is used.
    input_ids: [batch, columns] int64, the prompts; attention_mask: [batch, columns], 0 at the pad
    columns, which must be on the left; None: no padding. With the prompts the cache takes what
    crumbd has of them before the model runs, and they may come in passes of any length (chunked
    prefill). Without them the first pass of the model is the prompt, all of it, and nothing of it
    is taken from the cache.
    worker: one of `open_worker`, which several caches may use; None: one of this cache's own.
    socket_dir: crumbd's folder of sockets, for a worker of its own; None: no crumbd.
    publish: "all" pages, those of the "prompt", or "none". options: those of `open_worker`.

    Leaving a `with` block calls `finish` and `close`. Raises InvalidArgument for models, masks and
    arguments that cannot be served.
    """

    def __init__(self, model: Any, input_ids: Optional[torch.Tensor] = None,
                 attention_mask: Optional[torch.Tensor] = None, *,
                 worker: Optional[Worker] = None, socket_dir: Optional[str] = None,
                 publish: str = "all", **options: Any) -> None:
        check_supported(model)
        self._rows: List[_Row] = []
        self._prompt: Optional[torch.Tensor] = None
        self._pass: Optional[_Pass] = None
        self._finished = False
        self._publish = publish
        self._client: Optional[Client] = None
        self._own_worker: Optional[Worker] = None
        if worker is None:
            if socket_dir is not None:
                self._client = Client(socket_dir, process_name="transformers")
            worker = self._own_worker = open_worker(model, self._client, **options)
        elif socket_dir is not None or options:
            raise InvalidArgument("socket_dir and the options of open_worker are the worker's: "
                                  "give them to open_worker, not with worker=")
        check_worker(model, worker)
        self.worker = worker
        self._decoder = _hooked(model)
        super().__init__(layers=[_Layer(self, layer) for layer in range(worker.layers)])
        if input_ids is not None:
            self._begin(input_ids, attention_mask)

    @property
    def cached_tokens(self) -> List[int]:
        """For each row how many leading tokens of the prompt came from the cache: multiples of 64.
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
                row.sequence.finish()
        if timeout > 0:
            self.worker.wait_published(timeout)

    def reset(self) -> None:
        """Ends the sequences without publishing their recent windows; the next pass is a prompt."""
        for row in self._rows:
            row.sequence.close()
        self._rows, self._prompt, self._pass = [], None, None

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

    def _begin(self, ids: torch.Tensor, mask: Optional[torch.Tensor],
               cached_tokens_max: Optional[int] = None) -> None:
        """Starts a sequence for each row of [batch, columns] token ids."""
        if ids.dim() != 2 or ids.shape[1] == 0 or ids.is_floating_point():
            raise InvalidArgument(f"input_ids must be token ids [batch, columns]; it is "
                                  f"{list(ids.shape)} of {ids.dtype}")
        pads = _pads_of(mask, ids)
        rows: List[_Row] = []
        try:
            for row, skipped in enumerate(pads):
                rows.append(_Row(self.worker.begin(ids[row, skipped:], publish=self._publish,
                                                   cached_tokens_max=cached_tokens_max), skipped))
        except BaseException:
            for begun in rows:
                begun.sequence.close()
            raise
        self._rows, self._prompt, self._finished = rows, ids.clone(), False

    def _begin_pass(self, inputs: Dict[str, Any]) -> None:
        """Prepares a pass of the decoder; `inputs` are its arguments by name, which it changes."""
        _check_inputs(inputs, self._decoder)
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if self._pass is not None:
            self._end_pass(complete=False)
        if not self._rows:
            self._begin(ids, mask, cached_tokens_max=0)
        if ids.shape[0] != len(self._rows):
            raise InvalidArgument(f"the pass has {ids.shape[0]} rows, and the cache was made for "
                                  f"{len(self._rows)} (num_return_sequences and beams need rows of "
                                  "their own)")
        positions = inputs.get("position_ids")
        first = self._first_column(ids, mask, positions)
        self._check_mask(mask, first, ids)
        # A chunked prefill of generate() passes columns again that the cache has. They need not be
        # computed, but the model cannot compute fewer columns than one.
        drop = max(0, min(self.get_seq_length() - first, ids.shape[1] - 1))
        if drop > 0:
            ids = inputs["input_ids"] = ids[:, drop:]
            positions = None if positions is None else positions[:, drop:]
            first += drop
        inputs["position_ids"] = self._positions(first, ids, positions)
        inputs["attention_mask"] = None
        self._pass = _Pass(ids, [min(max(row.end - first, 0), ids.shape[1]) for row in self._rows])

    def _first_column(self, ids: torch.Tensor, mask: Optional[torch.Tensor],
                      positions: Optional[torch.Tensor]) -> int:
        """The column that a pass begins with: generate() leaves masks without padding out."""
        if mask is not None:
            return int(mask.shape[1] - ids.shape[1])
        if positions is not None and not any(row.pads for row in self._rows):
            return int(positions[0, 0])
        return self.get_seq_length()

    def _check_mask(self, mask: Optional[torch.Tensor], first: int, ids: torch.Tensor) -> None:
        """Checks that the pass continues the rows: its columns begin at `first`."""
        end = first + ids.shape[1]
        pads = torch.tensor([row.pads for row in self._rows])
        if mask is not None:
            expected = torch.arange(end) >= pads[:, None]
            if mask.shape != expected.shape or not torch.equal(mask.bool(), expected):
                raise InvalidArgument("the attention mask must be that of the prompts, padded on "
                                      "the left, with ones for all columns after them")
        if first < 0 or first > self.get_seq_length():
            raise InvalidArgument(f"the pass begins at column {first}, and the cache has the "
                                  f"columns before {self.get_seq_length()}")
        assert self._prompt is not None
        known = min(end, self._prompt.shape[1])
        if first < known:
            same = ids[:, :known - first] == self._prompt[:, first:known]
            if not bool((same | (torch.arange(first, known) < pads[:, None])).all()):
                raise InvalidArgument("the tokens of the pass are not those of the prompts that "
                                      "the cache was made for")
        if first < self.get_seq_length() >= self._prompt.shape[1]:
            raise InvalidArgument(f"the pass begins at column {first}, and the cache has the whole "
                                  f"prompt and {self.get_seq_length()} columns: it does not go "
                                  "back, make another cache")

    def _positions(self, first: int, ids: torch.Tensor,
                   given: Optional[torch.Tensor]) -> torch.Tensor:
        """Positions [batch, columns]: of a row's token t position t, whatever its padding, because
        pages are found by their tokens alone."""
        pads = torch.tensor([row.pads for row in self._rows])[:, None]
        columns = torch.arange(first, first + ids.shape[1])
        expected = columns - pads
        if given is not None and not bool(((given == expected) | (expected < 0)).all()):
            raise InvalidArgument("position_ids must count each row's tokens from 0, without its "
                                  "padding, because pages are found by their tokens alone")
        return expected.clamp(min=0)

    def _append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Appends the fresh rows of key and value, [batch, kv_heads, columns, head_dim]."""
        running = self._pass
        if running is None or active_cache() is not self:
            raise FailedPrecondition("this CrumbCache is used outside a forward pass of the model "
                                     "that it was made for")
        for row, begin in running.fresh():
            try:
                self._rows[row].sequence.append(layer, _bf16(key[row, :, begin:]),
                                                _bf16(value[row, :, begin:]))
            except InvalidArgument as error:
                raise InvalidArgument(
                    f"{error}. A prompt in several passes must be known before: "
                    "CrumbCache(model, input_ids). To go on with many tokens at once, make a cache "
                    "for all tokens so far") from None
        running.appended.add(layer)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of query, [batch, q_heads, columns, head_dim]: [batch, columns, q_heads,
        head_dim] in the same dtype. Columns that are not fresh are zeros, or NaN if no column is
        fresh: the logits of such a pass mean nothing."""
        running = self._pass
        if running is None or layer not in running.appended:
            raise FailedPrecondition(f"layer {layer} attends before it updates its CrumbCache")
        fresh = running.fresh()
        out = query.new_full(query.transpose(1, 2).shape, 0.0 if fresh else float("nan"))
        for row, begin in fresh:
            out[row, begin:] = self._rows[row].sequence.attend(layer, _bf16(query[row, :, begin:]))
        running.attended.add(layer)
        return out

    def _end_pass(self, complete: bool) -> None:
        """Adds the fresh tokens to the sequences, or drops them. Raises FailedPrecondition, and
        drops them, if the pass left layers out."""
        running, self._pass = self._pass, None
        if running is None:
            return
        layers = set(range(len(self.layers)))
        missing = layers - (running.appended & running.attended)
        for row, begin in running.fresh():
            accepted = running.ids[row, begin:] if complete and not missing else []
            self._rows[row].sequence.advance(accepted)
        if complete and missing:
            raise FailedPrecondition(f"layers {sorted(missing)} of {type(self._decoder).__name__} "
                                     "did not attend over the CrumbCache")


def _bf16(rows: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, head_dim] -> contiguous [tokens, heads, head_dim] BF16."""
    return rows.detach().transpose(0, 1).to(torch.bfloat16).contiguous()


def _pads_of(mask: Optional[torch.Tensor], ids: torch.Tensor) -> List[int]:
    """For each row the number of its pad columns, which must be on the left."""
    if mask is None:
        return [0] * ids.shape[0]
    if mask.shape != ids.shape:
        raise InvalidArgument(f"attention_mask is {list(mask.shape)}, and input_ids "
                              f"{list(ids.shape)}: the first pass has all of the prompt, unless "
                              "the cache knows it: CrumbCache(model, input_ids, attention_mask)")
    pads = [int(count) for count in (mask == 0).sum(1)]
    for row, count in enumerate(pads):
        if bool((mask[row, count:] == 0).any()) or count == mask.shape[1]:
            raise InvalidArgument(f"row {row} of attention_mask is not zeros on the left and ones "
                                  "on the right: pad on the left (padding_side=\"left\"), with a "
                                  "token in every row")
    return pads


def _check_inputs(inputs: Mapping[str, Any], decoder: Any) -> None:
    """Refuses what a pass over a CrumbCache cannot do."""
    if decoder.config._attn_implementation != ATTENTION:
        raise FailedPrecondition(
            f"the attention of {type(decoder).__name__} is {decoder.config._attn_implementation!r} "
            f"now: model.set_attn_implementation({ATTENTION!r}) before a pass with a CrumbCache")
    ids, mask, positions = (inputs.get(name) for name in
                            ("input_ids", "attention_mask", "position_ids"))
    if ids is None:
        raise InvalidArgument("a pass over a CrumbCache needs input_ids, because pages are found "
                              "by their tokens; inputs_embeds is not enough")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        raise InvalidArgument("the attention mask must be [batch, columns]: a CrumbCache attends "
                              "causally and knows no other pattern")
    if positions is not None and positions.dim() != 2:
        raise InvalidArgument(f"position_ids must be [batch, columns]; it is "
                              f"{list(positions.shape)}")
    if inputs.get("output_attentions"):
        raise InvalidArgument("a CrumbCache returns no attention weights: leave output_attentions "
                              "out")


def _before_pass(decoder: Any, args: Tuple[Any, ...],
                 kwargs: Dict[str, Any]) -> Optional[Tuple[Tuple[Any, ...], Dict[str, Any]]]:
    names = inspect.signature(decoder.forward).parameters if args else ()
    inputs = {**dict(zip(names, args)), **kwargs}
    cache = inputs.get("past_key_values")
    if not isinstance(cache, CrumbCache):
        return None
    if cache._decoder is not decoder:
        raise InvalidArgument("this CrumbCache was made for another model")
    cache._begin_pass(inputs)
    set_active_cache(cache)
    return (), inputs


def _after_pass(decoder: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> None:
    cache = active_cache()
    if cache is not None and cache._decoder is decoder:
        set_active_cache(None)
        cache._end_pass(complete=output is not None)  # None: the pass raised an exception


def _hooked(model: Any) -> Any:
    """The model's decoder, with the hooks of this module, and "crumb" as its attention."""
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    decoder = model.base_model
    if _before_pass not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_before_pass, with_kwargs=True)
        decoder.register_forward_hook(_after_pass, with_kwargs=True, always_call=True)
    return decoder
