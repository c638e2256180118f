#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Two worker processes, the second of which finds the first one's pages:
warm_worker.py [--socket-dir DIR]

The "model" makes keys, values and queries from token ids and positions; an engine puts its
projections there. Without --socket-dir it starts a crumbd of its own. Needs numpy.
"""

import argparse
import hashlib
import subprocess
import sys
from typing import Any

import crumb
import numpy as np
import server

MODEL = crumb.Model("example", weights="1", layers=2, kv_heads=2, q_heads=8, head_dim=64,
                    rope="none")
PROMPT = [(37 * i + 11) % 5000 for i in range(1000)]


def rows(tokens: Any, position: int, layer: int, heads: int) -> Any:
    """[tokens, heads, head_dim] of BF16: the upper 16 bits of float32."""
    angles = np.outer(np.asarray(tokens) + 3 * layer + np.arange(len(tokens)) + position,
                      np.arange(1, heads * MODEL.head_dim + 1) / 97)
    wide = np.sin(angles).astype("float32").reshape(len(tokens), heads, MODEL.head_dim)
    return np.ascontiguousarray((wide.view("uint32") >> 16).astype("uint16"))


def forward(sequence: crumb.Sequence, tokens: Any) -> Any:
    """A pass of the model over fresh tokens; the last layer's output."""
    position = sequence.length
    for layer in range(MODEL.layers):
        sequence.append(layer, rows(tokens, position, layer, MODEL.kv_heads),
                        rows(tokens, position, layer + 10, MODEL.kv_heads))
        out = sequence.attend(layer, rows(tokens, position, layer + 20, MODEL.q_heads))
    sequence.advance(tokens)
    return out


def work(folder: str) -> None:
    """One worker's life: a prompt, three more tokens, and its pages published."""
    with crumb.Client(folder) as client:
        client.wait_connected(30)
        with crumb.Worker(client, MODEL) as worker, worker.begin(PROMPT) as sequence:
            digest = hashlib.sha256()
            cached = sequence.cached_tokens
            forward(sequence, PROMPT[cached:])
            for token in (1, 2, 3):
                digest.update(forward(sequence, [token]).tobytes())
            sequence.finish()
            worker.wait_published(30)
            print(f"cached {cached} of {len(PROMPT)} tokens, computed {len(PROMPT) - cached}, "
                  f"outputs {digest.hexdigest()[:16]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket-dir")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    with server.socket_dir(options.socket_dir) as folder:
        for _ in range(2):
            subprocess.run([sys.executable, __file__, "--work", folder], check=True)


if __name__ == "__main__":
    main()
