# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Digests distinguish checkpoints and adapters: without crumbd and without the library."""

import importlib.util
import json
import os
import pathlib
import struct
import sys
import tempfile
import types
import unittest
from unittest import mock

PATH = pathlib.Path(__file__).resolve().parents[1] / "src/crumb/_checkpoints.py"
spec = importlib.util.spec_from_file_location("checkpoints", PATH)
checkpoints = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checkpoints)
MIB = 1 << 20


def safetensors(tensors):
    """The bytes of a safetensors file with these tensors, by name."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(values)],
                        "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


class CheckpointsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def digest(self, files, config="config.json"):
        for path in self.folder.iterdir():
            path.unlink()
        for name, content in {config: b"{}", **files}.items():
            (self.folder / name).write_bytes(content)
        return checkpoints.digest_of(self.folder, config)

    def test_one_tensor_in_the_middle_of_a_large_file(self):
        tensors = {name: bytes([i]) * (3 * MIB // 2) for i, name in enumerate("abcde")}
        tensors["norm"] = bytes(64)
        before = self.digest({"model.safetensors": safetensors(tensors)})
        self.assertEqual(self.digest({"model.safetensors": safetensors(tensors)}), before)
        seen = {before}
        for name, values in tensors.items():
            changed = {**tensors, name: bytes(byte ^ 1 for byte in values)}
            seen.add(self.digest({"model.safetensors": safetensors(changed)}))
        self.assertEqual(len(seen), 1 + len(tensors))

    def test_configuration_names_and_sizes(self):
        file = safetensors({"a": bytes(10)})
        digests = [self.digest({"model.safetensors": file}),
                   self.digest({"other.safetensors": file}),
                   self.digest({"model.safetensors": file, "more.safetensors": file}),
                   self.digest({"model.safetensors": file, "config.json": b'{"rope": 1}'}),
                   self.digest({"model.bin": b"x" * 5 * MIB}),
                   self.digest({"model.bin": b"x" * 5 * MIB + b"x"}),
                   self.digest({"model.bin": b"x" * 2 * MIB + b"y" * 3 * MIB})]
        self.assertEqual(len(set(digests)), len(digests))

    def test_what_only_looks_like_safetensors_is_sampled_as_any_file(self):
        good = safetensors({"a": bytes(3 * MIB)})
        length = struct.unpack("<Q", good[:8])[0]
        broken = [good[:-1], b"", b"\xff" * 100, struct.pack("<Q", 2) + b"[]", good[:5],
                  struct.pack("<Q", 10) + b'{"a": null' + b"}" * 90,
                  good[:8] + b"[" * length + good[8 + length:],
                  struct.pack("<Q", 31) + b'{"a":{"data_offsets":[9,1e400]}}' + bytes(99)]
        digests = {self.digest({"model.safetensors": content}) for content in broken}
        self.assertEqual(len(digests), len(broken))

    def test_without_weights_or_configuration_there_is_none(self):
        self.assertIsNone(self.digest({}))
        (self.folder / "config.json").unlink()
        (self.folder / "model.bin").write_bytes(b"x")
        self.assertIsNone(checkpoints.digest_of(self.folder, "config.json"))

    def test_a_checkpoint_of_one_file(self):
        path = self.folder / "model.gguf"
        digests = set()
        for content in (b"GGUF" + bytes(MIB), b"GGUF" + bytes(MIB - 1) + b"x"):
            path.write_bytes(content)
            self.assertEqual(checkpoints.folder_of(str(path), None, "config.json"), path)
            digests.add(checkpoints.digest_of(path, "config.json"))
        self.assertEqual(len(digests - {None}), 2)

    def gguf_digest(self, named, files):
        """The digest of the checkpoint whose file `named` was given, in a folder of these files."""
        for path in self.folder.iterdir():
            path.unlink()
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        return checkpoints.digest_of(self.folder / named, "config.json")

    def test_a_split_checkpoint_is_all_of_its_files(self):
        """Engines that get one file of a split GGUF checkpoint load all of them."""
        files = {f"m[1]-0000{i}-of-00003.gguf": b"GGUF" + bytes([i]) * 99 for i in (1, 2, 3)}
        before = self.gguf_digest("m[1]-00001-of-00003.gguf", files)
        self.assertEqual(self.gguf_digest("m[1]-00002-of-00003.gguf", files), before)
        others = {"m[1]-00001-of-00004.gguf": b"x", "m1-00001-of-00003.gguf": b"x",
                  "m[1]-00001-of-00003.gguf.part": b"x", "other.gguf": b"x"}
        self.assertEqual(self.gguf_digest("m[1]-00001-of-00003.gguf", {**files, **others}), before)
        for name in list(files)[1:]:
            trained = {**files, name: files[name][:-1] + b"x"}
            self.assertNotEqual(self.gguf_digest("m[1]-00001-of-00003.gguf", trained), before, name)
            missing = {other: content for other, content in files.items() if other != name}
            self.assertNotEqual(self.gguf_digest("m[1]-00001-of-00003.gguf", missing), before, name)

    def test_a_checkpoint_has_the_vision_model_beside_it(self):
        """Engines load the mmproj file in the folder of a GGUF checkpoint."""
        digests = [self.gguf_digest("m.gguf", {"m.gguf": b"GGUF", **beside}) for beside in (
            {}, {"mmproj.gguf": b"a"}, {"mmproj.gguf": b"b"}, {"m-mmproj-f16.gguf": b"a"})]
        self.assertEqual(len(set(digests)), len(digests))

    def test_an_adapter_that_is_trained_further_is_another_one(self):
        config = "adapter_config.json"
        self.digest({"adapter_model.safetensors": safetensors({"a": bytes(99)})}, config)
        before = checkpoints.adapter_digest(str(self.folder))
        self.assertIsNotNone(before)
        weights = self.folder / "adapter_model.safetensors"
        status = weights.stat()
        weights.write_bytes(safetensors({"a": bytes(98) + b"x"}))
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        self.assertNotEqual(checkpoints.adapter_digest(str(self.folder)), before)
        weights.unlink()
        self.assertIsNone(checkpoints.adapter_digest(str(self.folder)))
        self.assertIsNone(checkpoints.adapter_digest("/nowhere"))

    def test_a_name_of_the_hub_stands_for_the_files_in_its_cache(self):
        calls = []

        def find(name, file, revision=None):
            calls.append((name, file, revision))
            return str(self.folder / file) if name == "org/model" else None

        hub = types.SimpleNamespace(try_to_load_from_cache=find)
        with mock.patch.dict(sys.modules, huggingface_hub=hub):
            found = checkpoints.folder_of("org/model", "v1", "config.json")
            self.assertEqual(found, self.folder)
            self.assertIsNone(checkpoints.folder_of("org/other", None, "config.json"))
        self.assertEqual(calls, [("org/model", "config.json", "v1"),
                                 ("org/other", "config.json", None)])


if __name__ == "__main__":
    unittest.main(verbosity=2)
