# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF file into a folder of Hugging Face's layout:

    python3 -m crumb.import_gguf model.gguf FOLDER

The folder has config.json, generation_config.json, model.safetensors, tokenizer.json and
tokenizer_config.json, which crumb-tiny-lm, `crumb calibrate` and transformers read. Models of the
Llama, Qwen2 and Qwen3 families with a byte-level BPE vocabulary are converted; every other file is
refused with a message. Needs the packages gguf and numpy (pip install crumb-kv[gguf]) and no
library of this package, so it also runs as a program from a source tree.
"""

import argparse
import json
import math
import os
import pathlib
import sys
from typing import Any, BinaryIO, Callable, Dict, List, NamedTuple, Optional, Tuple

try:
    from crumb._gguf_bytes import GgufError, check_lengths, encoded
except ImportError:  # it runs as a program from a source tree
    from _gguf_bytes import (  # type: ignore[import-not-found,no-redef]
        GgufError, check_lengths, encoded)

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3": "Qwen3ForCausalLM"}
# Keys behind "<architecture>." whose meaning is known here. Other keys may change the outputs of
# the model, so a file with one of them is refused.
KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.causal",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout"}
# Keys that say nothing as long as their value is 0.
ZERO_KEYS = {"expert_count", "expert_used_count", "attention.sliding_window", "rope.scale_linear"}

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # values of tokenizer.ggml.token_type

DTYPES = {"bf16": ("BF16", 2), "f16": ("F16", 2), "f32": ("F32", 4)}
# The scaling of RoPE in Llama 3.1 and later. GGUF has its effect on the frequencies only, as a
# tensor; the factor is found from that.
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}

Progress = Callable[[int, int, str], None]


class _Target(NamedTuple):
    """A tensor to write: the source's name, the shape, and the heads of a permuted projection."""

    source: str
    shape: Tuple[int, ...]
    heads: int = 0


def _sequence(first: Dict[str, Any], use_regex: bool) -> Dict[str, Any]:
    """A pre-tokenizer of a first step and ByteLevel."""
    return {"type": "Sequence", "pretokenizers": [first, {**BYTE_LEVEL, "use_regex": use_regex}]}


def _pre_tokenizer(name: str) -> Dict[str, Any]:
    """The pre_tokenizer of a tokenizer.json for a value of tokenizer.ggml.pre."""
    if name == "gpt-2":
        return {**BYTE_LEVEL, "use_regex": True}
    if name == "smollm":
        return _sequence({"type": "Digits", "individual_digits": True}, True)
    digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}
    if name not in digits:
        raise GgufError(f"tokenizer.ggml.pre {name!r} is not supported, only gpt-2, smollm, qwen2 "
                        "and llama-bpe")
    return _sequence({"type": "Split", "pattern": {"Regex": WORDS + digits[name] + REST},
                      "behavior": "Isolated", "invert": False}, False)


class _File:
    """A GGUF file's metadata and tensors, with errors that name the field."""

    def __init__(self, path: "str | os.PathLike[str]") -> None:
        try:
            import gguf
        except ImportError as error:
            raise GgufError(f"the package gguf is needed: pip install gguf ({error})") from error
        self._gguf = gguf
        try:
            check_lengths(path)
            reader = gguf.GGUFReader(path)
            self.fields = {name: field.contents() for name, field in reader.fields.items()}
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        except GgufError:
            raise
        except OSError as error:
            raise GgufError(f"{error.strerror or error}") from error
        # The reader checks little: damaged files end in whatever NumPy raises.
        except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError,
                MemoryError) as error:
            raise GgufError(f"not a readable GGUF file: {error}") from error
        self.architecture = self.text("general.architecture")

    def value(self, key: str, default: Any = None) -> Any:
        found = self.fields.get(key, default)
        if found is None:
            raise GgufError(f"{key} is missing")
        return found

    def text(self, key: str, default: Optional[str] = None) -> str:
        found = self.value(key, default)
        if not isinstance(found, str):
            raise GgufError(f"{key} is no text: {found!r:.80}")
        return found

    def integer(self, key: str, default: Optional[int] = None) -> int:
        found = self.value(key, default)
        if isinstance(found, list) and found and all(one == found[0] for one in found):
            found = found[0]  # one value for each layer, all alike
        if isinstance(found, bool) or not isinstance(found, int):
            raise GgufError(f"{key} is no integer: {found!r:.80}")
        return found

    def size(self, key: str, default: Optional[int] = None) -> int:
        """A size of the architecture, which is between 1 and 2^24."""
        found = self.integer(f"{self.architecture}.{key}", default)
        if not 1 <= found <= 1 << 24:
            raise GgufError(f"{self.architecture}.{key} is {found}, not between 1 and 2^24")
        return found

    def number(self, key: str, default: Optional[float] = None) -> float:
        """A positive number of the architecture, with the digits of its 32-bit value."""
        found = self.value(f"{self.architecture}.{key}", default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or \
                not math.isfinite(found) or found <= 0:
            raise GgufError(f"{self.architecture}.{key} is no positive number: {found!r:.80}")
        import numpy
        return float(str(numpy.float32(found)))

    def texts(self, key: str) -> List[str]:
        found = self.value(key)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise GgufError(f"{key} is no list of texts")
        return found

    def shape(self, name: str) -> Tuple[int, ...]:
        if name not in self.tensors:
            raise GgufError(f"the tensor {name} is missing")
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def floats(self, name: str) -> Any:
        """A tensor as float32, dequantized; its shape as in Hugging Face's files."""
        import numpy
        tensor = self.tensors[name]
        try:
            values = self._gguf.dequantize(tensor.data, tensor.tensor_type)
            values = values.reshape(self.shape(name))
        except (NotImplementedError, ValueError) as error:
            raise GgufError(f"the tensor {name} of type {tensor.tensor_type.name} cannot be "
                            f"dequantized: {error}") from error
        if not numpy.isfinite(values).all():
            raise GgufError(f"the tensor {name} has values that are not finite")
        return values


def _check_keys(file: _File) -> None:
    if file.architecture not in ARCHITECTURES:
        raise GgufError(f"architecture {file.architecture!r} is not supported, only "
                        f"{', '.join(ARCHITECTURES)}")
    if file.integer("split.count", 0) > 1:
        raise GgufError("the model is split over several files; merge them with gguf-split first")
    prefix = file.architecture + "."
    for key, value in file.fields.items():
        name = key[len(prefix):]
        if not key.startswith(prefix) or name in KNOWN_KEYS or name in ZERO_KEYS and value == 0:
            continue
        raise GgufError(f"{key} = {value!r:.80} is not supported")


def _head_dim(file: _File) -> int:
    heads = file.size("attention.head_count")
    head_dim = file.size("attention.key_length",
                         max(1, file.size("embedding_length") // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.size(key, head_dim) != head_dim:
            raise GgufError(f"{file.architecture}.{key} is not the {head_dim} channels of a key")
    if head_dim % 2 != 0:
        raise GgufError(f"a head has {head_dim} channels; they must be even for RoPE")
    return head_dim


def _llama3_factors(factor: float, theta: float, head_dim: int) -> List[float]:
    """The divisors of the frequencies for a factor of Llama 3's scaling."""
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    original = LLAMA3["original_max_position_embeddings"]
    factors = []
    for channel in range(0, head_dim, 2):
        turns = original * theta ** (-channel / head_dim) / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))  # type: ignore[operator]
        factors.append(1 / (kept + (1 - kept) / factor))
    return factors


def _rope_scaling(file: _File, head_dim: int) -> Optional[Dict[str, Any]]:
    prefix = f"{file.architecture}.rope.scaling."
    kind = file.text(prefix + "type", "none")
    if "rope_freqs.weight" in file.tensors:
        factors = file.floats("rope_freqs.weight").reshape(-1).tolist()
        found = round(max(factors, default=1.0), 3)
        expected = _llama3_factors(found, file.number("rope.freq_base", 10000.0), head_dim)
        if kind not in ("none", "llama3") or len(factors) != len(expected) or any(
                abs(a - b) > 1e-3 * b for a, b in zip(factors, expected)):
            raise GgufError("the tensor rope_freqs.weight is not the scaling of Llama 3.1 and "
                            "later")
        return {**LLAMA3, "factor": found}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise GgufError(f"{prefix}type {kind!r} is not supported, only none, linear and yarn")
    scaling: Dict[str, Any] = {"rope_type": kind, "factor": file.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.size(
            "rope.scaling.original_context_length")
    return scaling


def _attention_bias(file: _File, layers: int) -> bool:
    """Whether the projections of all layers have biases, as the architecture expects them."""
    names = ["attn_q", "attn_k", "attn_v", "attn_output"]
    there = {name for name in names
             if any(f"blk.{i}.{name}.bias" in file.tensors for i in range(layers))}
    allowed = [set(names[:3])] if file.architecture == "qwen2" else [set(), set(names)]
    if there not in allowed:
        raise GgufError(f"biases of {sorted(there) or 'no projection'} are not what "
                        f"{ARCHITECTURES[file.architecture]} has")
    return bool(there)


def _special_ids(file: _File) -> Dict[str, Any]:
    there = {name: file.integer(f"tokenizer.ggml.{name}_token_id")
             for name in ("bos", "eos", "eot", "eom")
             if f"tokenizer.ggml.{name}_token_id" in file.fields}
    ids: Dict[str, Any] = {"bos_token_id": there.pop("bos")} if "bos" in there else {}
    if there:
        ids["eos_token_id"] = sorted(set(there.values()))
    return ids


def _config(file: _File) -> Dict[str, Any]:
    """The fields of config.json."""
    head_dim, heads = _head_dim(file), file.size("attention.head_count")
    layers, vocabulary = file.size("block_count"), file.shape("token_embd.weight")[0]
    if layers > len(file.tensors):
        raise GgufError(f"{file.architecture}.block_count is {layers}, the file has "
                        f"{len(file.tensors)} tensors")
    scaling = _rope_scaling(file, head_dim)
    return {
        "architectures": [ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "vocab_size": vocabulary,
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": file.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.size("context_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number("rope.freq_base", 10000.0),
        **({"rope_scaling": scaling} if scaling else {}),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": _attention_bias(file, layers),
        **_special_ids(file),
    }


def _targets(architecture: str, config: Dict[str, Any]) -> Dict[str, _Target]:
    """The tensors of model.safetensors by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config["head_dim"]
    # llama.cpp stores q and k of this architecture with the two halves of a head interleaved.
    permuted = architecture == "llama"
    words = (config["vocab_size"], hidden)
    targets = {"model.embed_tokens.weight": _Target("token_embd.weight", words),
               "model.norm.weight": _Target("output_norm.weight", (hidden,))}
    if not config["tie_word_embeddings"]:
        targets["lm_head.weight"] = _Target("output.weight", words)
    for i in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{i}.", f"blk.{i}."
        projections = {
            "self_attn.q_proj": ("attn_q", heads * head_dim, hidden, heads if permuted else 0),
            "self_attn.k_proj": ("attn_k", kv_heads * head_dim, hidden,
                                 kv_heads if permuted else 0),
            "self_attn.v_proj": ("attn_v", kv_heads * head_dim, hidden, 0),
            "self_attn.o_proj": ("attn_output", hidden, heads * head_dim, 0),
            "mlp.gate_proj": ("ffn_gate", inner, hidden, 0),
            "mlp.up_proj": ("ffn_up", inner, hidden, 0),
            "mlp.down_proj": ("ffn_down", hidden, inner, 0)}
        for name, (source, rows, columns, paired) in projections.items():
            targets[f"{ours}{name}.weight"] = _Target(f"{theirs}{source}.weight", (rows, columns),
                                                      paired)
            if name.startswith("self_attn") and config["attention_bias"] and \
                    (architecture != "qwen2" or source != "attn_output"):
                targets[f"{ours}{name}.bias"] = _Target(f"{theirs}{source}.bias", (rows,), paired)
        norms = {"input_layernorm": ("attn_norm", hidden),
                 "post_attention_layernorm": ("ffn_norm", hidden)}
        if architecture == "qwen3":
            norms.update({f"self_attn.{x}_norm": (f"attn_{x}_norm", head_dim) for x in "qk"})
        for name, (source, size) in norms.items():
            targets[f"{ours}{name}.weight"] = _Target(f"{theirs}{source}.weight", (size,))
    return targets


def _check_tensors(file: _File, targets: Dict[str, _Target]) -> None:
    for target in targets.values():
        if file.shape(target.source) != target.shape:
            raise GgufError(f"the tensor {target.source} has the shape "
                            f"{list(file.shape(target.source))}, not {list(target.shape)}")
    known = {target.source for target in targets.values()} | {"rope_freqs.weight"}
    unknown = sorted(set(file.tensors) - known)
    if unknown:
        raise GgufError(f"the tensor {unknown[0]} is not supported")


def _in_order(values: Any, heads: int) -> Any:
    """Rows of every head in Hugging Face's order: the first channel of each pair, then the
    second."""
    rows = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return rows.swapaxes(1, 2).reshape(values.shape)


def _write_tensors(file: _File, targets: Dict[str, _Target], dtype: str, out: BinaryIO,
                   progress: Progress) -> None:
    header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, target in targets.items():
        # Norms and biases are small, and stay as exact as they are.
        stored, size = DTYPES["f32" if len(target.shape) == 1 else dtype]
        begin, end = end, end + math.prod(target.shape) * size
        header[name] = {"dtype": stored, "shape": list(target.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for done, (name, target) in enumerate(targets.items()):
        progress(done, len(targets), target.source)
        values = file.floats(target.source)
        if target.heads:
            values = _in_order(values, target.heads)
        out.write(encoded(values, header[name]["dtype"]))
    progress(len(targets), len(targets), "")


def _token_types(file: _File, count: int) -> List[int]:
    types: List[int] = file.value("tokenizer.ggml.token_type", [NORMAL] * count)
    if not isinstance(types, list) or len(types) != count:
        raise GgufError("tokenizer.ggml.token_type has not one entry for each token")
    return types


def _begin_of_text(file: _File, tokens: List[str]) -> List[Dict[str, Any]]:
    """Steps of a post-processor that puts the begin-of-sequence token before a text, if one
    does."""
    own = file.text("tokenizer.ggml.pre") == "llama-bpe"
    if not file.value("tokenizer.ggml.add_bos_token", own):
        return []
    token = file.integer("tokenizer.ggml.bos_token_id")
    if not 0 <= token < len(tokens):
        raise GgufError(f"tokenizer.ggml.bos_token_id {token} is no token")
    text = tokens[token]
    special = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return [{"type": "TemplateProcessing", "single": [special, first],
             "pair": [special, first, special, second],
             "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]}}}]


def _tokenizer(file: _File) -> Dict[str, Any]:
    """The fields of tokenizer.json."""
    model = file.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise GgufError(f"tokenizer.ggml.model {model!r} is not supported, only 'gpt2' (byte-level "
                        "BPE)")
    name = file.text("tokenizer.ggml.pre")
    tokens, merges = file.texts("tokenizer.ggml.tokens"), file.texts("tokenizer.ggml.merges")
    types = _token_types(file, len(tokens))
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, types)) if kind != UNUSED}
    if len(vocabulary) != sum(kind != UNUSED for kind in types):
        raise GgufError("tokenizer.ggml.tokens has the same token twice")
    byte_level = {**BYTE_LEVEL, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": kind == CONTROL}
            for i, (text, kind) in enumerate(zip(tokens, types))
            if kind in (CONTROL, USER_DEFINED)],
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": _pre_tokenizer(name),
        "post_processor": {"type": "Sequence",
                           "processors": [byte_level, *_begin_of_text(file, tokens)]},
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": name == "llama-bpe",
                  "vocab": vocabulary, "merges": merges},
    }


def _tokenizer_config(file: _File, config: Dict[str, Any]) -> Dict[str, Any]:
    """The fields of tokenizer_config.json."""
    tokens = file.texts("tokenizer.ggml.tokens")
    fields: Dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast",
                              "clean_up_tokenization_spaces": False,
                              "model_max_length": config["max_position_embeddings"]}
    for name in ("bos", "eos"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in file.fields and 0 <= file.integer(key) < len(tokens):
            fields[f"{name}_token"] = tokens[file.integer(key)]
    if "tokenizer.chat_template" in file.fields:
        fields["chat_template"] = file.text("tokenizer.chat_template")
    return fields


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def import_gguf(path: "str | os.PathLike[str]", folder: "str | os.PathLike[str]", *,
                dtype: str = "bf16", overwrite: bool = False,
                progress: Progress = lambda done, total, name: None) -> None:
    """Converts the GGUF file `path` into `folder`, which is made.

    dtype: of matrices, one of bf16, f16 and f32; norms and biases are f32 always. overwrite: write
    into a folder that has files. progress: is called with the tensors that are done, their number,
    and the name of the next one. config.json is written last, so a folder with it is whole.
    Raises GgufError if the file is damaged or not supported, OSError if the folder can't be
    written.
    """
    if dtype not in DTYPES:
        raise GgufError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    folder = pathlib.Path(folder)
    if folder.exists() and not overwrite and any(folder.iterdir()):
        raise GgufError(f"the folder {folder} is not empty")
    file = _File(path)
    _check_keys(file)
    config = _config(file)
    targets = _targets(file.architecture, config)
    _check_tensors(file, targets)
    tokenizer = _tokenizer(file)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    part = folder / "model.safetensors.part"
    try:
        with open(part, "wb") as out:
            _write_tensors(file, targets, dtype, out, progress)
        part.replace(folder / "model.safetensors")
    finally:
        part.unlink(missing_ok=True)
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(file, config))
    _write_json(folder / "generation_config.json", _special_ids(file))
    _write_json(folder / "config.json", config)


def _show(done: int, total: int, name: str) -> None:
    """One changing line on a terminal, nothing elsewhere."""
    if sys.stderr.isatty():
        text = f"{done} of {total} tensors  {name}"
        print(f"\r{text:<70.70}", end="" if done < total else "\n", file=sys.stderr, flush=True)


def main() -> None:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(
        prog="python3 -m crumb.import_gguf", description=__doc__.splitlines()[0],
        epilog="Supported are the architectures " + ", ".join(ARCHITECTURES) + " with byte-level "
               "BPE vocabularies. Example: python3 -m crumb.import_gguf model.gguf models/mine")
    parser.add_argument("file", help="GGUF file")
    parser.add_argument("folder", help="folder to write, which must be empty or not exist")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16",
                        help="type of matrices; norms and biases are f32 (default: bf16)")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder with files")
    options = parser.parse_args()
    try:
        import_gguf(options.file, options.folder, dtype=options.dtype,
                    overwrite=options.overwrite, progress=_show)
    except (GgufError, OSError) as error:
        sys.exit(f"crumb.import_gguf: {options.file}: {error}")
    print(f"wrote {options.folder}")


if __name__ == "__main__":
    main()
