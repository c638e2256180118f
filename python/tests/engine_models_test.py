# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Engines whose models compute other keys and values get other keyspaces: without engines, crumbd
and the library."""

import importlib
import json
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

SOURCES = pathlib.Path(__file__).resolve().parents[1] / "src/crumb"


def stand_in(name, **members):
    """A module in place of one that needs the library or vLLM."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(members)


class InvalidArgument(Exception):
    """crumb.errors.InvalidArgument"""


stand_in("crumb", __path__=[str(SOURCES)])
stand_in("crumb.vllm", __path__=[str(SOURCES / "vllm")])
stand_in("crumb.client", Client=object, PAGE_TOKENS=64)
stand_in("crumb.errors", InvalidArgument=InvalidArgument)
stand_in("crumb.transfer", PagedCache=object, PagedRows=object)
stand_in("crumb.worker", Model=types.SimpleNamespace)
engines = importlib.import_module("crumb._engines")
vllm_model = importlib.import_module("crumb.vllm._model")

COMMIT = "0123456789abcdef" * 2 + "01234567"
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 2.0],
            "long_factor": [3.0, 4.0], "original_max_position_embeddings": 4096}


def config(max_model_len=4096, rope=None, **members):
    """vLLM's ModelConfig of a small model."""
    text = types.SimpleNamespace(rope_parameters=rope or {"rope_type": "default"},
                                 max_position_embeddings=131072, num_attention_heads=4)
    made = dict(model="org/small", revision=COMMIT, hf_text_config=text, quantization=None,
                max_model_len=max_model_len, original_max_model_len=max_model_len,
                hf_overrides={}, hf_config_path=None, get_total_num_hidden_layers=lambda: 2,
                get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 64)
    return types.SimpleNamespace(**{**made, **members})


def model(of, download_dir=None, cache_dtype="auto", **options):
    """The model whose pages a vLLM of this configuration stores."""
    return vllm_model.model_of(
        types.SimpleNamespace(model_config=of, parallel_config=None,
                              cache_config=types.SimpleNamespace(cache_dtype=cache_dtype),
                              load_config=types.SimpleNamespace(download_dir=download_dir)),
        lambda name, default: options.get(name, default))


def check_cache(cache_dtype, dtype, **cache_options):
    """Checks a vLLM whose cache has elements of this type."""
    spec = type("FullAttentionSpec", (), {"dtype": f"torch.{dtype}"})()
    vllm_model.check_supported(
        types.SimpleNamespace(
            device_config=types.SimpleNamespace(device_type="cuda"),
            parallel_config=types.SimpleNamespace(pipeline_parallel_size=1),
            cache_config=types.SimpleNamespace(cache_dtype=cache_dtype, **cache_options)),
        types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec)]))


class Factors(list):
    """A tensor of factors."""

    def numel(self):
        return len(self)

    def __float__(self):
        return self[0]


class FakeHub:
    """huggingface_hub with caches in folders: cache folder -> model -> folder of files."""

    def __init__(self, **caches):
        self.caches = caches

    def try_to_load_from_cache(self, name, file, cache_dir=None, revision=None):
        folder = self.caches[cache_dir or "default"].get(name)
        return str(folder / file) if folder is not None and (folder / file).exists() else None

    def snapshot_download(self, name, revision=None, cache_dir=None, local_files_only=False):
        assert local_files_only
        folder = self.caches[cache_dir or "default"].get(name)
        if folder is None:
            raise FileNotFoundError(name)
        return str(folder)


class EngineModelsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.use_hub(default={})

    def use_hub(self, **caches):
        patch = mock.patch.dict(sys.modules, huggingface_hub=FakeHub(**caches))
        patch.start()
        self.addCleanup(patch.stop)

    def files(self, name, **contents):
        folder = self.folder / name
        folder.mkdir()
        for file, content in contents.items():
            (folder / file.replace("_", ".")).write_text(content)
        return folder

    def test_factors_of_longrope_are_in_the_keyspace(self):
        for nested in (False, True):
            rope = {"full_attention": LONGROPE} if nested else LONGROPE
            short, long = (model(config(length, rope)).rope for length in (4096, 8192))
            self.assertNotEqual(short, long)
            self.assertEqual(model(config(2048, rope)).rope, short)
            self.assertEqual(model(config(131072, rope)).rope, long)

    def test_longrope_whose_factors_are_not_known_is_refused(self):
        with self.assertRaisesRegex(InvalidArgument, "--max-model-len"):
            model(config(4096, LONGROPE, original_max_model_len=-1))
        rope = {name: value for name, value in LONGROPE.items() if not name.startswith("original")}
        with self.assertRaisesRegex(InvalidArgument, "original_max_position_embeddings"):
            model(config(4096, rope))

    def test_other_ropes_do_not_depend_on_the_longest_sequence(self):
        ropes = [model(config(length)).rope for length in (2048, 8192)]
        self.assertEqual(ropes[0], ropes[1])
        self.assertNotIn("longrope", json.loads(ropes[0]))

    def test_overrides_of_the_configuration_are_in_the_keyspace(self):
        without = model(config()).fields
        self.assertEqual(set(without), {"attention", "quantization"})
        given = [{"rms_norm_eps": 0.1}, {"rms_norm_eps": 0.2}, {"text_config": {"a": 1, "b": 2}}]
        fields = [json.dumps(model(config(hf_overrides=one)).fields, sort_keys=True)
                  for one in given]
        self.assertEqual(len({json.dumps(without, sort_keys=True), *fields}), 4)
        same = model(config(hf_overrides={"text_config": {"b": 2, "a": 1}})).fields
        self.assertEqual(json.dumps(same, sort_keys=True), fields[2])

    def test_caches_of_bf16_and_fp8_are_served(self):
        check_cache("auto", "bfloat16")
        check_cache("fp8", "uint8")
        check_cache("fp8_e4m3", "uint8", calculate_kv_scales=False)
        for name in ("fp8_e5m2", "fp8_per_token_head", "nvfp4"):
            with self.assertRaisesRegex(InvalidArgument, f"uint8 .--kv-cache-dtype {name}"):
                check_cache(name, "uint8")
        with self.assertRaisesRegex(InvalidArgument, "float16"):
            check_cache("auto", "float16")
        with self.assertRaisesRegex(InvalidArgument, "--calculate-kv-scales"):
            check_cache("fp8", "uint8", calculate_kv_scales=True)

    def test_rows_of_fp8_caches_are_not_those_of_bf16_caches(self):
        fields = [model(config(), cache_dtype=name).fields
                  for name in ("auto", "bfloat16", "fp8", "fp8_e4m3")]
        self.assertEqual(fields[0], fields[1])
        self.assertEqual(fields[2], {**fields[0], "kv_cache": "fp8_e4m3"})
        self.assertEqual(fields[2], fields[3])

    def test_each_layer_has_one_factor_of_its_keys_and_one_of_its_values(self):
        layers = {"model.layers.0.attn": types.SimpleNamespace(_k_scale=Factors([0.5]),
                                                               _v_scale=Factors([0.25])),
                  "model.layers.1.attn": types.SimpleNamespace(_k_scale=Factors([1.0, 2.0]),
                                                               _v_scale=Factors([0.25]))}
        of = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(static_forward_context=layers))
        self.assertEqual(vllm_model.fp8_scales_of(of, ["model.layers.0.attn"]),
                         {"model.layers.0.attn": (0.5, 0.25)})
        with self.assertRaisesRegex(InvalidArgument, "model.layers.1.attn has 2 factors"):
            vllm_model.fp8_scales_of(of, layers)

    def test_overrides_that_are_programs_are_refused(self):
        for overrides in (lambda of: of, {"a": lambda of: of}):
            with self.assertRaisesRegex(InvalidArgument, "--hf-overrides"):
                model(config(hf_overrides=overrides))

    def test_a_configuration_of_another_place_is_in_the_keyspace(self):
        folder = self.files("other", config_json="{}")
        first = model(config(hf_config_path=str(folder))).fields["config"]
        (folder / "config.json").write_text('{"rms_norm_eps": 1}')
        self.assertNotEqual(model(config(hf_config_path=str(folder))).fields["config"], first)
        with self.assertRaisesRegex(InvalidArgument, "--hf-config-path"):
            model(config(hf_config_path="org/nowhere"))

    def test_a_name_without_files_needs_a_commit_or_a_digest(self):
        for revision in (None, "main", "v1.0", COMMIT[:-1], COMMIT.upper()):
            with self.assertRaisesRegex(InvalidArgument, "weights.*kv_connector_extra_config"):
                model(config(revision=revision))
            self.assertEqual(model(config(revision=revision), weights="w").weights, "w")
        other = COMMIT[:-1] + "8"
        self.assertNotEqual(model(config()).weights, model(config(revision=other)).weights)

    def test_weights_in_a_folder_for_downloads_are_found(self):
        cached = self.files("cached", config_json="{}")
        weights = self.files("weights", model_bin="a" * 100)
        self.use_hub(default={"org/small": cached}, downloads={"org/small": weights})
        first = model(config(revision=None), download_dir="downloads").weights
        (weights / "model.bin").write_text("b" * 100)
        second = model(config(revision=None), download_dir="downloads").weights
        (cached / "config.json").write_text("[]")
        third = model(config(revision=None), download_dir="downloads").weights
        self.assertEqual(len({first, second, third}), 3)

    def test_weights_of_the_default_cache_are_not_those_of_a_folder_for_downloads(self):
        cached = self.files("cached", config_json="{}", model_bin="a" * 100)
        self.use_hub(default={"org/small": cached}, downloads={})
        self.assertTrue(model(config(revision=None)).weights)
        with self.assertRaisesRegex(InvalidArgument, "--revision"):
            model(config(revision=None), download_dir="downloads")


if __name__ == "__main__":
    unittest.main()
