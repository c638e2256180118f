# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Code that Crumb's plugins for inference engines share: identities of models, and connections.

This module imports no engine.
"""

import hashlib
import json
import logging
import pathlib
from typing import Any, Dict, Mapping, Optional

from crumb.client import Client
from crumb.errors import InvalidArgument

# Bytes at each end of a weight file that go into the digest of the weights, with its size: enough
# to tell checkpoints apart without reading all of them at every start.
SAMPLED_BYTES = 1 << 20
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
HADAMARD_NOTE = ("Crumb quantizes with the data-free Hadamard rotation; `crumb calibrate` makes "
                 "one for this model, with a smaller error")
# Members of a model's configuration that decide how positions enter the keys.
ROPE_MEMBERS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
                "max_position_embeddings", "original_max_position_embeddings")


def weights_digest(model: str, revision: Optional[str], options_name: str) -> str:
    """A digest that changes when the weights do.

    Of a local folder: the configuration and every weight file's name, size and both ends. Of a
    name: the name and its revision, which must then be a commit to be exact. options_name: where
    the engine's user sets the option "weights" instead.
    """
    digest = hashlib.sha256()
    folder = pathlib.Path(model)
    if not folder.is_dir():
        digest.update(f"{model}\0{revision}".encode())
        return digest.hexdigest()
    files = sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    if not files:
        raise InvalidArgument(f"{folder} has no weight files; name the weights by \"weights\" in "
                              f"{options_name}")
    for path in [folder / "config.json", *files]:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            digest.update(file.read(SAMPLED_BYTES))
            file.seek(max(0, size - SAMPLED_BYTES))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


def rope_of(config: Any) -> str:
    """The effective RoPE configuration of a Hugging Face configuration as text."""
    members = {name: getattr(config, name) for name in ROPE_MEMBERS
               if getattr(config, name, None) is not None}
    return json.dumps(members, sort_keys=True, default=str)


def keyspace_fields(quantization: Optional[str]) -> Dict[str, str]:
    """Keyspace fields of pages that come from an engine's own cache.

    Rows in an engine's own cache come from attention over BF16 rows, not over INT2 pages: they are
    not interchangeable with those of workers that attend INT2 pages.
    """
    return {"attention": "engine", "quantization": str(quantization or "none")}


def open_client(options: Mapping[str, Any], process_name: str, engine: bytes,
                log: logging.Logger) -> Client:
    """A connection as the options "socket_dir" and "token_file" say; warns if there is no crumbd.

    engine: 16 bytes that the engine's processes have in common.
    """
    token_file = options.get("token_file")
    token = pathlib.Path(token_file).read_text(encoding="utf-8").strip() if token_file else None
    client = Client(options.get("socket_dir"), process_name=process_name, engine=engine,
                    token=token)
    if not client.connected:
        log.warning("no crumbd at %s yet: requests run without it until there is one",
                    options.get("socket_dir") or "/run/crumb")
    return client
