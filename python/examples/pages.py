#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Writes pages of a sequence to crumbd and reads them back: pages.py [--socket-dir DIR]

Without --socket-dir it starts a crumbd of its own. Needs neither numpy nor torch.
"""

import argparse
import os

import crumb
import server

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 64
FIELDS = {"model": "example", "weights": "1", "format": "bf16", "layout": "1", "page_tokens": "64"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket-dir")
    options = parser.parse_args()
    with server.socket_dir(options.socket_dir) as folder, crumb.Client(folder) as client:
        client.wait_connected(30)
        space = client.open_keyspace(FIELDS, layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)

        # A page is 64 tokens of all layers and heads; its key names these tokens and all before.
        tokens = list(range(1000, 1200))
        keys = crumb.page_keys(space, tokens)
        pages = [os.urandom(LAYERS * KV_HEADS * space.bf16_tile_bytes) for _ in keys]
        parents = [crumb.NO_PARENT, *keys[:-1]]
        outcomes = client.put(space, [
            crumb.Fragment(key, tiles, range(LAYERS), range(KV_HEADS), parent, crumb.BF16)
            for key, tiles, parent in zip(keys, pages, parents)])
        print("put:", ", ".join(outcome.name for outcome in outcomes))

        longer = crumb.page_keys(space, tokens + list(range(64)))
        found = client.lookup(space, longer)
        print(f"lookup: {found.hits} of {len(longer)} pages, then {found.reason.name}")
        got = client.get(space, longer)
        print("get: the same bytes:", [fragment.tiles for fragment in got.fragments] == pages)
        print("flush: durable pages:", client.flush(30))


if __name__ == "__main__":
    main()
