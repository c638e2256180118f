# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Code that Crumb's plugins for inference engines share: identities of models, and connections.

This module imports no engine.
"""

import hashlib
import json
import logging
import pathlib
import re
from typing import Any, Dict, List, Mapping, Optional

from crumb import _checkpoints
from crumb.client import Client
from crumb.errors import InvalidArgument

HADAMARD_NOTE = ("Crumb quantizes with the data-free Hadamard rotation; `crumb calibrate` makes "
                 "one for this model, with a smaller error")
# Members of a model's configuration that decide how positions enter the keys.
ROPE_MEMBERS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
                "max_position_embeddings", "original_max_position_embeddings")


# A revision that names the same files forever.
COMMIT = re.compile("[0-9a-f]{40}")


def weights_digest(model: str, revision: Optional[str], options_name: str,
                   download_dir: Optional[str] = None) -> str:
    """A digest that changes when the weights do.

    model: a local folder or file, or a name on the Hugging Face Hub. download_dir: the folder in
    which the engine keeps weight files of the Hub; None: the default cache. If the files of a name
    are in neither, the digest covers the name and the revision. options_name: where the engine's
    user sets the option "weights" instead. Raises InvalidArgument if nothing distinguishes
    the weights from others: there is no file, and the revision is not a commit.
    """
    digest = _checkpoints.model_digest(model, revision, "config.json", download_dir)
    if digest is not None:
        return digest
    if pathlib.Path(model).exists():
        raise InvalidArgument(f"{model} has no config.json or no weight files; name the weights "
                              f"by \"weights\" in {options_name}")
    if COMMIT.fullmatch(revision or "") is None:
        raise InvalidArgument(
            f"the weight files of {model} are not in the local cache, and its revision "
            f"{revision or 'main'} may name others tomorrow: start the engine with a commit (40 "
            f"hexadecimal digits) as --revision, or name the weights by \"weights\" in "
            f"{options_name}")
    return hashlib.sha256(f"{model}\0{revision}".encode()).hexdigest()


def config_digest(model: str, revision: Optional[str], flag: str) -> str:
    """The digest of the config.json in a folder, or of a name on the Hub, that the engine takes
    instead of the checkpoint's. flag: of the engine, for messages. Raises InvalidArgument if it is
    not here."""
    folder = _checkpoints.folder_of(model, revision, "config.json")
    if folder is None or not (folder / "config.json").is_file():
        raise InvalidArgument(f"{flag} names {model}, which has no config.json in this machine's "
                              "folders and caches: give it a folder")
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()


def rope_of(config: Any, longrope: Optional[str] = None) -> str:
    """The effective RoPE configuration of a Hugging Face configuration as text.

    longrope: which factors of LongRoPE the engine applies, "short" or "long"; None: the
    configuration has another RoPE.
    """
    members = {name: getattr(config, name) for name in ROPE_MEMBERS
               if getattr(config, name, None) is not None}
    if longrope is not None:
        members["longrope"] = longrope
    return json.dumps(members, sort_keys=True, default=str)


def longrope_tokens(config: Any) -> Optional[int]:
    """The length of a sequence up to which the short factors of LongRoPE are meant; None: the
    configuration has another RoPE. Raises InvalidArgument if it does not say the length."""
    for rope in _ropes_of(config):
        if (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
            tokens = rope.get("original_max_position_embeddings",
                              getattr(config, "original_max_position_embeddings", None))
            if tokens is None:
                raise InvalidArgument("the model has LongRoPE without "
                                      "original_max_position_embeddings: Crumb does not know "
                                      "which of its factors the engine applies")
            return int(tokens)
    return None


def _ropes_of(config: Any) -> List[Mapping[str, Any]]:
    """The RoPE parameters of a configuration: one set, or one for each type of layer."""
    ropes = []
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if isinstance(given, Mapping):
            ropes += [given, *(part for part in given.values() if isinstance(part, Mapping))]
    return ropes


def override_fields(overrides: Any, flag: str) -> Dict[str, str]:
    """Keyspace fields of members of the model's configuration that the engine's user has replaced:
    they change the model's results, but none of its files. Without any there is no field.

    flag: of the engine, for messages. Raises InvalidArgument if the overrides are a program.
    """
    if not callable(overrides) and not overrides:
        return {}
    try:
        text = json.dumps(overrides, sort_keys=True)
    except (TypeError, ValueError):
        raise InvalidArgument(f"Crumb distinguishes pages of different configurations by the "
                              f"values of {flag}, and these are not all JSON: give {flag} an "
                              "object of numbers, texts, lists and objects") from None
    return {"config_overrides": hashlib.sha256(text.encode()).hexdigest()}


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
