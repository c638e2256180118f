# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""INT2 page tiles in torch: layout 1 of docs/formats/page-tile.md, with the Hadamard rotation.

The tiles are those that crumbd's clients write with the rotation "hadamard", except for codes of
values that lie within rounding of a boundary between two codes. This module does not import
LMCache.
"""

from typing import Any, Tuple

import torch

TOKENS = 64         # tokens of a tile
RANGE_MIN = 1e-8    # least range of a group, as in kernels/cpu/row_range.h
# Fractions of a row's magnitudes that are kept, of K and of V: those of crumbd's clients.
CLIPS = (0.96, 0.92)
HALF_MAX = 65504.0  # scales and minima saturate at the largest finite fp16


def hadamard(dim: int) -> Any:
    """The orthogonal Hadamard matrix [dim, dim] in Sylvester's order, which is symmetric."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / dim**0.5


class TileCodec:
    """Encodes rows of K and V as INT2 tiles and decodes them. Thread-safe.

    head_dim: 64, 128 or 256. group_size: channels that share a scale; 0: the lesser of 128 and
    head_dim.
    """

    def __init__(self, head_dim: int, group_size: int = 0) -> None:
        self.group_size = group_size or min(128, head_dim)
        if head_dim not in (64, 128, 256) or self.group_size not in (32, 64, 128) or \
                self.group_size > head_dim:
            raise ValueError("head_dim is 64, 128 or 256, and group_size 32, 64 or 128 and at most "
                             f"head_dim; they are {head_dim} and {self.group_size}")
        self.head_dim = head_dim
        self._groups = head_dim // self.group_size
        self._code_bytes = TOKENS * head_dim // 4  # of K, or of V
        self.tile_bytes = 2 * (self._code_bytes + 4 * TOKENS * self._groups)
        self._rotation = hadamard(head_dim)
        self._code_order = (self._codes_in_order(values=False), self._codes_in_order(values=True))
        self._meta_order = self._meta_in_order()

    def encode(self, k: Any, v: Any) -> Any:
        """Tiles uint8 [n, tile_bytes] of rows [n, TOKENS, head_dim]."""
        codes, meta = zip(self._quantize(k, 0), self._quantize(v, 1))
        return torch.cat([*codes, *meta], 1)

    def decode(self, tiles: Any) -> Tuple[Any, Any]:
        """K and V as float32 [n, TOKENS, head_dim]."""
        codes, meta = 2 * self._code_bytes, 4 * TOKENS * self._groups
        areas = tiles.split([codes // 2, codes // 2, meta, meta], 1)
        return self._expand(areas[0], areas[2], 0), self._expand(areas[1], areas[3], 1)

    def _quantize(self, rows: Any, part: int) -> Tuple[Any, Any]:
        """Code bytes and meta bytes of K (part 0) or V (part 1)."""
        rotated = rows.float() @ self._rotation.to(rows.device)
        finite = torch.isfinite(rotated).all(-1, keepdim=True)
        rotated = torch.where(finite, rotated, torch.zeros_like(rotated))
        kept = min(int(CLIPS[part] * self.head_dim), self.head_dim - 1) + 1
        threshold = rotated.abs().kthvalue(kept, -1, keepdim=True).values
        rotated = rotated.clamp(-threshold, threshold)
        groups = rotated.unflatten(-1, (self._groups, self.group_size))
        least = groups.amin(-1, keepdim=True)
        scale = (groups.amax(-1, keepdim=True) - least).clamp(min=RANGE_MIN) / 3
        codes = ((groups - least) / scale + 0.5).clamp(0, 3).to(torch.uint8)
        codes = torch.where(finite, codes.flatten(-2), torch.zeros_like(codes.flatten(-2)))
        scale = torch.where(finite, scale.squeeze(-1), torch.zeros_like(scale.squeeze(-1)))
        pairs = torch.stack([scale, least.squeeze(-1)], -1).clamp(-HALF_MAX, HALF_MAX).half()
        return self.pack_codes(codes.flatten(1), part), self.pack_meta(pairs.flatten(1, 2))

    def pack_codes(self, codes: Any, part: int) -> Any:
        """The bytes of codes uint8 [n, TOKENS * head_dim]."""
        ordered = codes[:, self._code_order[part].to(codes.device)].unflatten(-1, (-1, 4))
        shifts = torch.tensor([1, 4, 16, 64], dtype=torch.uint8, device=codes.device)
        return (ordered * shifts).sum(-1, dtype=torch.uint8)

    def pack_meta(self, pairs: Any) -> Any:
        """The bytes of scales and minima float16 [n, TOKENS * groups, 2]."""
        ordered = pairs[:, self._meta_order.to(pairs.device)]
        return ordered.contiguous().view(torch.uint8).flatten(1)

    def _expand(self, packed: Any, meta: Any, part: int) -> Any:
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
        ordered = (packed.unsqueeze(-1) >> shifts & 3).flatten(1)
        codes = torch.empty_like(ordered)
        codes[:, self._code_order[part].to(packed.device)] = ordered
        halves = meta.contiguous().view(torch.float16).unflatten(-1, (-1, 2)).float()
        pairs = torch.empty_like(halves)
        pairs[:, self._meta_order.to(packed.device)] = halves
        pairs = pairs.unflatten(1, (TOKENS, self._groups))
        groups = codes.float().unflatten(1, (TOKENS, self._groups, self.group_size))
        rows = (pairs[..., 1:] + pairs[..., :1] * groups).flatten(-2)
        return rows @ self._rotation.to(packed.device)

    def _codes_in_order(self, values: bool) -> Any:
        """Index token * head_dim + channel of every code of an area, in the order of its bits."""
        token = torch.arange(TOKENS).view(-1, 1).expand(TOKENS, self.head_dim)
        channel = torch.arange(self.head_dim).expand(TOKENS, self.head_dim)
        # Tokens are the rows of the operand for K, channels for V.
        row, column = (channel, token) if values else (token, channel)
        r, a = row % 8, row % 16 // 8
        b, c, e = column % 16 // 8, column % 8 // 2, column % 2
        s = channel // 16
        width = 2 if self.head_dim == 64 else 4
        word = 2 * (s // 4) + (b if values else a)
        byte = (4 * self.head_dim * (token // 16) + 128 * width * (word // width) +
                4 * width * (4 * r + c) + 4 * (word % width))
        bit = 2 * (2 * (s % 4) + (a if values else b)) + 16 * e
        return (8 * byte + bit).flatten().argsort()

    def _meta_in_order(self) -> Any:
        """Index token * groups + group of every scale and minimum, in their order."""
        token = torch.arange(TOKENS).view(-1, 1).expand(TOKENS, self._groups)
        group = torch.arange(self._groups).expand(TOKENS, self._groups)
        row = token % 16
        offset = (4 * TOKENS * group + TOKENS // 2 * (row % 8) +
                  4 * (2 * (token // 16) + row // 8))
        return offset.flatten().argsort()
