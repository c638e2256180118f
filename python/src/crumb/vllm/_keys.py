# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Dependencies of pages beside their tokens. This module imports neither vLLM nor the library."""

import collections
import hashlib
import os
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from crumb.vllm._jobs import PAGE_TOKENS

NO_EXTRA = bytes(32)
# LoRA adapters whose digests are pinned. vLLM keeps far fewer in memory.
PINNED_ADAPTERS_MAX = 16384


class Adapters:
    """Digests of LoRA adapters as an engine has read them.

    vLLM reads an adapter's files when it is first used, and knows it by a number and a path from
    then on. The digest is pinned at that time. When the files have another digest later, vLLM may
    still compute with the old weights, or have read the new ones: `changed` is true from then on,
    and pages of the adapter are neither stored nor loaded.

    digest_of: the digest of the adapter at a path; None: its files are not here.
    """

    def __init__(self, digest_of: Callable[[str], Optional[str]]) -> None:
        self._digest_of = digest_of
        # (number, path) -> digest and whether it has changed, the one used last at the end.
        self._pinned: "collections.OrderedDict[Tuple[int, str], Tuple[Optional[str], bool]]" = (
            collections.OrderedDict())
        # Stands for the weights of adapters without files, whose pages only this engine finds.
        self._own = os.urandom(16).hex()

    def changed(self, lora: Any) -> bool:
        """Whether the files of a request's adapter (vLLM's LoRARequest, or None) differ from those
        of its first use, or did so once."""
        if lora is None:
            return False
        name = (lora.lora_int_id, getattr(lora, "lora_path", ""))
        now = self._digest_of(name[1])
        digest, changed = self._pinned.get(name, (now, False))
        self._pinned[name] = (digest, changed or digest != now)
        self._pinned.move_to_end(name)
        while len(self._pinned) > PINNED_ADAPTERS_MAX:
            self._pinned.popitem(last=False)
        return self._pinned[name][1]

    def name_of(self, lora: Any) -> str:
        """The text that stands for the adapter in keys. REQUIRES: `changed` was called for it."""
        path = getattr(lora, "lora_path", "")
        digest, _ = self._pinned[lora.lora_int_id, path]
        if digest is not None:
            return f"lora digest\0{digest}"
        return f"lora\0{self._own}\0{lora.lora_name}\0{lora.lora_int_id}\0{path}"


def page_extras(request: Any, first_page: int, end_page: int, private: bytes = b"",
                adapter: Optional[str] = None) -> List[bytes]:
    """Digests of all inputs but tokens of pages [first_page, end_page), one for each page.

    The first page of a request carries `adapter` (`Adapters.name_of`), the cache salt and
    `private`, if pages are shared with no other engine; a page in which multimodal items begin
    carries their hashes. Keys are chained, so that every later page depends on them as well.
    """
    parts: Dict[int, List[str]] = {}
    if private:
        parts.setdefault(0, []).append(f"private\0{private.hex()}")
    if adapter is not None:
        parts.setdefault(0, []).append(adapter)
    salt = getattr(request, "cache_salt", None)
    if salt:
        parts.setdefault(0, []).append(f"salt\0{salt}")
    for feature in getattr(request, "mm_features", None) or ():
        position = feature.mm_position
        parts.setdefault(position.offset // PAGE_TOKENS, []).append(
            f"item\0{feature.identifier}\0{position.offset}\0{position.length}")
    extras = []
    for page in range(first_page, end_page):
        named = parts.get(page)
        extras.append(hashlib.sha256("\0\0".join(named).encode()).digest() if named else NO_EXTRA)
    return extras


class RoundedPages:
    """Pages in an engine's own prefix cache that were loaded as INT2, by key.

    Requests that hit them there compute over rounded rows as if they had loaded them themselves.
    Remembers the pages that were loaded or hit last, at most `capacity`: as many as the engine's
    cache has room for, because it evicts in the same order.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._pages: "collections.OrderedDict[bytes, None]" = collections.OrderedDict()
        # Keys of the pages in front of them.
        self._parents: "collections.OrderedDict[bytes, None]" = collections.OrderedDict()

    def add(self, keys: Sequence[bytes], first_page: int) -> None:
        """Pages [first_page, len(keys)) of a sequence, whose keys start with page 0, were loaded.
        Page 0 is exact."""
        for page in range(max(1, first_page), len(keys)):
            self._note(self._pages, keys[page])
            self._note(self._parents, keys[page - 1])

    def under(self, keys: Sequence[bytes], tokens: int) -> bool:
        """Whether one of the first `tokens` tokens of a sequence has rounded rows, if the engine
        has found them in its own cache. keys: of the full pages of these tokens, and maybe more."""
        pages, rest = divmod(tokens, PAGE_TOKENS)
        found = [key for key in keys[:pages] if key in self._pages]
        for key in found:
            self._note(self._pages, key)
        # Tokens of a page that is not full are in a block of a page with the same tokens in front.
        return bool(found) or bool(rest and pages and keys[pages - 1] in self._parents)

    def clear(self) -> None:
        """The engine has emptied its cache."""
        self._pages.clear()
        self._parents.clear()

    def _note(self, keys: "collections.OrderedDict[bytes, None]", key: bytes) -> None:
        keys[key] = None
        keys.move_to_end(key)
        if len(keys) > self._capacity:
            keys.popitem(last=False)
