# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""A process's connection to crumbd, and pages by key."""

import ctypes
import dataclasses
import enum
import html
from typing import (Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union)

from crumb import _abi, _tensors
from crumb._library import (Handle, c, check, milliseconds, options_of, string_arrays, text)
from crumb.errors import Error, InvalidArgument

PAGE_TOKENS: int = _abi.CRUMB_PAGE_TOKENS
KEY_BYTES: int = _abi.CRUMB_KEY_BYTES
NO_PARENT = bytes(KEY_BYTES)
BF16, INT2 = 1, 2


class Miss(enum.IntEnum):
    """Why a page was not served."""

    NONE = _abi.CRUMB_MISS_NONE
    ABSENT = _abi.CRUMB_MISS_ABSENT
    PENDING = _abi.CRUMB_MISS_PENDING
    DEADLINE = _abi.CRUMB_MISS_DEADLINE
    CORRUPT = _abi.CRUMB_MISS_CORRUPT
    GENERATION = _abi.CRUMB_MISS_GENERATION
    QUALITY = _abi.CRUMB_MISS_QUALITY
    NOT_COVERED = _abi.CRUMB_MISS_NOT_COVERED
    BUSY = _abi.CRUMB_MISS_BUSY
    UNAVAILABLE = _abi.CRUMB_MISS_UNAVAILABLE
    UNKNOWN = -1

    @classmethod
    def _missing_(cls, value: object) -> "Miss":
        return cls.UNKNOWN  # a reason of a newer crumbd


class Tier(enum.IntEnum):
    """The tier that a page lies in."""

    UNKNOWN = _abi.CRUMB_TIER_UNKNOWN
    DEVICE = _abi.CRUMB_TIER_DEVICE
    HOST = _abi.CRUMB_TIER_HOST
    SSD = _abi.CRUMB_TIER_SSD
    REMOTE = _abi.CRUMB_TIER_REMOTE

    @classmethod
    def _missing_(cls, value: object) -> "Tier":
        return cls.UNKNOWN


class PutOutcome(enum.IntEnum):
    """The outcome of writing a fragment."""

    UNKNOWN = 0
    STORED = _abi.CRUMB_PUT_STORED
    DEDUPLICATED = _abi.CRUMB_PUT_DEDUPLICATED
    REFUSED = _abi.CRUMB_PUT_REFUSED
    NO_ROOM = _abi.CRUMB_PUT_NO_ROOM

    @classmethod
    def _missing_(cls, value: object) -> "PutOutcome":
        return cls.UNKNOWN


@dataclasses.dataclass(frozen=True)
class Keyspace:
    """A keyspace as crumbd knows it. Sizes are bytes of one tile: 64 tokens of a layer and head."""

    id: bytes
    generation: int
    int2_tile_bytes: int
    bf16_tile_bytes: int
    serves_bf16_only: bool


@dataclasses.dataclass(frozen=True)
class Fragment:
    """The tiles of a range of layers and KV heads of one page, layer by layer, head by head.

    `tiles` is any object with a buffer of (layers x heads) tiles; `parent` is the key of the page
    before it, NO_PARENT for the first page of a sequence; `format` is BF16 or INT2. `page`, set by
    `Client.get`, is the index of the fragment's key in the call's keys.
    """

    key: bytes
    tiles: Any
    layers: range
    heads: range
    parent: bytes = NO_PARENT
    format: int = INT2
    over_int2_prefix: bool = False
    page: int = 0


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of `Client.lookup`: the tiers of the leading pages that exist, and why the next page
    does not (Miss.NONE if all do)."""

    tiers: Sequence[Tier]
    reason: Miss

    @property
    def hits(self) -> int:
        """How many leading pages exist."""
        return len(self.tiers)


@dataclasses.dataclass(frozen=True)
class Got:
    """Result of `Client.get`: fragments of the leading pages, and why the next page is missing."""

    fragments: Sequence[Fragment]
    reason: Miss


class Stats(Mapping[str, Union[int, float, str]]):
    """crumbd's figures at one moment, by name; prints as a table, in notebooks too."""

    def __init__(self, values: Dict[str, Union[int, float, str]]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Union[int, float, str]:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @staticmethod
    def _shown(value: Union[int, float, str]) -> str:
        return value if isinstance(value, str) else f"{value:,}"

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        return "\n".join(f"{name:<{width}}  {self._shown(self[name])}" for name in self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{html.escape(name)}</td><td style='text-align:right'>"
                       f"{html.escape(self._shown(self[name]))}</td></tr>" for name in self)
        return f"<table>{rows}</table>"


def page_keys(keyspace: Union[Keyspace, bytes], token_ids: Any) -> List[bytes]:
    """Keys of the full pages of a sequence: one of 32 bytes for every 64 token ids.

    `token_ids` is a sequence of ints, or an int32 array or tensor (not copied).
    """
    address, count, held = _tensors.tokens(token_ids)
    pages = count // PAGE_TOKENS
    keys = ctypes.create_string_buffer(max(1, pages * KEY_BYTES))
    check(c.crumb_page_keys(_keyspace_id(keyspace), address, count, keys))
    del held
    return [keys.raw[i * KEY_BYTES:(i + 1) * KEY_BYTES] for i in range(pages)]


def foreign_key(keyspace: Union[Keyspace, bytes], name: bytes) -> bytes:
    """The key of a page that the engine names by bytes of its own."""
    key = ctypes.create_string_buffer(KEY_BYTES)
    check(c.crumb_foreign_key(_keyspace_id(keyspace), bytes(name), len(name), key))
    return key.raw


def _keyspace_id(keyspace: Union[Keyspace, bytes]) -> bytes:
    identity = keyspace.id if isinstance(keyspace, Keyspace) else bytes(keyspace)
    if len(identity) != KEY_BYTES:
        raise InvalidArgument(f"a keyspace id has {KEY_BYTES} bytes, not {len(identity)}")
    return identity


def _joined(keys: Sequence[bytes]) -> bytes:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise InvalidArgument(f"a page key has {KEY_BYTES} bytes, not {len(key)}")
    return b"".join(keys)


def _value_of(shown: str) -> Union[int, float, str]:
    for kind in (int, float):
        try:
            return kind(shown)
        except ValueError:
            pass
    return shown


class Client(Handle):
    """A process's connection to the crumbd of its host (or, with `address`, to one over TCP).

    Thread-safe. Opening makes one attempt to connect, which need not succeed (see `connected`),
    and the connection is tried again in the background. Workers keep the client's connection open
    after `close`. A forked child has no connection of its parent's: open clients after the fork.

    socket_dir: crumbd's folder of sockets; None: /run/crumb.
    address: "HOST:PORT" of crumbd's gRPC port; no shared memory then.
    process_name: appears in crumbd's log.
    engine: 16 random bytes that all processes of one engine agreed on; None: an engine of its own.
    staging_bytes: memory through which pages are written to crumbd; 0: 64 MiB.
    connect_timeout, call_timeout: seconds, of one attempt and of one call; 0: 1 and 2 seconds.
    tls_*: PEM files for TLS to `address`. token: the tenant's token.
    """

    def __init__(self, socket_dir: Optional[str] = None, *, address: Optional[str] = None,
                 process_name: Optional[str] = "python", engine: Optional[bytes] = None,
                 staging_bytes: int = 0, connect_timeout: float = 0, call_timeout: float = 0,
                 tls_ca_file: Optional[str] = None, tls_cert_file: Optional[str] = None,
                 tls_key_file: Optional[str] = None, tls_server_name: Optional[str] = None,
                 token: Optional[str] = None) -> None:
        if engine is not None and len(engine) != 16:
            raise InvalidArgument(f"engine has 16 bytes, not {len(engine)}")
        named = None if engine is None else ctypes.create_string_buffer(bytes(engine), 16)
        options = options_of(
            _abi.crumb_client_options, socket_dir=text(socket_dir), address=text(address),
            process_name=text(process_name),
            engine=None if named is None else ctypes.addressof(named), staging_bytes=staging_bytes,
            connect_timeout_ms=milliseconds(connect_timeout),
            call_timeout_ms=milliseconds(call_timeout), tls_ca_file=text(tls_ca_file),
            tls_cert_file=text(tls_cert_file), tls_key_file=text(tls_key_file),
            tls_server_name=text(tls_server_name), token=text(token))
        handle = ctypes.c_void_p()
        check(c.crumb_client_open(ctypes.byref(options), ctypes.byref(handle)))
        self._own(handle, c.crumb_client_close)

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return bool(c.crumb_client_connected(self._open_handle()))

    def wait_connected(self, timeout: float) -> None:
        """Waits for a connection. Raises Unavailable if there is none within `timeout` seconds."""
        self._check(c.crumb_client_wait_connected(self._handle, milliseconds(timeout)))

    def flush(self, timeout: float) -> int:
        """Waits until everything that was committed before is durable on crumbd's SSD.

        Returns the number of durable pages. The message of an error names how many are not, and
        why.
        """
        pages = ctypes.c_uint64()
        self._check(c.crumb_client_flush(self._handle, milliseconds(timeout),
                                         ctypes.byref(pages)))
        return pages.value

    def stats(self) -> Stats:
        """crumbd's figures: version, tiers, sessions, leases, lookups and counters."""
        values: Dict[str, Union[int, float, str]] = {}

        def receive(_: Any, name: bytes, value: bytes) -> None:
            values[name.decode()] = _value_of(value.decode("utf-8", "replace"))

        self._check(c.crumb_client_read_stats(self._handle, _abi.crumb_stat_receiver(receive),
                                              None))
        return Stats(values)

    def open_keyspace(self, fields: Mapping[str, str], *, layers: int, kv_heads: int,
                      head_dim: int, group_size: int = 0, tenant: Optional[str] = None,
                      timeout: float = 5.0) -> Keyspace:
        """Opens the keyspace of these fields (docs/formats/keyspace.md), or creates it.

        Pages of one keyspace are interchangeable: the fields name everything that keys and values
        depend on. group_size 0: the lesser of 128 and head_dim.
        """
        names, values = string_arrays(fields)
        spec = options_of(_abi.crumb_keyspace_spec, names=names, values=values,
                          fields=len(fields), layers=layers, kv_heads=kv_heads, head_dim=head_dim,
                          group_size=group_size or min(128, head_dim), tenant=text(tenant))
        out = _abi.crumb_keyspace()
        self._check(c.crumb_keyspace_open(self._handle, ctypes.byref(spec), milliseconds(timeout),
                                          ctypes.byref(out)))
        return Keyspace(bytes(out.id), out.generation, out.int2_tile_bytes, out.bf16_tile_bytes,
                        bool(out.serves_bf16_only))

    @staticmethod
    def page_keys(keyspace: Union[Keyspace, bytes], token_ids: Any) -> List[bytes]:
        """See `crumb.page_keys`."""
        return page_keys(keyspace, token_ids)

    @staticmethod
    def foreign_key(keyspace: Union[Keyspace, bytes], name: bytes) -> bytes:
        """See `crumb.foreign_key`."""
        return foreign_key(keyspace, name)

    def lookup(self, keyspace: Union[Keyspace, bytes], keys: Sequence[bytes]) -> Found:
        """How many leading pages of `keys` exist, and in which tiers. Holds no lease: a page may be
        evicted right after."""
        hits, reason = ctypes.c_size_t(), ctypes.c_int32()
        tiers = (ctypes.c_int32 * max(1, len(keys)))()
        self._check(c.crumb_lookup(self._handle, _keyspace_id(keyspace), _joined(keys), len(keys),
                                   ctypes.byref(hits), tiers, ctypes.byref(reason)))
        return Found([Tier(tier) for tier in tiers[:hits.value]], Miss(reason.value))

    def get(self, keyspace: Union[Keyspace, bytes], keys: Sequence[bytes], *,
            timeout: float = 5.0,
            receiver: Optional[Callable[[Fragment], None]] = None) -> Got:
        """Reads the pages of `keys` up to the first miss; key, keyspace and sums are checked.

        Without a receiver the fragments are returned, each with a copy of its tiles. With one, it
        is called with each fragment, whose `tiles` is a read-only memoryview that is valid during
        the call only; an exception of the receiver ends the get and is raised from here.
        """
        fragments: List[Fragment] = []
        raised: List[BaseException] = []

        def receive(_: Any, page: int, given: Any) -> int:
            try:
                self._receive(given.contents, page, receiver, fragments)
            except BaseException as error:  # must not pass through the C library
                raised.append(error)
                return 1
            return 0

        reason = ctypes.c_int32()
        code = c.crumb_get(self._handle, _keyspace_id(keyspace), _joined(keys), len(keys),
                           milliseconds(timeout), _abi.crumb_receiver(receive), None,
                           ctypes.byref(reason))
        if raised:
            raise raised[0]
        self._check(code)
        return Got(fragments, Miss(reason.value))

    @staticmethod
    def _receive(given: Any, page: int, receiver: Optional[Callable[[Fragment], None]],
                 fragments: List[Fragment]) -> None:
        tiles: Any
        if receiver is None:
            tiles = ctypes.string_at(given.tiles, given.tiles_bytes)
        else:
            memory = (ctypes.c_uint8 * given.tiles_bytes).from_address(given.tiles)
            tiles = memoryview(memory).cast("B").toreadonly()
        fragment = Fragment(
            key=bytes(given.key), tiles=tiles, layers=range(given.layer_begin, given.layer_end),
            heads=range(given.head_begin, given.head_end), parent=bytes(given.parent),
            format=given.format, over_int2_prefix=bool(given.over_int2_prefix), page=page)
        if receiver is None:
            fragments.append(fragment)
            return
        try:
            receiver(fragment)
        finally:
            tiles.release()

    def put(self, keyspace: Keyspace, fragments: Sequence[Fragment], *,
            timeout: float = 5.0) -> List[PutOutcome]:
        """Writes fragments, whose checksums are computed here; one outcome each.

        Raises InvalidArgument if a fragment's tiles have the wrong size.
        """
        space = _abi.crumb_keyspace(generation=keyspace.generation,
                                    int2_tile_bytes=keyspace.int2_tile_bytes,
                                    bf16_tile_bytes=keyspace.bf16_tile_bytes,
                                    serves_bf16_only=int(keyspace.serves_bf16_only))
        space.id[:] = _keyspace_id(keyspace)
        given = (_abi.crumb_fragment * max(1, len(fragments)))()
        held = [_fill(given[i], fragment) for i, fragment in enumerate(fragments)]
        outcomes = (ctypes.c_int32 * max(1, len(fragments)))()
        self._check(c.crumb_put(self._handle, ctypes.byref(space), given, len(fragments),
                                milliseconds(timeout), outcomes))
        del held
        return [PutOutcome(outcome) for outcome in outcomes[:len(fragments)]]


def _fill(out: Any, fragment: Fragment) -> Tuple[Any, ...]:
    """Writes a fragment into the C struct; returns the objects that keep its tiles alive."""
    out.key[:] = _joined([fragment.key])
    out.parent[:] = _joined([fragment.parent])
    out.format, out.over_int2_prefix = fragment.format, int(fragment.over_int2_prefix)
    out.layer_begin, out.layer_end = fragment.layers.start, fragment.layers.stop
    out.head_begin, out.head_end = fragment.heads.start, fragment.heads.stop
    tiles = fragment.tiles
    if hasattr(tiles, "data_ptr"):
        if not tiles.is_cpu or not tiles.is_contiguous():
            raise InvalidArgument("tiles must be contiguous and on the CPU")
        out.tiles, out.tiles_bytes = tiles.data_ptr(), tiles.numel() * tiles.element_size()
        return (tiles,)
    if _tensors.is_numpy(tiles):
        out.tiles, out.tiles_bytes = _tensors.numpy_address(tiles, False, "tiles"), tiles.nbytes
        return (tiles,)
    view = memoryview(tiles).cast("B")
    if view.readonly:  # ctypes has the addresses of bytes and of writable buffers only
        held: Any = tiles if isinstance(tiles, bytes) else bytes(view)
        out.tiles = ctypes.cast(ctypes.c_char_p(held), ctypes.c_void_p)
    else:
        held = (ctypes.c_uint8 * view.nbytes).from_buffer(view)
        out.tiles = ctypes.addressof(held)
    out.tiles_bytes = view.nbytes
    return (held, view)


__all__ = ["BF16", "INT2", "KEY_BYTES", "NO_PARENT", "PAGE_TOKENS", "Client", "Error", "Fragment",
           "Found", "Got", "Keyspace", "Miss", "PutOutcome", "Stats", "Tier", "foreign_key",
           "page_keys"]
