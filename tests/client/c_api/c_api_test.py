#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Tests of libcrumb.so against a real crumbd: in a C program, and in a Python process that has a
grpc and protobuf of its own, and torch where it is installed, before and after a fork."""

import argparse
import ctypes
import importlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "deploy"))
from services import Crumbd  # noqa: E402

OPTIONS = argparse.Namespace()
OK, INVALID_ARGUMENT, UNAVAILABLE = 0, 3, 14
STORED, DEDUPLICATED = 1, 2
KEY_BYTES = 32


class ClientOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("socket_dir", ctypes.c_char_p),
                ("address", ctypes.c_char_p), ("process_name", ctypes.c_char_p),
                ("engine", ctypes.c_char_p), ("staging_bytes", ctypes.c_uint64),
                ("connect_timeout_ms", ctypes.c_uint32), ("call_timeout_ms", ctypes.c_uint32)]


class KeyspaceSpec(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("names", ctypes.POINTER(ctypes.c_char_p)),
                ("values", ctypes.POINTER(ctypes.c_char_p)), ("fields", ctypes.c_size_t),
                ("layers", ctypes.c_uint32), ("kv_heads", ctypes.c_uint32),
                ("head_dim", ctypes.c_uint32), ("group_size", ctypes.c_uint32),
                ("tenant", ctypes.c_char_p)]


class Keyspace(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint8 * KEY_BYTES), ("generation", ctypes.c_uint64),
                ("int2_tile_bytes", ctypes.c_uint32), ("bf16_tile_bytes", ctypes.c_uint32),
                ("serves_bf16_only", ctypes.c_uint32)]


class Fragment(ctypes.Structure):
    _fields_ = [("key", ctypes.c_uint8 * KEY_BYTES), ("parent", ctypes.c_uint8 * KEY_BYTES),
                ("format", ctypes.c_uint32), ("over_int2_prefix", ctypes.c_uint32),
                ("layer_begin", ctypes.c_uint32), ("layer_end", ctypes.c_uint32),
                ("head_begin", ctypes.c_uint32), ("head_end", ctypes.c_uint32),
                ("tiles", ctypes.c_void_p), ("tiles_bytes", ctypes.c_size_t)]


RECEIVER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t,
                            ctypes.POINTER(Fragment))
FIELDS = {b"model": b"made-up", b"weights": b"1", b"format": b"int2", b"layout": b"1",
          b"page_tokens": b"64"}


class Library:
    """libcrumb.so in this process."""

    def __init__(self, folder):
        self.c = ctypes.CDLL(str(folder / "libcrumb.so"))
        self.c.crumb_message.restype = ctypes.c_char_p
        for name in ("crumb_client_close",):
            getattr(self.c, name).argtypes = [ctypes.c_void_p]

    def message(self):
        return self.c.crumb_message().decode()

    def check(self, code):
        if code != OK:
            raise AssertionError(f"code {code}: {self.message()}")

    def open(self, socket_dir):
        options = ClientOptions(size=ctypes.sizeof(ClientOptions), socket_dir=str(socket_dir).encode())
        client = ctypes.c_void_p()
        self.check(self.c.crumb_client_open(ctypes.byref(options), ctypes.byref(client)))
        return client

    def keyspace(self, client):
        names = (ctypes.c_char_p * len(FIELDS))(*FIELDS)
        values = (ctypes.c_char_p * len(FIELDS))(*FIELDS.values())
        spec = KeyspaceSpec(size=ctypes.sizeof(KeyspaceSpec), names=names, values=values,
                            fields=len(FIELDS), layers=2, kv_heads=2, head_dim=64, group_size=64)
        out = Keyspace()
        self.check(self.c.crumb_keyspace_open(client, ctypes.byref(spec), 5000, ctypes.byref(out)))
        return out

    def key(self, keyspace, name):
        key = (ctypes.c_uint8 * KEY_BYTES)()
        self.check(self.c.crumb_foreign_key(keyspace.id, name, ctypes.c_size_t(len(name)), key))
        return bytes(key)

    def put(self, client, keyspace, name, tiles, parent=bytes(KEY_BYTES)):
        fragment = Fragment(format=2, layer_end=2, head_end=2, tiles_bytes=len(tiles))
        fragment.key[:] = self.key(keyspace, name)
        fragment.parent[:] = parent
        fragment.tiles = ctypes.cast(ctypes.c_char_p(tiles), ctypes.c_void_p)
        outcome = ctypes.c_int32()
        code = self.c.crumb_put(client, ctypes.byref(keyspace), ctypes.byref(fragment),
                                ctypes.c_size_t(1), 5000, ctypes.byref(outcome))
        return code, outcome.value

    def get(self, client, keyspace, names):
        """Returns the bytes of the leading cached pages, and why the next one is a miss."""
        got = {}

        def receive(_, page, fragment):
            view = fragment.contents
            got[page] = ctypes.string_at(view.tiles, view.tiles_bytes)
            return 0

        keys = b"".join(self.key(keyspace, name) for name in names)
        reason = ctypes.c_int32()
        self.check(self.c.crumb_get(client, keyspace.id, keys, ctypes.c_size_t(len(names)), 5000,
                                    RECEIVER(receive), None, ctypes.byref(reason)))
        return [got[page] for page in sorted(got)], reason.value


def handled_signals():
    """Returns the caught and ignored signals, except the two that glibc uses for its threads."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    masks = [int(re.search(rf"{name}:\s*(\w+)", status).group(1), 16)
             for name in ("SigCgt", "SigIgn")]
    return [mask & ~(3 << 31) for mask in masks]


def interpreter():
    """Returns a Python that has grpc, if there is one."""
    for python in (sys.executable, "/usr/bin/python3"):
        found = subprocess.run([python, "-c", "import grpc"], capture_output=True, check=False)
        if found.returncode == 0:
            return python
    return sys.executable


def threads():
    return len(os.listdir("/proc/self/task"))


def beside_grpc(socket_dir, have):
    """Calls crumbd with Python's own gRPC and protobuf, if they are installed."""
    if "grpc" in have:
        channel = have["grpc"].insecure_channel(f"unix:{socket_dir}/crumbd.sock")
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=10) == b"\x08\x01"  # SERVING
        channel.close()
    if "google.protobuf.struct_pb2" in have:
        value = have["google.protobuf.struct_pb2"].Struct()
        value["a"] = 1.5
        assert type(value).FromString(value.SerializeToString())["a"] == 1.5
    if "torch" in have:
        assert have["torch"].ones(3).sum().item() == 3


def guest(folder, socket_dir):
    """Runs the Python process; prints the libraries that it has loaded besides."""
    have = {}
    for name in ("grpc", "google.protobuf.struct_pb2", "torch"):
        try:
            have[name] = importlib.import_module(name)
        except ImportError:
            pass
    before = threads(), handled_signals()
    library = Library(folder)
    assert (threads(), handled_signals()) == before, "loading the library left traces"
    assert library.c.crumb_abi_version() == 9

    child = os.fork()  # the child opens a connection of its own
    if child == 0:
        client = library.open(socket_dir)
        keyspace = library.keyspace(client)
        tiles = bytes(4 * keyspace.int2_tile_bytes)
        ok = library.put(client, keyspace, b"of the child", tiles) == (OK, STORED)
        library.c.crumb_client_close(client)
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0

    client = library.open(socket_dir)
    assert handled_signals() == before[1], "a signal is handled in another way"
    keyspace = library.keyspace(client)
    tiles = bytes(range(256)) * (4 * keyspace.int2_tile_bytes // 256)
    beside_grpc(socket_dir, have)
    assert library.put(client, keyspace, b"first", tiles) == (OK, STORED)
    assert library.put(client, keyspace, b"first", tiles) == (OK, DEDUPLICATED)
    code, _ = library.put(client, keyspace, b"short", tiles[:-1])
    assert code == INVALID_ARGUMENT and "4 tiles" in library.message(), library.message()
    assert library.get(client, keyspace, [b"of the child"])[0] == [bytes(len(tiles))]
    assert library.get(client, keyspace, [b"first", b"absent"]) == ([tiles], 1)

    child = os.fork()  # the child has no cache, and does no harm
    if child == 0:
        options = library.c.crumb_client_connected(client)
        code, _ = library.put(client, keyspace, b"too late", tiles)
        os._exit(0 if options == 0 and code == UNAVAILABLE else 1)
    assert os.waitpid(child, 0)[1] == 0
    beside_grpc(socket_dir, have)
    assert library.put(client, keyspace, b"second", tiles) == (OK, STORED)
    library.c.crumb_client_close(client)
    print("beside:", ", ".join(sorted(have)) or "nothing")


def environment(**more):
    """Returns the environment of processes that load the library, in which a sanitizer's runtime
    must be loaded first. Python is not checked for leaks, of which it has many."""
    return {**os.environ, **({"LD_PRELOAD": OPTIONS.preload, **more} if OPTIONS.preload else {})}


class CApiTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.libraries = OPTIONS.build / "lib"

    def start_crumbd(self):
        crumbd = Crumbd(OPTIONS.build / "bin", self.folder.name)
        self.addCleanup(crumbd.stop)
        crumbd.start()
        return crumbd

    def exported(self, name):
        out = subprocess.run(["nm", "-D", "--defined-only", self.libraries / name], check=True,
                             capture_output=True, text=True).stdout
        return [line.split()[-1] for line in out.splitlines()]

    def needed(self, name):
        out = subprocess.run(["readelf", "-d", self.libraries / name], check=True,
                             capture_output=True, text=True).stdout
        return set(re.findall(r"NEEDED.*\[(.+?)\]", out))

    def test_exports_its_functions_only(self):
        header = "".join(path.read_text(encoding="utf-8")
                         for path in (OPTIONS.source / "client/api").glob("*.h"))
        declared = set(re.findall(r"\b(crumb_\w+)\(", header)) - {"crumb_client_open"}
        exported = self.exported("libcrumb.so")
        self.assertTrue(all(name.startswith("crumb_") for name in exported), exported)
        self.assertLessEqual({name for name in declared if f"{name} " not in header}, set(exported))
        self.assertEqual(self.exported("libcrumb_core.so"), ["crumb_core"])

    def test_needs_nothing_until_it_is_used(self):
        self.assertLessEqual(self.needed("libcrumb.so"),
                             {"libc.so.6", "libdl.so.2", "libpthread.so.0"})

    def test_the_core_links_neither_ucx_nor_cuda(self):
        needed = self.needed("libcrumb_core.so")
        self.assertIn("libc.so.6", needed)
        for name in needed:
            self.assertNotRegex(name, r"^lib(uc[a-z]\.|cuda|cublas|nvidia)")

    def test_a_missing_core_is_reported(self):
        alone = pathlib.Path(self.folder.name) / "libcrumb.so"
        alone.write_bytes((self.libraries / "libcrumb.so").read_bytes())
        library = Library(alone.parent)
        client = ctypes.c_void_p()
        options = ClientOptions(size=ctypes.sizeof(ClientOptions))
        code = library.c.crumb_client_open(ctypes.byref(options), ctypes.byref(client))
        self.assertEqual(code, UNAVAILABLE)
        self.assertIn("libcrumb_core.so", library.message())

    def test_c_program(self):
        self.start_crumbd()

        def run():
            return subprocess.run([OPTIONS.build / "tests/c_api_program", self.folder.name, "5"],
                                  env=environment(), check=True, capture_output=True, text=True,
                                  timeout=120).stdout

        cold, warm = run(), run()
        digest = re.search(r"digest (\w+)", cold).group(1)
        self.assertEqual(cold, f"cached 0 digest {digest} length 1001\n"
                               "published 15 deduplicated 0\n"
                               f"stages cached 704 digest {digest}\n")
        # 1,000 tokens minus the recent window, in pages; the outputs are bit-identical.
        self.assertEqual(warm, f"cached 704 digest {digest} length 1001\n"
                               "published 0 deduplicated 4\n"
                               f"stages cached 704 digest {digest}\n")

    def test_device_program(self):
        self.start_crumbd()
        program = OPTIONS.build / "tests/c_api_device_program"
        done = subprocess.run([program, self.folder.name], env=environment(), capture_output=True,
                              text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        if done.stdout.startswith("no device: "):
            self.skipTest("needs a CUDA device: " + done.stdout.strip())
        self.assertRegex(done.stdout, r"^cached 704 on the CPU, 704 on the GPU")

    def test_python_process(self):
        crumbd = self.start_crumbd()
        done = subprocess.run([interpreter(), __file__, "--build", OPTIONS.build, "--guest",
                               self.folder.name], env=environment(ASAN_OPTIONS="detect_leaks=0"),
                              capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr + crumbd.process.tail())
        beside = done.stdout.strip()
        # grpc must be installed (install_packages.sh --tests); torch is used where it is
        # installed.
        self.assertIn("grpc", beside)
        self.assertIn("google.protobuf", beside)
        print(beside + ("" if "torch" in beside else "; torch is not installed: not tested beside it"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--preload", default="", help="a sanitizer's runtime, for LD_PRELOAD")
    parser.add_argument("--guest", type=pathlib.Path, help="run the Python process on this folder")
    OPTIONS, rest = parser.parse_known_args()
    OPTIONS.source = pathlib.Path(__file__).resolve().parents[3]
    if OPTIONS.guest:
        guest(OPTIONS.build / "lib", OPTIONS.guest)
    else:
        unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
