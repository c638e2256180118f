# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""An engine over the C interface, crumb.h: made-up keys, values and queries on the CPU."""

import ctypes
import hashlib
import os

import cases

LAYERS, KV_HEADS, Q_HEADS, HEAD_DIM = 2, 2, 4, 64
TIMEOUT_MS = 10_000
LEAD_TOKEN_BYTES = 4096
OK = 0


class ClientOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("socket_dir", ctypes.c_char_p),
                ("address", ctypes.c_char_p), ("process_name", ctypes.c_char_p),
                ("engine", ctypes.c_char_p), ("staging_bytes", ctypes.c_uint64)]


class CWorkerOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("model", ctypes.c_char_p), ("weights", ctypes.c_char_p),
                ("layers", ctypes.c_uint32), ("kv_heads", ctypes.c_uint32),
                ("q_heads", ctypes.c_uint32), ("head_dim", ctypes.c_uint32),
                ("group_size", ctypes.c_uint32), ("history_bf16", ctypes.c_uint32),
                ("rotation", ctypes.c_char_p), ("rope", ctypes.c_char_p),
                ("prefill_block", ctypes.c_uint32), ("tenant", ctypes.c_char_p),
                ("names", ctypes.POINTER(ctypes.c_char_p)),
                ("values", ctypes.POINTER(ctypes.c_char_p)), ("fields", ctypes.c_size_t),
                ("recent_tokens", ctypes.c_uint32), ("scale", ctypes.c_float),
                ("soft_cap", ctypes.c_float), ("page_bytes_max", ctypes.c_uint64),
                ("begin_deadline_ms", ctypes.c_uint32), ("parallel_for", ctypes.c_void_p),
                ("parallel_context", ctypes.c_void_p), ("layer_begin", ctypes.c_uint32),
                ("layer_end", ctypes.c_uint32), ("head_begin", ctypes.c_uint32),
                ("head_end", ctypes.c_uint32), ("q_head_begin", ctypes.c_uint32),
                ("q_head_end", ctypes.c_uint32), ("publishes_nothing", ctypes.c_uint32)]


class SequenceOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extra", ctypes.c_char_p),
                ("extra_pages", ctypes.c_size_t), ("publish", ctypes.c_uint32),
                ("deadline_ms", ctypes.c_uint32)]


def rows(seed, heads):
    """bf16 values of magnitude 0.5 to 1 for so many heads of one token, by their seed."""
    count = heads * HEAD_DIM
    bits = int.from_bytes(hashlib.shake_128(seed.encode()).digest(2 * count), "little")
    mask = int.from_bytes(b"\x7f\x80" * count, "little")
    exponent = int.from_bytes(b"\x00\x3f" * count, "little")
    return ((bits & mask) | exponent).to_bytes(2 * count, "little")


def extra_of(request):
    """Digest of everything else that pages depend on: docs/formats/page-key.md."""
    parts = {}
    if request.cache_salt:
        parts[0] = f"salt {request.cache_salt}\n"
    for position, digest in request.images:
        page = position // cases.PAGE_TOKENS
        parts[page] = parts.get(page, "") + f"image {position % cases.PAGE_TOKENS} {digest}\n"
    pages = max(parts, default=-1) + 1
    return b"".join(hashlib.sha256(parts[page].encode()).digest() if page in parts else bytes(32)
                    for page in range(pages))


class Rank:
    """One rank's client, worker and sequence."""

    def __init__(self, c, check, socket_dir, engine, options, lora, rank):
        self.c, self.check = c, check
        names = {b"weight_format": options.weight_format.encode()}
        if lora:
            names[b"lora"] = lora.encode()
        self.client, self.worker = ctypes.c_void_p(), ctypes.c_void_p()
        self.sequence = ctypes.c_void_p()
        client = ClientOptions(size=ctypes.sizeof(ClientOptions), socket_dir=socket_dir.encode(),
                               engine=engine)
        check(c.crumb_client_open(ctypes.byref(client), ctypes.byref(self.client)))
        check(c.crumb_client_wait_connected(self.client, TIMEOUT_MS))
        self.keep = ((ctypes.c_char_p * len(names))(*names),
                     (ctypes.c_char_p * len(names))(*names.values()))
        worker = CWorkerOptions(
            size=ctypes.sizeof(CWorkerOptions), model=options.model.encode(),
            weights=options.weights.encode(), layers=LAYERS, kv_heads=KV_HEADS, q_heads=Q_HEADS,
            head_dim=HEAD_DIM, history_bf16=options.history == "bf16",
            rotation=options.method.encode(), rope=options.rope.encode(),
            tenant=options.tenant.encode(), names=self.keep[0], values=self.keep[1],
            fields=len(names), begin_deadline_ms=TIMEOUT_MS)
        check(c.crumb_rank_part(ctypes.byref(worker), rank, options.tensor_parallel, 0, 1))
        self.heads = range(worker.head_begin, worker.head_end or KV_HEADS)
        check(c.crumb_worker_open(self.client, ctypes.byref(worker), ctypes.byref(self.worker)))

    def run_pass(self, tokens, begin, seed, kept):
        """One pass over `tokens` at position `begin`, of which the first `kept` are accepted."""
        group = Q_HEADS // KV_HEADS
        count = len(tokens)
        out = (ctypes.c_float * (count * len(self.heads) * group * HEAD_DIM))()
        for layer in range(LAYERS):
            keys, values, queries = [], [], []
            for i, token in enumerate(tokens):
                of = f"{seed} {layer} {begin + i} {token}"
                for head in self.heads:
                    keys.append(rows(f"k {head} {of}", 1))
                    values.append(rows(f"v {head} {of}", 1))
                    queries.append(rows(f"q {head} {of}", group))
            self.check(self.c.crumb_sequence_append(self.sequence, layer, count, b"".join(keys),
                                                    b"".join(values)))
            self.check(self.c.crumb_sequence_attend(self.sequence, layer, count, b"".join(queries),
                                                    out))
        self.check(self.c.crumb_sequence_advance(self.sequence, (ctypes.c_int32 * kept)(
            *tokens[:kept]), kept))
        return bytes(out)[-len(self.heads) * group * HEAD_DIM * 4:]

    def finish(self):
        self.check(self.c.crumb_sequence_finish(self.sequence))
        self.check(self.c.crumb_worker_wait_published(self.worker, TIMEOUT_MS))

    def close(self):
        for handle, close in ((self.sequence, self.c.crumb_sequence_close),
                              (self.worker, self.c.crumb_worker_close),
                              (self.client, self.c.crumb_client_close)):
            close(handle)


class CEngine:
    """Implements cases.Engine. `library` is libcrumb.so, `socket_dir` crumbd's."""

    window_tokens = 256

    def __init__(self, library, socket_dir):
        self.c = ctypes.CDLL(str(library))
        self.c.crumb_message.restype = ctypes.c_char_p
        for close in (self.c.crumb_sequence_close, self.c.crumb_worker_close,
                      self.c.crumb_client_close):
            close.argtypes = [ctypes.c_void_p]
            close.restype = None
        self.socket_dir = str(socket_dir)
        self.options = None

    def check(self, code):
        if code != OK:
            raise RuntimeError(f"code {code}: {self.c.crumb_message().decode()}")

    def start(self, options):
        self.options = options

    def stop(self):
        self.options = None

    def begin(self, ranks, request):
        """The ranks' sequences: one leads, the others take the same prefix."""
        extra = extra_of(request)
        options = SequenceOptions(size=ctypes.sizeof(SequenceOptions), extra=extra or None,
                                  extra_pages=len(extra) // 32)
        prompt = (ctypes.c_int32 * len(request.tokens))(*request.tokens)
        cached = ctypes.c_uint32()
        token = ctypes.create_string_buffer(LEAD_TOKEN_BYTES)
        token_bytes = ctypes.c_size_t()
        self.check(self.c.crumb_sequence_lead(
            ranks[0].worker, prompt, len(prompt), ctypes.byref(options),
            ctypes.byref(ranks[0].sequence), ctypes.byref(cached), token,
            ctypes.c_size_t(LEAD_TOKEN_BYTES), ctypes.byref(token_bytes)))
        for rank in ranks[1:]:
            followed = ctypes.c_uint32()
            self.check(self.c.crumb_sequence_follow(
                rank.worker, token, token_bytes, prompt, len(prompt), ctypes.byref(options),
                ctypes.byref(rank.sequence), ctypes.byref(followed)))
            if followed.value != cached.value:
                raise RuntimeError(f"a rank has {followed.value} tokens, the first {cached.value}")
        return cached.value

    def run(self, request):
        options = self.options
        engine = os.urandom(16).replace(b"\0", b"\1")
        ranks = []
        try:
            for rank in range(options.tensor_parallel):
                ranks.append(Rank(self.c, self.check, self.socket_dir, engine, options,
                                  request.lora, rank))
            cached = self.begin(ranks, request)
            # A model's keys and values depend on all of this: a wrong hit gives another output.
            seed = f"{options} {request.lora} {request.images}".replace(
                f"tensor_parallel={options.tensor_parallel}", "")
            digest = hashlib.sha256()
            for rank in ranks:
                last = rank.run_pass(request.tokens[cached:], cached, seed,
                                     len(request.tokens) - cached)
                digest.update(self.generate(rank, request, seed) or last)
                rank.finish()
            return cases.Result(cached, digest.hexdigest())
        finally:
            for rank in ranks:
                rank.close()

    @staticmethod
    def generate(rank, request, seed):
        """Output token by token; behind the first one stand the drafts, which are rejected."""
        drafts = request.rejected_drafts
        last = b""
        for i, token in enumerate(request.output):
            proposed = (token, *drafts) if i == 0 else (token,)
            last = rank.run_pass(proposed, len(request.tokens) + i, seed, 1)
        return last
