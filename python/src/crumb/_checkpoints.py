# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Digests of checkpoints and LoRA adapters: pages of one are never served to another.

A digest covers the configuration, and every weight file's name, size and samples. Training changes
nearly every value of a tensor that it changes, so that samples of all tensors distinguish
checkpoints without reading all of them at every start. This module imports nothing else of the
package.
"""

import functools
import hashlib
import itertools
import json
import pathlib
import re
from typing import BinaryIO, Iterator, List, Optional, Tuple

# A digest covers the beginning, middle and end of each tensor in a safetensors file, and one sample
# in each MiB of other files.
SAMPLE_BYTES = 4096
SAMPLE_DISTANCE = 1 << 20
SAFETENSORS_HEADER_MAX = 100 << 20
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
# The name of one file of a split GGUF checkpoint: prefix, number of the file, number of files.
SPLIT_GGUF = re.compile(r"(.*)-(\d+)-of-(\d+)\.gguf", re.DOTALL)
VISION_GGUF = "*mmproj*.gguf"  # the vision model, which engines look for beside a GGUF checkpoint
ADAPTERS_MAX = 1024  # adapters whose digests are kept


def folder_of(model: str, revision: Optional[str], config: str) -> Optional[pathlib.Path]:
    """The folder with the files of a checkpoint: `model` itself, or where the local Hugging Face
    cache has them; a GGUF checkpoint is its file, or one file of several. None: they are not here.
    config: the name of its configuration file."""
    folder = pathlib.Path(model)
    if folder.exists():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache
        found = try_to_load_from_cache(model, config, revision=revision)
    except (ImportError, ValueError):  # ValueError: no name of the Hub
        return None
    return pathlib.Path(found).parent if isinstance(found, str) else None


def model_digest(model: str, revision: Optional[str], config: str,
                 download_dir: Optional[str] = None) -> Optional[str]:
    """The digest of a checkpoint by its folder, file or name on the Hub; None: its weight files or
    its configuration are not here. With a download_dir the weight files of a name are taken from
    there only; engines keep the configuration in the default cache all the same."""
    folder = folder_of(model, revision, config)
    if download_dir is None or pathlib.Path(model).exists():
        return digest_of(folder, config) if folder is not None else None
    weights = _snapshot_of(model, revision, download_dir)
    files = _weights_in(weights) if weights is not None else []
    if weights is None or not files:
        return None
    for place in (folder, weights):
        if place is not None and (place / config).is_file():
            return _digest([place / config, *files])
    return None


def _snapshot_of(model: str, revision: Optional[str], download_dir: str) -> Optional[pathlib.Path]:
    """The folder of a model of the Hub in the cache `download_dir`."""
    try:
        from huggingface_hub import snapshot_download
        return pathlib.Path(snapshot_download(model, revision=revision, cache_dir=download_dir,
                                              local_files_only=True))
    except (ImportError, ValueError, OSError):  # OSError: it is not there
        return None


def digest_of(checkpoint: pathlib.Path, config: str) -> Optional[str]:
    """The digest of a checkpoint, a folder or a GGUF file; None: the folder has no weight files or
    no configuration."""
    files = _gguf_files(checkpoint) if checkpoint.is_file() else _files_of(checkpoint, config)
    return _digest(files) if files else None


def adapter_digest(path: str) -> Optional[str]:
    """The digest of a LoRA adapter in a folder or in the local Hugging Face cache; None: there is
    none. It is computed again when the size or time of a file has changed."""
    try:
        folder = folder_of(path, None, "adapter_config.json")
        files = _files_of(folder, "adapter_config.json") if folder else []
        if not files:
            return None
        return _digest_once(tuple((str(file), status.st_size, status.st_mtime_ns, status.st_ino)
                                  for file in files for status in [file.stat()]))
    except OSError:
        return None


@functools.lru_cache(maxsize=ADAPTERS_MAX)
def _digest_once(files: Tuple[Tuple[str, int, int, int], ...]) -> str:
    return _digest([pathlib.Path(name) for name, _, _, _ in files])


def _files_of(folder: pathlib.Path, config: str) -> List[pathlib.Path]:
    weights = _weights_in(folder)
    return [folder / config, *weights] if weights and (folder / config).is_file() else []


def _weights_in(folder: pathlib.Path) -> List[pathlib.Path]:
    return sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))


def _gguf_files(named: pathlib.Path) -> List[pathlib.Path]:
    """The files that engines load when they get the file `named`: all files of a split checkpoint,
    and the vision model beside it."""
    files = {named, *named.parent.glob(VISION_GGUF)}
    split = SPLIT_GGUF.fullmatch(named.name)
    if split:
        for other in named.parent.iterdir():
            match = SPLIT_GGUF.fullmatch(other.name)
            if match and match[1] == split[1] and int(match[3]) == int(split[3]):
                files.add(other)
    return sorted(files)


def _digest(files: List[pathlib.Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            for begin, length in _samples(path, size, file):
                file.seek(begin)
                digest.update(file.read(length))
    return digest.hexdigest()


def _samples(path: pathlib.Path, size: int, file: BinaryIO) -> Iterator[Tuple[int, int]]:
    """The parts (offset, bytes) of a file that its digest covers."""
    if path.suffix == ".json":
        return iter([(0, size)])
    tensors = _tensors(size, file) if path.suffix == ".safetensors" else None
    if tensors is None:
        places = itertools.chain(range(0, size, SAMPLE_DISTANCE), [max(0, size - SAMPLE_BYTES)])
        return ((begin, SAMPLE_BYTES) for begin in places)
    data_begin, spans = tensors
    return itertools.chain([(0, data_begin)], (
        (place, min(SAMPLE_BYTES, end - place)) for begin, end in spans
        for place in sorted({begin, (begin + end) // 2, max(begin, end - SAMPLE_BYTES)})))


def _tensors(size: int, file: BinaryIO) -> Optional[Tuple[int, List[Tuple[int, int]]]]:
    """Returns where the data of a safetensors file begins, and where each tensor begins and ends,
    in order; None: it is not such a file. The format: 8 bytes with the length of a JSON header, the
    header, the data; the header's offsets count from the data's beginning."""
    length = int.from_bytes(file.read(8), "little")
    data_begin = 8 + length
    if not 0 < length <= SAFETENSORS_HEADER_MAX or data_begin > size:
        return None
    try:
        header = json.loads(file.read(length))
        spans = sorted((data_begin + int(begin), data_begin + int(end))
                       for name, tensor in header.items() if name != "__metadata__"
                       for begin, end in [tensor["data_offsets"]])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if any(not data_begin <= begin <= end <= size for begin, end in spans):
        return None
    return data_begin, spans
