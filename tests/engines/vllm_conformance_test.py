#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The suite of hit correctness (tests/conformance) through vLLM and CrumbConnector, on the CPU:
vllm_conformance_test.py --build DIR

Needs build/engines (tests/engines/install.sh); exit code 77 without it. Pages are exact (BF16), so
that a hit has to give the output of a computed prompt, and a wrong hit gives another one.

Four cases of the suite are not run here. The small model takes no images, and vLLM's CPU build has
no FP8 weights: python/tests/vllm_requests_test.py covers "another image", and
python/tests/transfer_test.py "another dtype". "generated tokens" and "a rejected draft token" need
a model whose output the test chooses, and stand here as tests of their own with the output that the
model gives.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import shutil
import struct
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests/deploy"), str(ROOT / "tests/conformance")]
import cases  # noqa: E402
from engine_process import Engine, package_environment, run_tests  # noqa: E402
from services import Crumbd  # noqa: E402

OPTIONS = argparse.Namespace()
VENV = ROOT / "build/engines/venv"
NOT_RUN = {"another image", "another dtype", "generated tokens", "a rejected draft token"}
ENGINES_MAX = 3  # vLLM processes at once, of some 1.5 GB each
OUTPUT_TOKENS = 8


def write_adapter(folder, seed):
    """A LoRA adapter for the small model, with random weights."""
    config = json.loads((ROOT / "models/data/tiny-lm/config.json").read_text())
    hidden, rank = config["hidden_size"], 4
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    header, data = {}, b""
    for layer in range(config["num_hidden_layers"]):
        for name, count in heads.items():
            for part, shape in (("A", [rank, hidden]), ("B", [count * config["head_dim"], rank])):
                values = bf16_values(f"{seed} {layer} {name} {part}", shape[0] * shape[1])
                header[f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"
                       ] = {"dtype": "BF16", "shape": shape,
                            "data_offsets": [len(data), len(data) + len(values)]}
                data += values
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none",
         "target_modules": list(heads), "base_model_name_or_path": "small"}))


def bf16_values(seed, count):
    """So many BF16 values of magnitude 1/8 to 1/4."""
    raw = bytearray(hashlib.shake_128(seed.encode()).digest(2 * count))
    raw[0::2] = bytes(byte & 0x7f for byte in raw[0::2])
    raw[1::2] = bytes(byte & 0x80 | 0x3e for byte in raw[1::2])
    return bytes(raw)


def change_weights(folder):
    """Negates the signs of some values in the middle of the weight file."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    begin, end = header["model.layers.1.self_attn.v_proj.weight"]["data_offsets"]
    for i in range(8 + length + begin + 1, 8 + length + end, 2):
        content[i] ^= 0x80
    path.write_bytes(content)


def words(tokens):
    """Tokens of the suite as such of the small model's vocabulary."""
    return [token % 4000 + 8 for token in tokens]


class VllmEngine:
    """Implements cases.Engine. A worker without pages of its own is an engine whose prefix cache
    was emptied: engines are kept for the next case with the same options."""

    # The suite's usual pages are INT2, and exact ones the exception; here it is the reverse.
    histories = {"int2": "bf16", "bf16": "int2"}
    window_tokens = 1

    def __init__(self, folder, socket_dir, environment):
        self.folder, self.socket_dir, self.environment = folder, socket_dir, environment
        self.engines = {}  # keys are options; the engine used last stands at the end
        self.options = None
        self.adapters = {}
        self.runs = 0

    def use_int2(self, usual):
        """Whether the usual pages are INT2 after all."""
        self.histories = {"int2": "int2", "bf16": "bf16"} if usual else VllmEngine.histories
        self.window_tokens = 256 if usual else VllmEngine.window_tokens

    def start(self, options):
        self.options = dataclasses.replace(options, history=self.histories[options.history])
        engine = self.engines.pop(self.options, None) or self.open(self.options)
        self.engines[self.options] = engine
        engine.request(reset=True)

    def open(self, options):
        while len(self.engines) >= ENGINES_MAX:
            self.engines.pop(next(iter(self.engines))).close()
        model = self.folder / "model"
        if options.weights != cases.WorkerOptions.weights:
            model = self.folder / "other-weights"
            if not model.exists():
                shutil.copytree(self.folder / "model", model)
                change_weights(model)
        vllm = {"block_size": 64, "enable_lora": True, "max_lora_rank": 8,
                "tensor_parallel_size": options.tensor_parallel}
        if options.rope != cases.WorkerOptions.rope:
            vllm["hf_overrides"] = {"rope_parameters": {"rope_type": "default",
                                                        "rope_theta": 10000.0}}
        return Engine(VENV / "bin/python", model, {
            "socket_dir": self.socket_dir, "load": "always", "deadline": 20, "model": options.model,
            "history": options.history, "rotation": options.method, "tenant": options.tenant}, vllm,
                      self.environment)

    def stop(self):
        self.options = None

    def run(self, request):
        engine, prompt = self.engines[self.options], words(request.tokens)
        more = {"salt": request.cache_salt or None, "lora": self.adapter(request.lora),
                "max_tokens": OUTPUT_TOKENS}
        result = engine.generate(prompt, **more)
        # Its pages are in crumbd when the same request is a hit.
        window = 1 if self.options.history == "bf16" else 256
        engine.hit(prompt, (len(prompt) - window) // cases.PAGE_TOKENS * cases.PAGE_TOKENS, **more)
        # The output is compared with that of the same engine, because ranks round differently.
        self.runs += 1
        alone = engine.generate(prompt, **{**more, "salt": f"alone {self.runs}"})
        assert alone["cached"] == 0, alone
        same = result["tokens"] == alone["tokens"]
        return cases.Result(result["cached"], "as computed" if same else repr(result["tokens"]))

    def adapter(self, name):
        if not name:
            return None
        if name not in self.adapters:
            self.adapters[name] = self.folder / name
            write_adapter(self.adapters[name], name)
        return str(self.adapters[name])

    def close(self):
        for engine in self.engines.values():
            engine.close()


class VllmConformanceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        shutil.copytree(ROOT / "models/data/tiny-lm", cls.folder / "model")
        (cls.folder / "model/tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}')
        cls.environment = package_environment(OPTIONS.build, cls.folder)
        crumbd = Crumbd(pathlib.Path(OPTIONS.build) / "bin", tempfile.mkdtemp(dir=cls.folder))
        cls.addClassCleanup(crumbd.stop)
        crumbd.start()
        cls.engine = VllmEngine(cls.folder, str(crumbd.folder), cls.environment)
        cls.addClassCleanup(cls.engine.close)

    def test_generated_tokens_are_found_as_a_prompt(self):
        self.check_generated({})

    def test_rejected_drafts_are_in_no_page(self):
        drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4,
                                         "prompt_lookup_max": 3, "prompt_lookup_min": 1}}
        self.check_generated(drafts)

    def test_after_a_reset_nothing_of_before_is_found(self):
        self.engine.start(cases.WorkerOptions(tenant="reset"))
        engine = self.engine.engines[self.engine.options]
        prompt = words(cases.tokens("reset"))
        self.assertEqual(engine.generate(prompt)["cached"], 0)
        self.assertEqual(engine.hit(prompt, 576)["cached"], 576)
        self.assertEqual(engine.request(reset="all"), {"reset": True})
        self.assertEqual(engine.generate(prompt)["cached"], 0)
        self.assertEqual(engine.hit(prompt, 576)["cached"], 576)

    def check_generated(self, options):
        """The output of one engine is part of the prompt of another one, which hits it and
        generates the tokens of an engine that computes all of it."""
        config = {"socket_dir": self.engine.socket_dir, "load": "always", "deadline": 20,
                  "history": "bf16", "tenant": f"generated {len(options)}"}
        prompt = words(cases.tokens("generated", 320))
        writer = Engine(VENV / "bin/python", self.folder / "model", config,
                        {"block_size": 64, **options}, self.environment)
        self.addCleanup(writer.close)
        output = writer.generate(prompt, 200)["tokens"]
        longer = prompt + output + prompt[:70]
        reader = Engine(VENV / "bin/python", self.folder / "model", config, {"block_size": 64},
                        self.environment)
        self.addCleanup(reader.close)
        cold = reader.generate(longer, OUTPUT_TOKENS, salt="alone")
        self.assertEqual(cold["cached"], 0)
        pages = (320 + 200 - 1) // 64  # the last token that was generated is not computed
        warm = reader.hit(longer, 64 * pages, max_tokens=OUTPUT_TOKENS)
        self.assertEqual((warm["cached"], warm["tokens"]), (64 * pages, cold["tokens"]))


def case_test(case):
    def test(self):
        self.engine.use_int2(case.name == "another method")  # exact pages depend on no method
        self.assertEqual(cases.check(case, self.engine), "")
    return test


# One after the other, those with the same options together: an engine takes half a minute to start.
for number, one in enumerate(case for case in cases.CASES if case.name not in NOT_RUN):
    setattr(VllmConformanceTest,
            f"test_{number:02}_{one.name.lower().replace(' ', '_').replace('-', '_')}",
            case_test(one))


if __name__ == "__main__":
    run_tests("vLLM", "engines", "install.sh", OPTIONS, __doc__)
