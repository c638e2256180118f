# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""A rotation file for a Hugging Face model, from text that it reads:

    python3 -m crumb.calibrate MODEL --text FILE... --out model.rotation

transformers runs the model (any whose attention goes through its AttentionInterface) over sequences
of the text; queries, keys and values of the layers with full attention are recorded as attention
meets them, one safetensors file a sequence (docs/formats/activations.md); `crumb calibrate` makes
the rotation file of these. No engine of ours runs. Needs transformers and torch.
"""

import argparse
import contextlib
import ctypes
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from crumb._programs import path_of
from crumb.errors import InvalidArgument

# The name of the attention that records, in transformers' tables.
ATTENTION = "crumb_record"
# Defaults of `crumb calibrate`: tokens of one sequence, and of all.
CONTEXT, TOKENS = 1024, 32768

Rows = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Recording:
    """Rows of the sequence that the model is reading: layer -> (q, k, v) [tokens, heads, dim]."""

    def __init__(self) -> None:
        self.rows: Dict[int, Rows] = {}

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               mask: Optional[torch.Tensor], **options: Any) -> Any:
        """An attention function of transformers: records, and computes as "sdpa" does."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        # A layer that sees a window only is not served by Crumb.
        if options.get("sliding_window") is None and query.shape[0] == 1:
            self.rows[module.layer_idx] = (self._kept(query), self._kept(key), self._kept(value))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)

    @staticmethod
    def _kept(rows: torch.Tensor) -> torch.Tensor:
        """[1, heads, tokens, dim] -> [tokens, heads, dim] on the CPU, in 16 bits."""
        return rows[0].transpose(0, 1).to(device="cpu", dtype=torch.bfloat16).contiguous()


@contextlib.contextmanager
def _recording(model: Any) -> Iterator[_Recording]:
    """Makes the model's attention record; puts its own one back at the end."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    recording = _Recording()
    AttentionInterface.register(ATTENTION, recording.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        yield recording
    finally:
        model.set_attn_implementation(before)


def rope_metadata(config: Any) -> Dict[str, str]:
    """The RoPE fields of an activation file, from a model's configuration."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # models that turn their layers in several ways
    theta = rope.get("rope_theta", getattr(text, "rope_theta", None))
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    part = rope.get("partial_rotary_factor", getattr(text, "partial_rotary_factor", None))
    scaling = {name: value for name, value in rope.items()
               if name not in ("rope_theta", "partial_rotary_factor")}
    metadata = {}
    if theta is None:
        metadata["rotary_dim"] = "0"
    else:
        metadata["rope_theta"] = repr(float(theta))
        if part is not None:
            metadata["rotary_dim"] = str(int(head_dim * part))
    if scaling.get("rope_type", "default") != "default":
        metadata["rope_scaling"] = json.dumps(scaling)
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None:
        metadata["max_position_embeddings"] = str(positions)
    return metadata


def write_safetensors(path: pathlib.Path, tensors: Mapping[str, torch.Tensor],
                      metadata: Mapping[str, str]) -> None:
    """Writes contiguous BF16 and int64 tensors of the CPU, from where they are."""
    names = {torch.bfloat16: "BF16", torch.int64: "I64"}
    header: Dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            size = tensor.numel() * tensor.element_size()
            file.write((ctypes.c_char * size).from_address(tensor.data_ptr()))


def record(model: Any, sequences: Iterable[Sequence[int]], folder: "str | pathlib.Path", *,
           name: str = "") -> List[pathlib.Path]:
    """Runs a transformers model over sequences of token ids and writes their activations.

    model: on any device, in any dtype; its attention implementation is the same afterwards.
    folder: gets a file for each sequence, whose size is tokens x layers x (query heads + 2 KV
    heads) x head_dim x 2 bytes. name: of the model, for people. Returns the files.
    Raises InvalidArgument if no layer has full attention through transformers' AttentionInterface.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {**rope_metadata(model.config), **({"model": name} if name else {})}
    files: List[pathlib.Path] = []
    base = getattr(model, "base_model", model)  # the model without its vocabulary projection
    with _recording(model) as recording, torch.no_grad():
        for ids in sequences:
            recording.rows.clear()
            base(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
            if not recording.rows:
                raise InvalidArgument(f"{type(model).__name__}: no layer has full attention that "
                                      "goes through transformers' AttentionInterface")
            tensors = {f"layers.{layer}.{what}": rows
                       for layer, all_rows in sorted(recording.rows.items())
                       for what, rows in zip("qkv", all_rows)}
            tensors["positions"] = torch.arange(len(ids))
            files.append(folder / f"activations-{len(files):05}.safetensors")
            write_safetensors(files[-1], tensors, metadata)
    return files


def layers_of(file: pathlib.Path) -> List[int]:
    """Numbers of the layers in an activation file."""
    with open(file, "rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sorted(int(name.split(".")[1]) for name in header if name.endswith(".q"))


def rotation_file(files: Sequence[pathlib.Path], out: "str | pathlib.Path",
                  arguments: Sequence[str] = ()) -> None:
    """Makes a rotation file of activation files with `crumb calibrate`, whose report it prints.

    arguments: further ones of `crumb calibrate`. Raises InvalidArgument if that fails.
    """
    layers = layers_of(files[0])
    chosen = [] if layers == list(range(len(layers))) else ["--layer-ids", *map(str, layers)]
    done = subprocess.run([path_of("crumb"), "calibrate", "--activations", *map(str, files),
                           *chosen, "--out", str(out), *arguments], check=False)
    if done.returncode != 0:
        raise InvalidArgument(f"crumb calibrate failed with exit code {done.returncode}")


def pieces(ids: Sequence[int], context: int, tokens: int) -> List[Sequence[int]]:
    """Sequences of `context` token ids, `tokens` in all at most, spread evenly over `ids`."""
    all_pieces = len(ids) // context
    wanted = min(all_pieces, max(1, tokens // context))
    return [ids[i * all_pieces // wanted * context:][:context] for i in range(wanted)]


def main() -> None:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="python3 -m crumb.calibrate", description=__doc__.splitlines()[0],
        epilog="Arguments that are not listed are passed to `crumb calibrate`.")
    parser.add_argument("model", help="folder or name of a transformers model")
    parser.add_argument("--text", nargs="+", required=True, help="text files, UTF-8")
    parser.add_argument("--out", required=True, help="rotation file to write")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of one sequence")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="calibration tokens at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", help="folder that keeps the activations; default: none is kept")
    options, rest = parser.parse_known_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    text = "\n".join(pathlib.Path(path).read_text(encoding="utf-8") for path in options.text)
    sequences = pieces(tokenizer(text)["input_ids"], options.context, options.tokens)
    if not sequences:
        sys.exit(f"crumb.calibrate: the text has less than --context {options.context} tokens")
    with tempfile.TemporaryDirectory() as folder:
        name = pathlib.Path(options.model).name
        files = record(model.to(options.device), sequences, options.keep or folder, name=name)
        try:
            rotation_file(files, options.out, rest)
        except InvalidArgument as error:
            sys.exit(f"crumb.calibrate: {error}")


if __name__ == "__main__":
    main()
