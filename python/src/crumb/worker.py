# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The KV cache of one model replica in host memory, attended on the CPU."""

import ctypes
import dataclasses
from typing import Any, Dict, Mapping, Optional, Sequence as SequenceOf, Tuple

from crumb import _abi, _tensors
from crumb._library import (Handle, c, check, milliseconds, options_of, string_arrays, text)
from crumb.client import KEY_BYTES, PAGE_TOKENS, Client
from crumb.errors import InvalidArgument

PUBLISH = {"all": 0, "prompt": 1, "none": 2}


@dataclasses.dataclass(frozen=True)
class Model:
    """Everything that keys and values of a model depend on; equal models share pages.

    model: a name for people and metrics. weights: a digest of the checkpoint, or whatever changes
    when the weights do. rope: the effective RoPE configuration, as the engine writes it.
    history: "int2" stores history pages as 2-bit integers, "bf16" as they are.
    rotation: path of a rotation file (`crumb calibrate`), "hadamard" (data-free) or "identity".
    group_size: elements that share a scale; 0: the lesser of 128 and head_dim.
    prefill_block: positions after which windows are stored in the prompt; 0: 8,192.
    tenant: None: the default tenant. fields: further keyspace fields (LoRA id, weight format...).
    """

    model: str
    weights: str
    layers: int
    kv_heads: int
    q_heads: int
    head_dim: int
    group_size: int = 0
    history: str = "int2"
    rotation: str = "hadamard"
    rope: str = ""
    prefill_block: int = 0
    tenant: Optional[str] = None
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Rank:
    """The part of an engine that a process holds: its ranks in tensor and pipeline parallelism."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """Settings of a process that pages do not depend on.

    recent_tokens: least length of the BF16 window, a multiple of 64; 0: 256. scale: of q.k; 0:
    1 / sqrt(head_dim). soft_cap: of logits; 0: none. page_bytes_max: private memory for pages, in
    bytes; 0: 16 GiB. begin_deadline: seconds that `begin` may wait for pages; 0: 0.2.
    windows: of each layer of the model, how many of the last positions a token attends; 0: all of
    them; empty: all layers attend everything. sink_logits: of each layer of the model and each of
    its query heads, the learned logit that joins the softmax sum; empty: there are none.
    """

    recent_tokens: int = 0
    scale: float = 0.0
    soft_cap: float = 0.0
    page_bytes_max: int = 0
    begin_deadline: float = 0.0
    windows: SequenceOf[int] = ()
    sink_logits: SequenceOf[SequenceOf[float]] = ()


def _attention_arrays(model: Model, settings: WorkerSettings) -> Tuple[Any, Any]:
    """The windows and sink logits of all layers as C arrays; None: there are none."""
    windows, logits = None, None
    if len(settings.windows):
        if len(settings.windows) != model.layers or min(settings.windows) < 0:
            raise InvalidArgument(f"windows has {model.layers} entries (one a layer) of at least "
                                  f"0, not {list(settings.windows)}")
        windows = (ctypes.c_uint32 * model.layers)(*settings.windows)
    if len(settings.sink_logits):
        rows = [[float(logit) for logit in row] for row in settings.sink_logits]
        if len(rows) != model.layers or any(len(row) != model.q_heads for row in rows):
            raise InvalidArgument(f"sink_logits has {model.layers} rows (one a layer) of "
                                  f"{model.q_heads} entries (one a query head)")
        values = [logit for row in rows for logit in row]
        logits = (ctypes.c_float * len(values))(*values)
    return windows, logits


def worker_options(model: Model, rank: Rank, settings: WorkerSettings) -> Any:
    """The C struct for a worker of this model, with the rank's part filled in."""
    if model.history not in ("int2", "bf16"):
        raise InvalidArgument(f'history is "int2" or "bf16", not {model.history!r}')
    names, values = string_arrays(model.fields)
    windows, logits = _attention_arrays(model, settings)
    options = options_of(
        _abi.crumb_worker_options, model=text(model.model), weights=text(model.weights),
        layers=model.layers, kv_heads=model.kv_heads, q_heads=model.q_heads,
        head_dim=model.head_dim, group_size=model.group_size,
        history_bf16=int(model.history == "bf16"), rotation=text(model.rotation),
        rope=text(model.rope), prefill_block=model.prefill_block, tenant=text(model.tenant),
        names=names, values=values, fields=len(model.fields),
        recent_tokens=settings.recent_tokens, scale=settings.scale, soft_cap=settings.soft_cap,
        page_bytes_max=settings.page_bytes_max,
        begin_deadline_ms=milliseconds(settings.begin_deadline),
        windows=windows and ctypes.addressof(windows),
        sink_logits=logits and ctypes.addressof(logits))
    options.held = windows, logits  # the struct has their addresses only
    if rank != Rank():
        check(c.crumb_rank_part(ctypes.byref(options), rank.tp_rank, rank.tp_size, rank.pp_rank,
                                rank.pp_size))
    return options


def sequence_options(publish: str = "all", deadline: Optional[float] = None,
                     host_memory_only: bool = False, cached_tokens_max: Optional[int] = None,
                     extra: SequenceOf[bytes] = ()) -> Tuple[Any, Any]:
    """Returns the C struct for a sequence and the object that keeps its array alive.

    publish: "all" pages, those of the "prompt", or "none". deadline: seconds to wait for cached
    pages; None: the worker's. host_memory_only: take only pages of this worker and of host memory.
    cached_tokens_max: leading prompt tokens that the cache may supply; None: all it has. extra:
    digests of 32 bytes of other inputs of leading pages (images, a cache salt), one a page.
    """
    if publish not in PUBLISH:
        raise InvalidArgument(f"publish is one of {', '.join(PUBLISH)}, not {publish!r}")
    for digest in extra:
        if len(digest) != KEY_BYTES:
            raise InvalidArgument(f"a digest in extra has {KEY_BYTES} bytes, not {len(digest)}")
    joined = ctypes.create_string_buffer(b"".join(extra), max(1, KEY_BYTES * len(extra)))
    options = options_of(
        _abi.crumb_sequence_options, extra=ctypes.addressof(joined), extra_pages=len(extra),
        publish=PUBLISH[publish], deadline_ms=milliseconds(deadline or 0),
        host_memory_only=int(host_memory_only),
        cached_tokens_max_plus_one=0 if cached_tokens_max is None else cached_tokens_max + 1)
    return options, joined


def read_counters(read: Any, handle: Any) -> Tuple[int, Dict[str, int]]:
    """A worker's counters by name, with the status code of the call."""
    counters = options_of(_abi.crumb_worker_counters)
    code = read(handle, ctypes.byref(counters))
    names = [field[0] for field in _abi.crumb_worker_counters._fields_ if field[0] != "size"]
    return code, {name: getattr(counters, name) for name in names}


def lead_token_bytes(count: int) -> int:
    """CRUMB_LEAD_TOKEN_BYTES of crumb.h."""
    return 256 + count // PAGE_TOKENS


class Sequence(Handle):
    """Keys and values of one request. Made by a Worker; used by one thread at a time.

    A forward pass over n fresh tokens is `append` and `attend` of every layer, in order, and then
    `advance`. The prompt may come in passes of any length; a pass does not cross its end. Layers
    and heads are those of the worker's rank, counted from 0.
    """

    def __init__(self, worker: "Worker", handle: Any, cached_tokens: int) -> None:
        self._worker = worker
        self._own(handle, c.crumb_sequence_close)
        self._kv_heads, self._q_heads = worker.kv_heads, worker.q_heads
        self._head_dim = worker.head_dim
        #: Leading prompt tokens whose keys and values came from the cache: a multiple of 64.
        self.cached_tokens = cached_tokens
        #: `attend` returns float32.
        self.output_f32 = True

    @property
    def length(self) -> int:
        """Tokens held: the position of the next one."""
        return int(c.crumb_sequence_length(self._open_handle()))

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Adds the fresh tokens' rows of one layer.

        k, v: [tokens, kv_heads, head_dim] BF16 on the CPU, contiguous, after QK-norm and RoPE; not
        kept. Raises ResourceExhausted if no memory for pages is left.
        """
        tokens = _tensors.rows_of(k, 2 * self._kv_heads * self._head_dim)
        shape = (tokens, self._kv_heads, self._head_dim)
        code = c.crumb_sequence_append(self._handle, layer, tokens, _tensors.bf16(k, shape, "k"),
                                       _tensors.bf16(v, shape, "v"))
        if code:
            self._check(code)

    def attend(self, layer: int, q: Any, out: Any = None) -> Any:
        """Causal attention of the pass's fresh tokens over everything held, themselves included.

        q: [tokens, q_heads, head_dim] BF16 on the CPU, contiguous. out: the same shape in float32;
        None: a new tensor of q's library. Returns out. REQUIRES: `append` of this layer before.
        """
        tokens = _tensors.rows_of(q, 2 * self._q_heads * self._head_dim)
        shape = (tokens, self._q_heads, self._head_dim)
        if out is None:
            out = _tensors.new_f32(q, shape)
        code = c.crumb_sequence_attend(self._handle, layer, tokens, _tensors.bf16(q, shape, "q"),
                                       _tensors.f32_out(out, shape, "out"))
        if code:
            self._check(code)
        return out

    def advance(self, token_ids: Any) -> None:
        """Ends a pass: these tokens of it are part of the sequence now, the rest is dropped."""
        address, count, held = _tensors.tokens(token_ids)
        self._check(c.crumb_sequence_advance(self._handle, address, count))
        del held

    def fork(self) -> "Sequence":
        """Another sequence that continues from here; pages are shared. Between passes only."""
        handle = ctypes.c_void_p()
        self._check(c.crumb_sequence_fork(self._handle, ctypes.byref(handle)))
        return Sequence(self._worker, handle, self.cached_tokens)

    def finish(self) -> None:
        """Publishes every full page, also those in the recent window; without it these are lost.
        Returns at once: `Worker.wait_published` waits. The sequence is still to be closed."""
        self._check(c.crumb_sequence_finish(self._handle))


class Worker(Handle):
    """The KV cache of one model replica, or of one rank of it. Thread-safe.

    client: None: no crumbd; nothing is fetched and nothing published. kv_heads, q_heads, layers:
    those of this rank, which tensors of its sequences have.
    """

    def __init__(self, client: Optional[Client], model: Model, *, rank: Rank = Rank(),
                 settings: WorkerSettings = WorkerSettings()) -> None:
        options = worker_options(model, rank, settings)
        self.model, self.rank = model, rank
        self.layers = (options.layer_end - options.layer_begin) or model.layers
        self.kv_heads = (options.head_end - options.head_begin) or model.kv_heads
        self.q_heads = (options.q_head_end - options.q_head_begin) or model.q_heads
        self.head_dim = model.head_dim
        handle = ctypes.c_void_p()
        check(c.crumb_worker_open(None if client is None else client._open_handle(),
                                  ctypes.byref(options), ctypes.byref(handle)))
        self._own(handle, c.crumb_worker_close)

    def begin(self, token_ids: Any, **options: Any) -> Sequence:
        """Starts a request over a prompt, with the longest cached prefix of it.

        options: those of `sequence_options`. A late or failed fetch is a miss, not an error:
        `cached_tokens` of the result need no computing, the rest (at least one token) does.
        """
        address, count, held = _tensors.tokens(token_ids)
        wanted, kept = sequence_options(**options)
        handle, cached = ctypes.c_void_p(), ctypes.c_uint32()
        self._check(c.crumb_sequence_begin(self._handle, address, count, ctypes.byref(wanted),
                                           ctypes.byref(handle), ctypes.byref(cached)))
        del held, kept
        return Sequence(self, handle, cached.value)

    def lead(self, token_ids: Any, **options: Any) -> Tuple[Sequence, bytes]:
        """`begin` for engines of several ranks: takes the longest prefix that exists for all layers
        and heads. Send the returned bytes to the other ranks, which `follow`."""
        address, count, held = _tensors.tokens(token_ids)
        wanted, kept = sequence_options(**options)
        handle, cached, size = ctypes.c_void_p(), ctypes.c_uint32(), ctypes.c_size_t()
        token = ctypes.create_string_buffer(lead_token_bytes(count))
        self._check(c.crumb_sequence_lead(self._handle, address, count, ctypes.byref(wanted),
                                          ctypes.byref(handle), ctypes.byref(cached), token,
                                          len(token), ctypes.byref(size)))
        del held, kept
        return Sequence(self, handle, cached.value), token.raw[:size.value]

    def follow(self, token: bytes, token_ids: Any, **options: Any) -> Sequence:
        """Begins with the prefix of the rank that led with these tokens and options.

        Raises Aborted if this rank cannot have all of it: lead again with the cached_tokens_max
        that the message names.
        """
        address, count, held = _tensors.tokens(token_ids)
        wanted, kept = sequence_options(**options)
        handle, cached = ctypes.c_void_p(), ctypes.c_uint32()
        self._check(c.crumb_sequence_follow(self._handle, token, len(token), address, count,
                                            ctypes.byref(wanted), ctypes.byref(handle),
                                            ctypes.byref(cached)))
        del held, kept
        return Sequence(self, handle, cached.value)

    def wait_published(self, timeout: float) -> None:
        """Waits until everything that was queued for publishing was published or dropped. Raises
        DeadlineExceeded after `timeout` seconds."""
        self._check(c.crumb_worker_wait_published(self._handle, milliseconds(timeout)))

    def counters(self) -> Dict[str, int]:
        """Counters since the worker was opened, by the names of crumb_worker_counters."""
        code, counters = read_counters(c.crumb_worker_read_counters, self._handle)
        self._check(code)
        return counters
