# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.import_gguf over small files that the package gguf writes here."""

import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

from crumb import import_gguf


def installed(name):
    """A module, or None if it is not installed."""
    try:
        return __import__(name)
    except ImportError:
        return None


gguf, numpy, tokenizers = installed("gguf"), installed("numpy"), installed("tokenizers")
torch, transformers = installed("torch"), installed("transformers")

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 64, 96, 4, 2, 32, 2, 300
BIASED = {"llama": (), "qwen2": ("q", "k", "v"), "qwen3": ()}
NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
         "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down"}
TEXT = ("The store keeps pages of 64 tokens in 2 bits. It's 1024 pages, isn't it? "
        "naïve café — ½ of 12345 tokens\n\n\tdef f(x): return x ** 2\n") * 3


def random_tensors(architecture, *, tied=True, biased=None, seed=1):
    """The tensors of a model by the names of Hugging Face's files."""
    generator = numpy.random.default_rng(seed)

    def some(*shape):
        return generator.standard_normal(shape).astype(numpy.float32)

    tensors = {"model.embed_tokens.weight": some(VOCABULARY, HIDDEN),
               "model.norm.weight": 1 + some(HIDDEN) / 4}
    if not tied:
        tensors["lm_head.weight"] = some(VOCABULARY, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, rows, columns in (
                ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
                ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
                ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
                ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM), ("mlp.gate_proj", INNER, HIDDEN),
                ("mlp.up_proj", INNER, HIDDEN), ("mlp.down_proj", HIDDEN, INNER)):
            tensors[f"{layer}{name}.weight"] = some(rows, columns) / columns ** 0.5
            wanted = BIASED[architecture] if biased is None else biased
            if name.startswith("self_attn") and name[10] in wanted:
                tensors[f"{layer}{name}.bias"] = some(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = 1 + some(HIDDEN) / 4
        if architecture == "qwen3":
            for name in ("q", "k"):
                tensors[f"{layer}self_attn.{name}_norm.weight"] = 1 + some(HEAD_DIM) / 4
    return tensors


def gguf_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm",
            "lm_head": "output"}[stem] + "." + kind


def as_llama_cpp_stores(name, values):
    """Rows of q and k as llama.cpp's converter orders them: channel i and i + half next to each
    other."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return values
    half = HEAD_DIM // 2
    order = [head * HEAD_DIM + part * half + i
             for head in range(values.shape[0] // HEAD_DIM) for i in range(half) for part in (0, 1)]
    return values[order]


def small_tokenizer(pre="smollm"):
    """A byte-level BPE tokenizer, trained on a short text."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.normalizer = tokenizers.normalizers.NFC() if pre == "qwen2" else None
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|begin|>", "<|end|>"], show_progress=False,
        initial_alphabet=sorted(alphabet)))
    return trained


class Source:
    """A GGUF file to write: fields by key, and tensors."""

    def __init__(self, architecture="llama", *, pre="smollm", **options):
        self.architecture = architecture
        self.tensors = random_tensors(architecture, **options)
        self.types = {}  # indexed by the name of Hugging Face's file; F32 if none is given
        self.extra_tensors = {}
        a = architecture
        self.integers = {
            f"{a}.block_count": LAYERS, f"{a}.context_length": 512, f"{a}.embedding_length": HIDDEN,
            f"{a}.feed_forward_length": INNER, f"{a}.attention.head_count": HEADS,
            f"{a}.attention.head_count_kv": KV_HEADS, f"{a}.attention.key_length": HEAD_DIM,
            f"{a}.attention.value_length": HEAD_DIM, f"{a}.rope.dimension_count": HEAD_DIM,
            "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
        self.floats = {f"{a}.rope.freq_base": 5e5, f"{a}.attention.layer_norm_rms_epsilon": 1e-5}
        self.strings = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
                        "tokenizer.chat_template": "<|im_start|>{{ x }}<|im_end|>"}
        self.flags = {}
        self.tokenizer = small_tokenizer(pre)
        model = json.loads(self.tokenizer.to_str())["model"]
        self.tokens = sorted(model["vocab"], key=model["vocab"].get)
        self.merges = [" ".join(merge) for merge in model["merges"]]
        self.token_types = [3 if text.startswith("<|") else 1 for text in self.tokens]

    def write(self, path):
        writer = gguf.GGUFWriter(path, self.architecture)
        for add, fields in ((writer.add_uint32, self.integers), (writer.add_float32, self.floats),
                            (writer.add_string, self.strings), (writer.add_bool, self.flags)):
            for key, value in fields.items():
                add(key, value)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.token_types)
        writer.add_token_merges(self.merges)
        for name, values in self.tensors.items():
            kind = gguf.GGMLQuantizationType[self.types.get(name, "F32")]
            stored = values if self.architecture != "llama" else as_llama_cpp_stores(name, values)
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
        for name, values in self.extra_tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def read_safetensors(path):
    """name -> (dtype, values as float32), by the format's description."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[8 + size + begin:8 + size + end]
        if entry["dtype"] == "BF16":
            values = (numpy.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = numpy.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
        tensors[name] = entry["dtype"], values.astype("<f4").reshape(entry["shape"])
    return tensors


@unittest.skipIf(gguf is None or tokenizers is None, "needs gguf and tokenizers")
class ImportGgufTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.file, self.model = self.folder / "model.gguf", self.folder / "model"

    def imported(self, source, **options):
        import_gguf.import_gguf(source.write(self.file), self.model, overwrite=True, **options)
        return json.loads((self.model / "config.json").read_text())

    def test_tensors_of_every_family_come_back(self):
        for architecture, tied in (("llama", True), ("llama", False), ("qwen2", False),
                                   ("qwen3", True)):
            with self.subTest(architecture, tied=tied):
                source = Source(architecture, tied=tied)
                config = self.imported(source, dtype="f32")
                self.assertEqual(config["architectures"],
                                 [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
                                  [architecture] + "ForCausalLM"])
                self.assertEqual(config["tie_word_embeddings"], tied)
                self.assertEqual((config["rope_theta"], config["rms_norm_eps"]), (5e5, 1e-5))
                self.assertEqual((config["vocab_size"], config["head_dim"]), (VOCABULARY, HEAD_DIM))
                found = read_safetensors(self.model / "model.safetensors")
                self.assertEqual(set(found), set(source.tensors))
                for name, values in source.tensors.items():
                    numpy.testing.assert_array_equal(found[name][1], values, name)

    def test_biases_of_llama_are_permuted_too(self):
        source = Source("llama", biased=("q", "k", "v", "o"))
        self.assertTrue(self.imported(source, dtype="f32")["attention_bias"])
        found = read_safetensors(self.model / "model.safetensors")
        name = "model.layers.1.self_attn.q_proj.bias"
        numpy.testing.assert_array_equal(found[name][1], source.tensors[name])

    def test_quantized_tensors_are_dequantized(self):
        source = Source()
        layer = "model.layers.0."
        source.types = {layer + "self_attn.q_proj.weight": "Q4_1",
                        layer + "self_attn.k_proj.weight": "Q8_0",
                        layer + "self_attn.v_proj.weight": "Q4_0",
                        layer + "mlp.up_proj.weight": "Q5_1", layer + "mlp.gate_proj.weight": "F16",
                        layer + "mlp.down_proj.weight": "BF16"}
        steps = {"bf16": ("BF16", 2.0 ** -8), "f16": ("F16", 2.0 ** -11), "f32": ("F32", 0.0)}
        for dtype, (stored, step) in steps.items():
            self.imported(source, dtype=dtype)
            found = read_safetensors(self.model / "model.safetensors")
            for name, kind in source.types.items():
                kind = gguf.GGMLQuantizationType[kind]
                # Rows are quantized one by one, so the order of rows does not matter.
                exact = gguf.dequantize(gguf.quants.quantize(source.tensors[name], kind), kind)
                self.assertEqual(found[name][0], stored)
                error = numpy.abs(found[name][1] - exact)
                self.assertTrue((error <= step * numpy.abs(exact) + 1e-7 * (step > 0)).all(), name)
            self.assertEqual(found["model.norm.weight"][0], "F32")

    def test_the_scaling_of_llama_3_is_found_in_its_frequencies(self):
        source = Source()
        frequencies = 5e5 ** (-numpy.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        wavelengths = 2 * numpy.pi / frequencies
        smooth = (8192 / wavelengths - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / 32.0 + smooth)
        factors = numpy.where(wavelengths < 8192 / 4, 1.0,
                              numpy.where(wavelengths > 8192, 32.0, between))
        source.extra_tensors["rope_freqs.weight"] = factors.astype(numpy.float32)
        self.assertEqual(self.imported(source)["rope_scaling"], {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192})
        source.extra_tensors["rope_freqs.weight"][7] *= 1.1
        with self.assertRaisesRegex(import_gguf.GgufError, "rope_freqs.weight"):
            self.imported(source)

    def test_other_scalings(self):
        source = Source()
        source.strings["llama.rope.scaling.type"] = "linear"
        source.floats["llama.rope.scaling.factor"] = 4.0
        self.assertEqual(self.imported(source)["rope_scaling"],
                         {"rope_type": "linear", "factor": 4.0})
        source.strings["llama.rope.scaling.type"] = "yarn"
        source.integers["llama.rope.scaling.original_context_length"] = 128
        self.assertEqual(self.imported(source)["rope_scaling"]["original_max_position_embeddings"],
                         128)

    def test_ids_are_those_of_the_source(self):
        random_text = random.Random(3)
        letters = list("ab cd12345.\n\t'äé½") + ["It's", "  ", "token", "<|end|>", "e\u0301"]
        texts = [TEXT, ""] + ["".join(random_text.choices(letters, k=25)) for _ in range(200)]
        for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
            with self.subTest(pre):
                source = Source(pre=pre)
                expected = source.tokenizer
                byte_level = tokenizers.pre_tokenizers.ByteLevel
                if pre == "smollm":
                    expected.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
                        tokenizers.pre_tokenizers.Digits(individual_digits=True),
                        byte_level(add_prefix_space=False)])
                elif pre != "gpt-2":
                    expected.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
                        tokenizers.pre_tokenizers.Split(tokenizers.Regex(
                            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
                            + (r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}")
                            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"),
                        byte_level(add_prefix_space=False, use_regex=False)])
                if pre == "llama-bpe":
                    state = json.loads(expected.to_str())
                    state["model"]["ignore_merges"] = True
                    expected = tokenizers.Tokenizer.from_str(json.dumps(state))
                self.imported(source)
                found = tokenizers.Tokenizer.from_file(str(self.model / "tokenizer.json"))
                for text in texts:
                    self.assertEqual(found.encode(text, add_special_tokens=False).ids,
                                     expected.encode(text, add_special_tokens=False).ids, text)
                begin = [0] if pre == "llama-bpe" else []
                self.assertEqual(found.encode("").ids, begin)
        fields = json.loads((self.model / "tokenizer_config.json").read_text())
        self.assertEqual(fields["chat_template"], "<|im_start|>{{ x }}<|im_end|>")
        self.assertEqual((fields["bos_token"], fields["eos_token"]), ("<|begin|>", "<|end|>"))
        self.assertEqual(json.loads((self.model / "generation_config.json").read_text()),
                         {"bos_token_id": 0, "eos_token_id": [1]})

    def test_errors_name_what_is_not_supported(self):
        def integer(key, value):
            return lambda source: source.integers.update({key: value})

        def string(key, value):
            return lambda source: source.strings.update({key: value})

        def add_tensor(source):
            source.extra_tensors["blk.0.attn_sinks.weight"] = numpy.zeros(4, numpy.float32)

        def not_finite(source):
            source.tensors["model.norm.weight"][3] = float("inf")

        cases = [
            (integer("llama.expert_count", 8), "llama.expert_count = 8"),
            (integer("llama.attention.sliding_window", 128), "sliding_window = 128"),
            (integer("llama.future_detail", 1), "llama.future_detail"),
            (integer("llama.rope.dimension_count", 16), "rope.dimension_count"),
            (integer("llama.block_count", 0), "block_count is 0"),
            (integer("llama.block_count", 3), "blk.2.attn_q.weight is missing"),
            (integer("llama.embedding_length", 128), r"shape \[300, 64\], not \[300, 128\]"),
            (integer("split.count", 2), "several files"),
            (string("llama.rope.scaling.type", "longrope"), "longrope"),
            (string("tokenizer.ggml.model", "llama"), "byte-level BPE"),
            (string("tokenizer.ggml.pre", "tekken"), "tekken"),
            (lambda source: source.floats.pop("llama.attention.layer_norm_rms_epsilon"),
             "layer_norm_rms_epsilon is missing"),
            (lambda source: source.floats.update({"llama.rope.freq_base": float("nan")}),
             "no positive number"),
            (lambda source: source.token_types.pop(), "token_type"),
            (lambda source: source.tokens.__setitem__(5, source.tokens[6]), "twice"),
            (lambda source: source.tensors.pop("model.norm.weight"),
             "output_norm.weight is missing"),
            (add_tensor, "attn_sinks"), (not_finite, "output_norm.weight has values"),
            (lambda source: source.tensors.update(
                {"model.layers.0.self_attn.q_proj.bias": numpy.zeros(128, numpy.float32)}),
             "attn_q"),
        ]
        for change, message in cases:
            with self.subTest(message):
                source = Source()
                change(source)
                with self.assertRaisesRegex(import_gguf.GgufError, message):
                    self.imported(source)
                self.assertFalse((self.model / "config.json").exists())
                self.assertFalse((self.model / "model.safetensors.part").exists())
        source = Source("qwen3")
        source.architecture = "gemma3"
        with self.assertRaisesRegex(import_gguf.GgufError, "'gemma3' is not supported"):
            self.imported(source)

    def test_damaged_files_are_errors(self):
        whole = Source().write(self.file).read_bytes()
        generator = random.Random(5)
        inputs = [b"", b"GGUF", whole[:100], whole[:3000], whole[:len(whole) // 2], whole[:-100]]
        for _ in range(60):
            damaged = bytearray(whole[:8000]) if generator.random() < 0.5 else bytearray(whole)
            for _ in range(generator.randint(1, 4)):
                damaged[generator.randrange(8000)] = generator.choice([0, 1, 0x7f, 0xff])
            inputs.append(bytes(damaged))
        refused = 0
        for data in inputs:
            self.file.write_bytes(data)
            try:
                import_gguf.import_gguf(self.file, self.model, overwrite=True)
            except import_gguf.GgufError:
                refused += 1
        self.assertGreaterEqual(refused, 6)

    def test_small_files_that_name_large_amounts_end_at_once(self):
        def text(value):
            return struct.pack("<Q", len(value)) + value.encode()

        def size(name, value):
            return text("llama." + name) + struct.pack("<II", 4, value)

        def file(fields, tensors=()):
            fields = [text("general.architecture") + struct.pack("<I", 8) + text("llama"), *fields]
            head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
            data = head + b"".join(fields) + b"".join(tensors)
            return data + bytes(-len(data) % 32) + bytes(4 * HIDDEN * 4)

        sizes = [size("attention.head_count", HEADS), *(size(name, HIDDEN) for name in (
            "embedding_length", "feed_forward_length", "context_length"))]
        sizes.append(text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
        words = text("token_embd.weight") + struct.pack("<IQQIQ", 2, HIDDEN, 4, 0, 0)
        frequencies = text("rope_freqs.weight") + struct.pack("<IQIQ", 1, 0, 0, 0)
        hostile = {
            "ends in its metadata": file([text("x") + struct.pack("<IIQ", 9, 0, 1 << 40)]),
            "llama.block_count is 16777216, the file has 1 tensors": file(
                [size("block_count", 1 << 24), *sizes], [words]),
            "rope_freqs.weight": file([size("block_count", 1), *sizes], [words, frequencies])}
        for message, data in hostile.items():
            self.file.write_bytes(data)
            # A process of its own, which has an end.
            done = subprocess.run(
                [sys.executable, import_gguf.__file__, str(self.file), str(self.model)],
                capture_output=True, text=True, timeout=120, check=False)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(message, done.stderr)
            self.assertNotIn("Traceback", done.stderr)

    def test_progress_and_folders_with_files(self):
        seen = []
        self.imported(Source(), progress=lambda *step: seen.append(step))
        self.assertEqual([done for done, _, _ in seen], list(range(seen[0][1] + 1)))
        with self.assertRaisesRegex(import_gguf.GgufError, "not empty"):
            import_gguf.import_gguf(self.file, self.model)
        with self.assertRaisesRegex(import_gguf.GgufError, "dtype"):
            import_gguf.import_gguf(self.file, self.model, dtype="int8")

    def test_the_command_line(self):
        Source().write(self.file)

        def run(*arguments):
            return subprocess.run([sys.executable, import_gguf.__file__, *map(str, arguments)],
                                  capture_output=True, text=True, check=False)

        self.assertIn("--dtype", run("--help").stdout)
        done = run(self.file, self.model)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertTrue((self.model / "config.json").exists())
        again = run(self.file, self.model)
        self.assertEqual(again.returncode, 1)
        self.assertRegex(again.stderr, "^crumb.import_gguf: .*not empty\n$")
        absent = run(self.folder / "absent.gguf", self.folder / "other")
        self.assertEqual(absent.returncode, 1)
        self.assertIn("No such file", absent.stderr)

    @unittest.skipIf(torch is None or transformers is None, "needs torch and transformers")
    def test_transformers_computes_the_same(self):
        for architecture in ("llama", "qwen2", "qwen3"):
            with self.subTest(architecture):
                source = Source(architecture, tied=False)
                config = self.imported(source, dtype="f32")
                ours = transformers.AutoModelForCausalLM.from_pretrained(self.model,
                                                                         dtype=torch.float32)
                theirs = type(ours)(ours.config)
                theirs.load_state_dict({name: torch.from_numpy(values)
                                        for name, values in source.tensors.items()})
                ids = torch.arange(40)[None] * 7 % config["vocab_size"]
                with torch.no_grad():
                    self.assertTrue(torch.equal(ours.eval()(ids).logits, theirs.eval()(ids).logits))


if __name__ == "__main__":
    unittest.main()
