# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""A serde for LMCache, named "crumb", which stores chunks as INT2 tiles.

Importing this module registers it; `python -m crumb.lmcache ...` is the program `lmcache` with it.
docs/engines/lmcache.md is the guide.
"""

import dataclasses
import struct
import zlib
from typing import Any, Dict, Tuple

import torch
from lmcache.v1.distributed.serde import (AsyncSerdeProcessor, Deserializer, SerdeProcessor,
                                          Serializer, register_serde_factory)

from crumb.lmcache._tiles import TOKENS, TileCodec

MAGIC = b"crumbLM1"
# Magic; head_dim, group size, exact tokens; tokens, layers, hidden size; CRC-32 of the bytes
# behind the header, and their number.
HEADER = struct.Struct("<8s3H5I")
OPTIONS = ("head_dim", "group_size", "exact_tokens", "max_workers")


@dataclasses.dataclass(frozen=True)
class _Shape:
    """A chunk [2, layers, tokens, hidden] of keys and values."""

    layers: int
    tokens: int
    hidden: int

    @classmethod
    def of(cls, shape: Any, head_dim: int) -> "_Shape":
        """Raises ValueError if a chunk of this shape cannot be stored as tiles."""
        extents = [int(extent) for extent in shape]
        if (len(extents) != 4 or extents[0] != 2 or extents[2] % TOKENS or extents[2] == 0 or
                extents[3] % head_dim or extents[3] == 0):
            raise ValueError(
                f"the serde crumb stores chunks [2, layers, tokens, KV heads * {head_dim}] of a "
                f"multiple of {TOKENS} tokens; this one is {extents}")
        return cls(*extents[1:])


class _Format:
    """Sizes of chunks, and rows in the order of tiles: layer, page, head."""

    def __init__(self, codec: TileCodec, exact_tokens: int) -> None:
        if not 0 <= exact_tokens <= TOKENS:
            raise ValueError(f"exact_tokens is 0 to {TOKENS}, not {exact_tokens}")
        self.codec, self.exact_tokens = codec, exact_tokens

    def sizes(self, shape: _Shape) -> Tuple[int, int]:
        """Bytes of the tiles, and of the exact rows behind them."""
        heads = shape.hidden // self.codec.head_dim
        tiles = shape.layers * (shape.tokens // TOKENS) * heads * self.codec.tile_bytes
        return tiles, 2 * shape.layers * self.exact_tokens * shape.hidden * 2

    def header(self, shape: _Shape, body: Any) -> bytes:
        """The header of a chunk with this body, a contiguous uint8 tensor on the CPU."""
        return HEADER.pack(MAGIC, self.codec.head_dim, self.codec.group_size, self.exact_tokens,
                           shape.tokens, shape.layers, shape.hidden,
                           zlib.crc32(body.numpy()), body.numel())

    def to_rows(self, chunk: Any) -> Tuple[Any, Any]:
        """K and V [tiles, TOKENS, head_dim] of a chunk."""
        parts = chunk.unflatten(2, (-1, TOKENS)).unflatten(4, (-1, self.codec.head_dim))
        rows = parts.transpose(3, 4).flatten(1, 3)
        return rows[0], rows[1]

    def to_chunk(self, k: Any, v: Any, shape: _Shape) -> Any:
        """The inverse of `to_rows`."""
        heads = shape.hidden // self.codec.head_dim
        rows = torch.stack([k, v]).unflatten(1, (shape.layers, shape.tokens // TOKENS, heads))
        return rows.transpose(3, 4).flatten(4, 5).flatten(2, 3)


class CrumbSerializer(Serializer):
    """Chunks to INT2 tiles."""

    def __init__(self, chunk_format: _Format) -> None:
        self._format = chunk_format

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        chunk, out = _tensor(src, "the source"), _tensor(dst, "the destination")
        shape = _Shape.of(chunk.shape, self._format.codec.head_dim)
        tiles = self._format.codec.encode(*self._format.to_rows(chunk)).flatten()
        exact = chunk[:, :, :self._format.exact_tokens].to(torch.bfloat16).contiguous()
        body = torch.cat([tiles, exact.view(torch.uint8).flatten()]).cpu()
        whole = torch.cat([torch.frombuffer(bytearray(self._format.header(shape, body)),
                                            dtype=torch.uint8), body])
        flat = out.view(torch.uint8).flatten()
        if flat.numel() < whole.numel():
            raise ValueError(f"a chunk takes {whole.numel()} bytes, and its buffer has "
                             f"{flat.numel()}")
        flat[:whole.numel()].copy_(whole)
        return int(whole.numel())

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        total = 0
        for extents in layout_desc.shapes:
            shape = _Shape.of(extents, self._format.codec.head_dim)
            total += HEADER.size + sum(self._format.sizes(shape))
        return total


class CrumbDeserializer(Deserializer):
    """INT2 tiles to chunks."""

    def __init__(self, chunk_format: _Format) -> None:
        self._format = chunk_format

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        chunk = _tensor(dst, "the destination")
        shape = _Shape.of(chunk.shape, self._format.codec.head_dim)
        tiles_bytes, exact_bytes = self._format.sizes(shape)
        end = HEADER.size + tiles_bytes + exact_bytes
        given = _tensor(src, "the source").view(torch.uint8).flatten()[:end].cpu().contiguous()
        body = given[HEADER.size:]
        if (given.numel() != end or
                bytes(given[:HEADER.size].numpy()) != self._format.header(shape, body)):
            raise ValueError("a stored chunk is damaged, or was written with other options of the "
                             "serde crumb or for another model")
        tiles, exact = body.split([tiles_bytes, exact_bytes])
        rows = self._format.codec.decode(tiles.view(-1, self._format.codec.tile_bytes))
        whole = self._format.to_chunk(*rows, shape)
        if exact_bytes:
            whole[:, :, :self._format.exact_tokens] = exact.clone().view(torch.bfloat16).view(
                2, shape.layers, self._format.exact_tokens, shape.hidden).float()
        chunk.copy_(whole.to(chunk.dtype))


def _tensor(memory: Any, name: str) -> Any:
    if memory.tensor is None:
        raise ValueError(f"the serde crumb needs {name} as a tensor")
    return memory.tensor


def create_serde(options: Dict[str, Any]) -> SerdeProcessor:
    """The serde with the options of LMCache's configuration: "head_dim" of the model, which must be
    given; "group_size"; "exact_tokens", the first tokens of each chunk that stay in BF16, too
    (default 16); "max_workers"."""
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown or "head_dim" not in options:
        raise ValueError(f"the serde crumb takes {', '.join(OPTIONS)} and needs head_dim; it was "
                         f"given {', '.join(sorted(options)) or 'nothing'}")
    chunk_format = _Format(TileCodec(int(options["head_dim"]), int(options.get("group_size", 0))),
                           int(options.get("exact_tokens", 16)))
    return AsyncSerdeProcessor(CrumbSerializer(chunk_format), CrumbDeserializer(chunk_format),
                               max_workers=int(options.get("max_workers", 1)))


register_serde_factory("crumb", create_serde)
