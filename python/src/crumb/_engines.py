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

from crumb import _checkpoints
from crumb.client import Client
from crumb.errors import InvalidArgument

HADAMARD_NOTE = ("Crumb quantizes with the data-free Hadamard rotation; `crumb calibrate` makes "
                 "one for this model, with a smaller error")
# Members of a model's configuration that decide how positions enter the keys.
ROPE_MEMBERS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
                "max_position_embeddings", "original_max_position_embeddings")


def weights_digest(model: str, revision: Optional[str], options_name: str) -> str:
    """A digest that changes when the weights do.

    model: a local folder or file, or a name on the Hugging Face Hub. Of a name whose files are not
    in the local cache the digest covers the name and the revision only, which must then be a commit
    to be exact. options_name: where the engine's user sets the option "weights" instead.
    """
    folder = _checkpoints.folder_of(model, revision, "config.json")
    if folder is None:
        return hashlib.sha256(f"{model}\0{revision}".encode()).hexdigest()
    digest = _checkpoints.digest_of(folder, "config.json")
    if digest is None:
        raise InvalidArgument(f"{folder} has no config.json or no weight files; name the weights "
                              f"by \"weights\" in {options_name}")
    return digest


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
