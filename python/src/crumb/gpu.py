# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The KV cache of one model replica in the memory of one GPU, for batches on a CUDA stream.

Needs torch with CUDA, and a libcrumb that was built with CUDA.
"""

import ctypes
import dataclasses
import sys
from typing import Any, Dict, Optional, Sequence as SequenceOf, Tuple

from crumb import _abi, _tensors
from crumb._library import Handle, c, check, milliseconds, options_of
from crumb.client import Client
from crumb.errors import InvalidArgument
from crumb.worker import (Model, Rank, WorkerSettings, lead_token_bytes, read_counters,
                          sequence_options, worker_options)


@dataclasses.dataclass(frozen=True)
class GpuSettings:
    """Memory of a GpuWorker; every 0 takes the default that crumb_device_worker_options states.

    pages: private INT2 pages. sequences: that hold tokens at once. prompts: of those, inside their
    prompt. loads, load_pages: prefixes on their way to the device, and pages of one. draft_slots:
    tokens of a decode pass beside the first. pool_bytes: of the device pool that workers of a
    tenant share; 0: none. pool_peers: ordinals of devices whose pools are copied from. bf16_pages:
    BF16 history pages.
    """

    pages: int = 0
    sequences: int = 0
    prompts: int = 0
    loads: int = 0
    load_pages: int = 0
    passes_in_flight: int = 0
    draft_slots: int = 0
    pin_piece_bytes: int = 0
    pins_nothing: bool = False
    pool_copies_late: bool = False
    pool_bytes: int = 0
    pool_sink_bytes: int = 0
    pool_handle_bytes: int = 0
    pool_blank_pages: int = 0
    pool_blank_sinks: int = 0
    pool_peers: SequenceOf[int] = ()
    bf16_pages: int = 0


def _device_options(settings: GpuSettings) -> Any:
    peers = (ctypes.c_uint32 * max(1, len(settings.pool_peers)))(*settings.pool_peers)
    members = {field.name: int(getattr(settings, field.name))
               for field in dataclasses.fields(settings) if field.name != "pool_peers"}
    options = options_of(_abi.crumb_device_worker_options, pool_peers=ctypes.addressof(peers),
                         pool_peer_count=len(settings.pool_peers), **members)
    options.held = peers  # the struct has its address only
    return options


def current_stream(device: int) -> int:
    """torch's current CUDA stream of a device, as a cudaStream_t."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise InvalidArgument("import torch first, or give a stream")
    return int(torch.cuda.current_stream(device).cuda_stream)


def torch_device(ordinal: int) -> Any:
    """The torch.device of a CUDA device, which tensors of its batches must be on."""
    return sys.modules["torch"].device("cuda", ordinal)


class GpuSequence(Handle):
    """Keys and values of one request, in device memory. Made by a GpuWorker."""

    def __init__(self, worker: "GpuWorker", handle: Any, cached_tokens: int) -> None:
        self._worker = worker
        self._own(handle, c.crumb_device_sequence_close)
        #: Leading prompt tokens whose keys and values came from the cache: a multiple of 64. They
        #: may still be on their way: the batch waits for them on its stream.
        self.cached_tokens = cached_tokens

    @property
    def length(self) -> int:
        """Tokens held: the position of the next one."""
        return int(c.crumb_device_sequence_length(self._open_handle()))

    @property
    def pass_tokens_max(self) -> int:
        """Most tokens that its next pass may bring."""
        return int(c.crumb_device_sequence_pass_tokens_max(self._open_handle()))


class Batch(Handle):
    """Passes of several sequences on one CUDA stream. Made by `GpuWorker.batch`.

    A pass is `prepare`, `start`, `append` and `attend` of every layer, `advance`. Everything is
    enqueued on the stream; the calls return at once. The calls between `prepare` and `advance` of a
    decode batch may be captured into a CUDA graph once and launched for every pass. A batch and the
    sequences of its pass are used by one thread at a time.
    """

    def __init__(self, worker: "GpuWorker", handle: Any, places: int, output_f32: bool) -> None:
        self._worker = worker
        self._own(handle, c.crumb_device_batch_close)
        # Rows of a decode pass, whatever the number of its sequences; 0: a batch of prompts, whose
        # passes have a row for each fresh token.
        self._places = places
        self._rows = 0  # number of rows of the pass under way
        #: Whether `attend` returns float32 (else BF16).
        self.output_f32 = output_f32
        self._kv_heads, self._q_heads = worker.kv_heads, worker.q_heads
        self._head_dim = worker.head_dim
        self._device: Any = None  # torch's, once there is a tensor

    def prepare(self, entries: SequenceOf[Tuple[GpuSequence, int]]) -> None:
        """Begins a pass of these sequences, each with its number of fresh tokens.

        Raises ResourceExhausted if device memory has no room; nothing has changed then.
        """
        array = (_abi.crumb_pass_entry * max(1, len(entries)))()
        for entry, (sequence, tokens) in zip(array, entries):
            entry.sequence, entry.tokens = sequence._open_handle(), tokens
        self._check(c.crumb_device_batch_prepare(self._handle, array, len(entries)))
        self._rows = self._places or sum(tokens for _, tokens in entries)

    def start(self) -> None:
        """Enqueues the work before the first layer."""
        self._check(c.crumb_device_batch_start(self._handle))

    def _fits(self, value: Any, heads: int, dtype: Any) -> bool:
        """Whether a tensor has the pass's rows, contiguous on the batch's device, whatever leading
        dimensions it has. Its checks are the fastest ones of torch:
        python/bench/overhead.py."""
        return (value.dtype is dtype and value.size(-1) == self._head_dim and
                value.size(-2) == heads and
                value.numel() == self._rows * heads * self._head_dim and
                value.device == self._device and value.is_contiguous())

    def _error(self, value: Any, heads: int, dtype: str, name: str) -> InvalidArgument:
        have = (f"{list(value.shape)} {value.dtype} on {value.device}"
                f"{'' if value.is_contiguous() else ', not contiguous'}"
                if hasattr(value, "data_ptr") else f"a {type(value).__name__}")
        return InvalidArgument(
            f"{name} must be a contiguous torch tensor [..., {heads}, {self._head_dim}] of {dtype} "
            f"on {self._device}, with the {self._rows} rows of the pass; it is {have}")

    def _address(self, value: Any, heads: int, dtype: str, name: str) -> Any:
        """The address of rows of all fresh tokens."""
        try:
            if self._device is None:
                self._device = torch_device(self._worker.device)
            if self._fits(value, heads, getattr(sys.modules["torch"], dtype)):
                return value.data_ptr()
        except (AttributeError, IndexError, KeyError, TypeError):
            pass
        raise self._error(value, heads, dtype, name)

    def append(self, layer: int, k: Any, v: Any) -> None:
        """Adds the fresh tokens' rows of one layer.

        k, v: BF16 on the device, contiguous: [sequences, tokens, kv_heads, head_dim], with rows for
        all places of the batch; of a batch of prompts [all fresh tokens, kv_heads, head_dim]. The
        stream reads them: their memory must stay as it is until the stream has passed. `attend` of
        a batch of prompts reads them, too.
        """
        code = c.crumb_device_batch_append(self._handle, layer,
                                           self._address(k, self._kv_heads, "bfloat16", "k"),
                                           self._address(v, self._kv_heads, "bfloat16", "v"))
        if code:
            self._check(code)

    def attend(self, layer: int, q: Any, out: Any = None) -> Any:
        """Attention of the fresh tokens. Shapes as `append`, with q_heads. Returns out.

        out: BF16, or float32 for a batch of output "f32"; None: a new tensor. Its rows at places
        without a sequence are not written.
        """
        query = self._address(q, self._q_heads, "bfloat16", "q")
        dtype = "float32" if self.output_f32 else "bfloat16"
        if out is None:
            torch = sys.modules["torch"]
            out = torch.empty_like(q, dtype=getattr(torch, dtype))
        code = c.crumb_device_batch_attend(self._handle, layer, query,
                                           self._address(out, self._q_heads, dtype, "out"))
        if code:
            self._check(code)
        return out

    def advance(self, token_ids: Any, counts: SequenceOf[int]) -> None:
        """Ends a pass: of entry i the first counts[i] fresh tokens stay, the next counts[i] ones of
        `token_ids`. Raises DataLoss if cached pages of the sequences that the message names came
        damaged."""
        address, total, held = _tensors.tokens(token_ids)
        if total != sum(counts):
            raise InvalidArgument(f"{total} token ids for counts that add up to {sum(counts)}")
        kept = (ctypes.c_uint32 * max(1, len(counts)))(*counts)
        self._check(c.crumb_device_batch_advance(self._handle, address, kept, len(counts)))
        del held

    def fork(self, sequence: GpuSequence) -> GpuSequence:
        """Another sequence that continues from here; pages are shared. Between passes only."""
        handle = ctypes.c_void_p()
        self._check(c.crumb_device_batch_fork(self._handle, sequence._open_handle(),
                                              ctypes.byref(handle)))
        return GpuSequence(self._worker, handle, sequence.cached_tokens)

    def finish(self, sequence: GpuSequence) -> None:
        """Publishes every full page of a sequence, which is still to be closed."""
        self._check(c.crumb_device_batch_finish(self._handle, sequence._open_handle()))


class GpuWorker(Handle):
    """The KV cache of one model replica, or of one rank of it, on a CUDA device. Thread-safe.

    client: None: no crumbd. Raises FailedPrecondition if libcrumb was built without CUDA,
    Unavailable if the device does not exist, ResourceExhausted if its memory does not suffice.
    """

    def __init__(self, client: Optional[Client], model: Model, *, device: int = 0,
                 rank: Rank = Rank(), settings: WorkerSettings = WorkerSettings(),
                 gpu: GpuSettings = GpuSettings()) -> None:
        options = worker_options(model, rank, settings)
        self.model, self.rank, self.device, self.gpu = model, rank, device, gpu
        self.layers = (options.layer_end - options.layer_begin) or model.layers
        self.kv_heads = (options.head_end - options.head_begin) or model.kv_heads
        self.q_heads = (options.q_head_end - options.q_head_begin) or model.q_heads
        self.head_dim = model.head_dim
        opened = ctypes.c_void_p()
        # Without a client or a worker before, this is the call that loads the library's core.
        check(c.crumb_device_open(b"cuda", device, ctypes.byref(opened)))
        try:
            handle = ctypes.c_void_p()
            memory = _device_options(gpu)
            check(c.crumb_device_worker_open(None if client is None else client._open_handle(),
                                             opened, ctypes.byref(options), ctypes.byref(memory),
                                             ctypes.byref(handle)))
        finally:
            c.crumb_device_close(opened)  # the worker keeps the device alive
        self._own(handle, c.crumb_device_worker_close)

    def begin(self, token_ids: Any, **options: Any) -> GpuSequence:
        """Begins a sequence: `Worker.begin`."""
        address, count, held = _tensors.tokens(token_ids)
        wanted, kept = sequence_options(**options)
        handle, cached = ctypes.c_void_p(), ctypes.c_uint32()
        self._check(c.crumb_device_sequence_begin(self._handle, address, count,
                                                  ctypes.byref(wanted), ctypes.byref(handle),
                                                  ctypes.byref(cached)))
        del held, kept
        return GpuSequence(self, handle, cached.value)

    def lead(self, token_ids: Any, **options: Any) -> Tuple[GpuSequence, bytes]:
        """Begins a sequence for all ranks: `Worker.lead`."""
        address, count, held = _tensors.tokens(token_ids)
        wanted, kept = sequence_options(**options)
        handle, cached, size = ctypes.c_void_p(), ctypes.c_uint32(), ctypes.c_size_t()
        token = ctypes.create_string_buffer(lead_token_bytes(count))
        self._check(c.crumb_device_sequence_lead(self._handle, address, count,
                                                 ctypes.byref(wanted), ctypes.byref(handle),
                                                 ctypes.byref(cached), token, len(token),
                                                 ctypes.byref(size)))
        del held, kept
        return GpuSequence(self, handle, cached.value), token.raw[:size.value]

    def follow(self, token: bytes, token_ids: Any, **options: Any) -> GpuSequence:
        """Begins the sequence that a rank leads: `Worker.follow`."""
        address, count, held = _tensors.tokens(token_ids)
        wanted, kept = sequence_options(**options)
        handle, cached = ctypes.c_void_p(), ctypes.c_uint32()
        self._check(c.crumb_device_sequence_follow(self._handle, token, len(token), address,
                                                   count, ctypes.byref(wanted),
                                                   ctypes.byref(handle), ctypes.byref(cached)))
        del held, kept
        return GpuSequence(self, handle, cached.value)

    def batch(self, *, sequences: int = 1, tokens: int = 1, pages: int = 0, prompts: bool = False,
              output: str = "bf16", stream: Optional[int] = None) -> Batch:
        """A batch on a CUDA stream.

        sequences: places. tokens: of every sequence in a decode pass; with `prompts`, of one at
        most. pages: of one sequence; 0: 2,048. prompts: passes bring chunks of prompts. output:
        "bf16" or "f32". stream: a cudaStream_t; None: torch's current stream of the device.
        """
        if output not in ("bf16", "f32"):
            raise InvalidArgument(f'output is "bf16" or "f32", not {output!r}')
        options = options_of(
            _abi.crumb_device_batch_options,
            stream=current_stream(self.device) if stream is None else stream,
            prompts=int(prompts), sequences=sequences, tokens=tokens, pages=pages,
            output_f32=int(output == "f32"))
        handle = ctypes.c_void_p()
        self._check(c.crumb_device_batch_open(self._handle, ctypes.byref(options),
                                              ctypes.byref(handle)))
        return Batch(self, handle, 0 if prompts else sequences * tokens, output == "f32")

    def wait_published(self, timeout: float) -> None:
        """Waits until pages are published: `Worker.wait_published`."""
        self._check(c.crumb_device_worker_wait_published(self._handle, milliseconds(timeout)))

    def counters(self) -> Dict[str, int]:
        """Returns the counters of `Worker.counters`."""
        code, counters = read_counters(c.crumb_device_worker_read_counters, self._handle)
        self._check(code)
        return counters
