# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""A GPU for tests without one: the C library's device functions over sequences in host memory.

`on_cpu()` replaces them for crumb.GpuWorker and Batch; tensors on the CPU then stand for those of a
device. The functions keep the order of a pass, the number of entries, and the memory of prompts
that docs/device_worker.md states, and fail where the library does. They compute at once, so they
say nothing about streams.
"""

import contextlib
import ctypes
import dataclasses
import itertools
from unittest import mock

from crumb import _abi, _library, gpu, transformers

OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 0, 3, 8, 9
DRAFT_SLOTS = 7


@dataclasses.dataclass
class _Worker:
    handle: int
    shape: tuple  # KV heads, query heads, head_dim
    block: int
    prompts: int
    sequences: int
    rings: set = dataclasses.field(default_factory=set)  # sequences with the memory of a prompt
    live: set = dataclasses.field(default_factory=set)   # sequences that hold rows


@dataclasses.dataclass
class _Sequence:
    worker: _Worker
    prompt: int


@dataclasses.dataclass
class _Batch:
    worker: _Worker
    options: object
    entries: list = dataclasses.field(default_factory=list)
    started: bool = False


class DeviceLibrary:
    """Stands for the C library in crumb.gpu. log: the tokens of each entry of each pass. opened:
    the options of each batch."""

    def __init__(self):
        self._workers, self._sequences, self._batches = {}, {}, {}
        self._numbers = itertools.count(1)
        self.log, self.opened = [], []

    def __getattr__(self, name):
        return getattr(_library.c, name)

    def crumb_device_open(self, back_end, ordinal, out):
        out._obj.value = 1
        return OK

    def crumb_device_close(self, device):
        return None

    def crumb_device_worker_open(self, client, device, options, memory, out):
        code = _library.c.crumb_worker_open(client, options, out)
        if code == OK:
            model, memory = options._obj, memory._obj
            self._workers[out._obj.value] = _Worker(
                out._obj.value, (model.kv_heads, model.q_heads, model.head_dim),
                model.prefill_block or 8192, memory.prompts or 2, memory.sequences or 64)
        return code

    def crumb_device_worker_close(self, worker):
        del self._workers[worker]
        _library.c.crumb_worker_close(worker)

    def crumb_device_worker_wait_published(self, worker, timeout):
        return _library.c.crumb_worker_wait_published(worker, timeout)

    def crumb_device_worker_read_counters(self, worker, out):
        return _library.c.crumb_worker_read_counters(worker, out)

    def crumb_device_sequence_begin(self, worker, tokens, count, options, out, cached):
        code = _library.c.crumb_sequence_begin(worker, tokens, count, options, out, cached)
        if code == OK:
            self._sequences[out._obj.value] = _Sequence(self._workers[worker], count)
        return code

    def crumb_device_sequence_close(self, sequence):
        worker = self._sequences.pop(sequence).worker
        worker.rings.discard(sequence)
        worker.live.discard(sequence)
        _library.c.crumb_sequence_close(sequence)

    def crumb_device_sequence_length(self, sequence):
        return _library.c.crumb_sequence_length(sequence)

    def _in_prompt(self, sequence):
        return _library.c.crumb_sequence_length(sequence) < self._sequences[sequence].prompt

    def crumb_device_sequence_pass_tokens_max(self, sequence):
        if not self._in_prompt(sequence):
            return 1 + DRAFT_SLOTS
        length, block = (_library.c.crumb_sequence_length(sequence),
                         self._sequences[sequence].worker.block)
        return min(self._sequences[sequence].prompt, length // block * block + block) - length

    def crumb_device_batch_open(self, worker, options, out):
        copy = type(options._obj).from_buffer_copy(options._obj)
        if not copy.prompts and copy.tokens > 1 + DRAFT_SLOTS:
            return INVALID_ARGUMENT
        out._obj.value = next(self._numbers)
        self.opened.append(copy)
        self._batches[out._obj.value] = _Batch(self._workers[worker], copy)
        return OK

    def crumb_device_batch_close(self, batch):
        del self._batches[batch]

    def crumb_device_batch_prepare(self, batch, entries, count):
        held = self._batches[batch]
        worker, prompts = held.worker, bool(held.options.prompts)
        if held.entries:
            return FAILED_PRECONDITION
        wanted = [(entry.sequence, entry.tokens) for entry in entries[:count]]
        for sequence, tokens in wanted:
            most = min(held.options.tokens, self.crumb_device_sequence_pass_tokens_max(sequence))
            least = 1 if prompts else held.options.tokens
            if self._in_prompt(sequence) != prompts or not least <= tokens <= most:
                return INVALID_ARGUMENT
        if not 0 < count <= held.options.sequences or len(dict(wanted)) < count:
            return INVALID_ARGUMENT
        names = {sequence for sequence, _ in wanted}
        rings = worker.rings | names if prompts else worker.rings - names
        if len(rings) > worker.prompts or len(worker.live | names) > worker.sequences:
            return RESOURCE_EXHAUSTED
        worker.rings, worker.live = rings, worker.live | names
        if any(_library.c.crumb_sequence_length(sequence) + tokens > 64 * (held.options.pages + 6)
               for sequence, tokens in wanted):
            return INVALID_ARGUMENT
        held.entries, held.started = wanted, False
        self.log.append([tokens for _, tokens in wanted])
        return OK

    def crumb_device_batch_start(self, batch):
        self._batches[batch].started = True
        return OK

    def _parts(self, batch, heads):
        """(sequence, tokens, bytes of BF16 rows before it) of a pass."""
        before = 0
        for sequence, tokens in batch.entries:
            yield sequence, tokens, before
            before += tokens * heads * batch.worker.shape[2] * 2

    def crumb_device_batch_append(self, batch, layer, k, v):
        held = self._batches[batch]
        if not held.started:
            return FAILED_PRECONDITION
        for sequence, tokens, offset in self._parts(held, held.worker.shape[0]):
            code = _library.c.crumb_sequence_append(sequence, layer, tokens, k + offset, v + offset)
            if code:
                return code
        return OK

    def crumb_device_batch_attend(self, batch, layer, q, out):
        import torch
        held = self._batches[batch]
        _, heads, head_dim = held.worker.shape
        for sequence, tokens, offset in self._parts(held, heads):
            found = torch.empty(tokens * heads * head_dim)
            code = _library.c.crumb_sequence_attend(sequence, layer, tokens, q + offset,
                                                    found.data_ptr())
            if code:
                return code
            if not held.options.output_f32:
                found = found.bfloat16()
            size = found.numel() * found.element_size()
            ctypes.memmove(out + offset * size // (tokens * heads * head_dim * 2),
                           found.data_ptr(), size)
        return OK

    def crumb_device_batch_advance(self, batch, tokens, counts, entries):
        held = self._batches[batch]
        if entries != len(held.entries):
            return INVALID_ARGUMENT
        offset = 0
        for (sequence, _), count in zip(held.entries, counts):
            address = None if count == 0 else tokens + 4 * offset
            code = _library.c.crumb_sequence_advance(sequence, address, count)
            if code:
                return code
            offset += count
        held.entries = []
        return OK

    def crumb_device_batch_finish(self, batch, sequence):
        if self._batches[batch].entries:
            return FAILED_PRECONDITION
        return _library.c.crumb_sequence_finish(sequence)


@contextlib.contextmanager
def on_cpu():
    """Yields the DeviceLibrary that crumb.gpu uses in this block."""
    import torch
    library = DeviceLibrary()
    cpu = torch.device("cpu")
    with mock.patch.object(gpu, "c", library), \
            mock.patch.object(gpu, "torch_device", lambda ordinal: cpu), \
            mock.patch.object(transformers._model, "torch_device", lambda ordinal: cpu), \
            mock.patch.object(transformers._passes, "current_stream", lambda device: 0):
        yield library


def worker_of(cpu_worker, client=None, **settings):
    """A GpuWorker of the same model as a Worker. settings: of crumb.GpuSettings."""
    return gpu.GpuWorker(client, cpu_worker.model, gpu=gpu.GpuSettings(**settings))


assert _abi.CRUMB_ABI_VERSION >= 2  # device workers
