# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.Transfer over a crumbd: paged caches of every layout and block size, with numpy and torch,
and pools of INT2 blocks.

The bytes of INT2 pages are compared with the quantizer's in tests/client/transfer/transfer_test.cc.
Here one cache's pages arrive in another cache, in other blocks of another size and layout.
"""

import dataclasses
import importlib
import itertools
import pathlib
import random
import subprocess
import sys
import types
import unittest

import crumb
import support
from crumb import _engines, blocks

# The package crumb.vllm itself imports vLLM.
sys.modules["crumb.vllm"] = types.ModuleType("crumb.vllm")
sys.modules["crumb.vllm"].__path__ = [str(pathlib.Path(crumb.__file__).parent / "vllm")]
vllm_model = importlib.import_module("crumb.vllm._model")
np = support.installed("numpy")
torch = support.installed("torch")
PAGES = 7
TOKENS = [(i * 131 + 7) % 5000 for i in range(PAGES * crumb.PAGE_TOKENS + 30)]
MODEL = dataclasses.replace(support.MODEL, history="bf16")
HEADS, DIM = MODEL.kv_heads, MODEL.head_dim


def layouts(blocks, tokens):
    """name -> (shape of a layer's memory, K and V as views, dims of a view)."""
    return {
        "NHD": ((2, blocks, tokens, HEADS, DIM), lambda m: (m[0], m[1]), "bthd"),
        "HND": ((2, blocks, HEADS, tokens, DIM), lambda m: (m[0], m[1]), "bhtd"),
        # vLLM on a GPU: a token's K row, then its V row.
        "K then V": ((blocks, HEADS, tokens, 2 * DIM), lambda m: (m[..., :DIM], m[..., DIM:]),
                     "bhtd"),
        # vLLM on the CPU: a K plane [dim, tokens], then a V plane [tokens, dim].
        "K transposed": ((blocks, HEADS, 2, tokens * DIM),
                         lambda m: (m[:, :, 0].reshape(blocks, HEADS, DIM, tokens),
                                    m[:, :, 1].reshape(blocks, HEADS, tokens, DIM)),
                         ("bhdt", "bhtd")),
    }


class Cache:
    """A paged cache with random rows, and a block table in random order."""

    def __init__(self, layout, block_tokens, seed, use_torch=False):
        rng = np.random.default_rng(seed)
        self.block_tokens = block_tokens
        used = -(-PAGES * crumb.PAGE_TOKENS // block_tokens)
        self.blocks = used + 3
        self.table = random.Random(seed).sample(range(self.blocks), used)
        shape, views, dims = layouts(self.blocks, block_tokens)[layout]
        self.dims = (dims, dims) if isinstance(dims, str) else dims
        self.layers = []
        for _ in range(MODEL.layers):
            wide = rng.standard_normal(shape, dtype="float32").view("uint32")
            memory = (wide >> 16).astype("uint16")
            if use_torch:  # over the same memory
                bf16 = torch.from_numpy(memory.view("int16")).view(torch.bfloat16)
                given = views(bf16)
            else:
                given = views(memory)
            self.layers.append((given, views(memory)))

    def view(self):
        return crumb.PagedCache(
            [tuple(crumb.PagedRows.of(part, dims) for part, dims in zip(given, self.dims))
             for given, _ in self.layers], self.blocks, self.block_tokens)

    def rows(self, layer, pages=PAGES):
        """Bits [2, tokens, heads, dim] of the sequence's K and V."""
        return np.stack([self._of(part, dims, pages)
                         for part, dims in zip(self.layers[layer][1], self.dims)])

    def _of(self, part, dims, pages):
        ordered = np.transpose(part, [dims.index(name) for name in "bthd"])
        return ordered[self.table].reshape(-1, HEADS, DIM)[:pages * crumb.PAGE_TOKENS].copy()


class Pool:
    """An engine's pool of blocks, [blocks, layers, heads, bytes], in random order."""

    def __init__(self, geometry, seed):
        self.geometry = geometry
        rng = np.random.default_rng(seed)
        needed = geometry.sink_blocks + PAGES
        self.blocks = needed + 3
        self.table = random.Random(seed).sample(range(self.blocks), needed)
        self.memory = rng.integers(1, 256, (self.blocks, MODEL.layers, HEADS, geometry.tile_bytes),
                                   dtype="uint8")

    def fill(self):
        """Makes the sink's rows finite."""
        wide = np.random.default_rng(5).standard_normal(
            (self.blocks, MODEL.layers, HEADS, self.geometry.tile_bytes // 2), dtype="float32")
        bits = (wide.view("uint32") >> 16).astype("uint16").view("uint8")
        for block in self.table[:self.geometry.sink_blocks]:
            self.memory[block] = bits[block]

    def pools(self):
        stride = self.memory.strides[0]
        starts = [self.memory.ctypes.data + layer * self.memory.strides[1]
                  for layer in range(MODEL.layers)]
        return [blocks.BlockPool(start, start, start, stride, self.blocks) for start in starts]

    def tiles(self, page):
        return self.memory[self.table[self.geometry.sink_blocks + page]]

    def sink(self):
        """The bytes of the first 64 rows, [layers, heads, rows, bytes]."""
        row = 4 * DIM
        rows = [self.memory[block][..., i * row:(i + 1) * row]
                for block in self.table[:self.geometry.sink_blocks]
                for i in range(self.geometry.rows_per_block)]
        return np.stack(rows[:64])


def to_float(bits):
    return (bits.astype("uint32") << 16).view("float32")


@unittest.skipIf(np is None, "needs numpy")
class TransferTest(support.CrumbdTest):
    versions = itertools.count()

    def model(self, history="bf16"):
        """A model that no other test has pages of."""
        return dataclasses.replace(MODEL, history=history, weights=f"v{next(self.versions)}")

    def transfer(self, model, cache, **options):
        transfer = crumb.Transfer(self.client(**options), model)
        self.addCleanup(transfer.close)
        if cache is not None:
            transfer.use_cache(cache.view())
        return transfer

    def store(self, transfer, cache, by_layer=False):
        space = transfer.keyspace()
        keys = transfer.keys(space, TOKENS)
        self.assertEqual(len(keys), PAGES)
        with transfer.store(space, keys, 0, cache.table) as store:
            for layer in reversed(range(MODEL.layers)) if by_layer else ():
                store.layers(layer, layer + 1)
            if not by_layer:
                store.layers()
            store.finish()
        transfer.wait_published(support.SECONDS)
        return keys

    def load(self, transfer, cache, keys, pages=PAGES):
        space = transfer.keyspace()
        with transfer.acquire(space, keys, deadline=10) as lease:
            self.assertEqual((lease.pages, lease.reason), (PAGES, crumb.Miss.NONE))
            with transfer.load(lease.token, keys[:pages], 0, pages, cache.table, 10) as load:
                self.assertEqual(load.pages, pages)
                load.layers()

    def test_bf16_pages_arrive_bit_by_bit_whatever_the_layouts(self):
        names = list(layouts(1, 64))
        sizes = (16, 32, 64, 128)
        for i, (name, size) in enumerate(itertools.product(names, sizes)):
            for use_torch in (False, True)[:1 if torch is None else 2]:
                with self.subTest(layout=name, block=size, torch=use_torch):
                    model = self.model()
                    written = Cache(name, size, 2 * i, use_torch)
                    read = Cache(names[(i + 1) % 4], sizes[(i // 4 + 1) % 4], 2 * i + 1, use_torch)
                    keys = self.store(self.transfer(model, written), written, by_layer=i % 2 == 1)
                    self.load(self.transfer(model, read), read, keys)
                    for layer in range(MODEL.layers):
                        np.testing.assert_array_equal(read.rows(layer), written.rows(layer))

    @unittest.skipIf(torch is None, "torch has FP8 tensors")
    def test_fp8_rows_arrive_as_they_were(self):
        """In a cache of the same type and scales, and as BF16 in one of BF16."""
        shape = (PAGES, MODEL.kv_heads, 64, MODEL.head_dim)
        scales = [(0.5 + layer, 0.3) for layer in range(MODEL.layers)]

        def codes(seed):
            made = torch.randint(0, 256, (MODEL.layers, 2, *shape), dtype=torch.uint8,
                                 generator=torch.Generator().manual_seed(seed))
            made[made & 0x7f == 0x7f] = 1  # not a number
            return made

        def view(tensors):
            return crumb.PagedCache([tuple(crumb.PagedRows.of(tensors[layer, part],
                                                              scale=scales[layer][part])
                                           for part in (0, 1)) for layer in range(MODEL.layers)],
                                    PAGES, 64)

        written, same = (codes(seed).view(torch.float8_e4m3fn) for seed in (1, 2))
        wide = torch.zeros(written.shape, dtype=torch.bfloat16)
        table, model = list(range(PAGES)), self.model()
        writer = self.transfer(model, None)
        writer.use_cache(view(written))
        keys = self.store(writer, types.SimpleNamespace(table=table))
        for cache in (same, wide):
            reader = self.transfer(model, None)
            reader.use_cache(view(cache))
            self.load(reader, types.SimpleNamespace(table=table), keys)
        self.assertTrue(torch.equal(same.view(torch.uint8), written.view(torch.uint8)))
        for layer, part in itertools.product(range(MODEL.layers), (0, 1)):
            expected = (written[layer, part].float() * scales[layer][part]).bfloat16()
            self.assertTrue(torch.equal(wide[layer, part], expected))
        with self.assertRaises(crumb.InvalidArgument):
            mixed = view(written).layers[:1] + view(wide).layers[1:]
            writer.use_cache(crumb.PagedCache(mixed, PAGES, 64))

    @unittest.skipIf(torch is None, "torch has FP8 tensors")
    def test_fp8_caches_of_vllm_are_bytes(self):
        """Their rows have the factors of vLLM's layers; another engine has other factors."""
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(MODEL.layers)]
        tokens, table, model = 128, [2, 0, 3, 1], self.model()

        def bytes_of(seed):
            """vLLM's tensors: blocks, heads, tokens, and a token's K row and V row, which on the CPU
            is room for a K plane [dim, tokens] and a V plane [tokens, dim]."""
            made = torch.randint(0x40, 0x60, (MODEL.layers, len(table), HEADS, tokens, 2 * DIM),
                                 dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
            return dict(zip(names, made))

        def values_of(caches, scales):
            """K and V [tokens, heads, dim] of the stored pages of all layers."""
            for name, (k_scale, v_scale) in scales.items():
                planes = caches[name].view(torch.float8_e4m3fn)[table].reshape(
                    len(table), HEADS, 2, tokens * DIM).float()
                keys = planes[:, :, 0].reshape(-1, HEADS, DIM, tokens).permute(0, 3, 1, 2)
                values = planes[:, :, 1].reshape(-1, HEADS, tokens, DIM).transpose(1, 2)
                for rows in (keys * k_scale, values * v_scale):
                    yield rows.reshape(-1, HEADS, DIM)[:PAGES * crumb.PAGE_TOKENS]

        written, read = bytes_of(1), bytes_of(2)
        scales = {name: (0.5 * 2 ** layer, 0.25) for layer, name in enumerate(names)}
        twice = {name: (2 * k, 2 * v) for name, (k, v) in scales.items()}
        writer, reader = (self.transfer(model, None) for _ in range(2))
        for transfer, caches, factors in ((writer, written, scales), (reader, read, twice)):
            cache, layers = vllm_model.paged_cache_of(caches, DIM, factors)
            self.assertEqual((layers, cache.block_tokens), (names, tokens))
            transfer.use_cache(cache)
        keys = self.store(writer, types.SimpleNamespace(table=table))
        self.load(reader, types.SimpleNamespace(table=table), keys)
        for expected, value in zip(values_of(written, scales), values_of(read, twice)):
            self.assertTrue(torch.equal(value, expected))

    def test_int2_pages_are_the_same_whatever_the_layouts(self):
        loaded = []
        written = Cache("NHD", 64, 5)
        for name in layouts(1, 64):
            model = self.model("int2")
            copy = Cache(name, 32, 6)
            for layer in range(MODEL.layers):  # the same rows in another layout
                for part in (0, 1):
                    self.fill(copy, layer, part, written.rows(layer)[part])
            read = Cache("HND", 16, 7)
            keys = self.store(self.transfer(model, copy), copy)
            self.load(self.transfer(model, read), read, keys)
            loaded.append([read.rows(layer) for layer in range(MODEL.layers)])
        for other in loaded[1:]:
            np.testing.assert_array_equal(other, loaded[0])
        for layer in range(MODEL.layers):
            exact, near = to_float(written.rows(layer)), to_float(loaded[0][layer])
            np.testing.assert_array_equal(near[:, :64], exact[:, :64])  # the sink stays BF16
            rest = near[:, 64:].ravel(), exact[:, 64:].ravel()
            cosine = np.dot(*rest) / np.linalg.norm(rest[0]) / np.linalg.norm(rest[1])
            self.assertTrue(0.9 < cosine < 0.999, cosine)

    @staticmethod
    def fill(cache, layer, part, rows):
        target = np.transpose(cache.layers[layer][1][part],
                              [cache.dims[part].index(name) for name in "bthd"])
        padded = np.zeros((len(cache.table) * cache.block_tokens, HEADS, DIM), "uint16")
        padded[:len(rows)] = rows
        target[cache.table] = padded.reshape(-1, cache.block_tokens, HEADS, DIM)

    def test_only_the_requested_pages_are_written(self):
        model, written, read = self.model(), Cache("NHD", 32, 8), Cache("HND", 48, 9)
        keys = self.store(self.transfer(model, written), written)
        before = read.rows(0)
        self.load(self.transfer(model, read), read, keys, pages=3)
        after, end = read.rows(0), 3 * crumb.PAGE_TOKENS
        np.testing.assert_array_equal(after[:, :end], written.rows(0)[:, :end])
        np.testing.assert_array_equal(after[:, end:], before[:, end:])

    def test_an_engine_with_other_weight_formats_has_pages_of_its_own(self):
        model, written = self.model(), Cache("NHD", 64, 12)
        models = [dataclasses.replace(model, fields=_engines.keyspace_fields(quantization))
                  for quantization in (None, "fp8")]
        self.store(self.transfer(models[0], written), written)
        hits = []
        for one in models:
            transfer = self.transfer(one, None)
            space = transfer.keyspace()
            with transfer.acquire(space, transfer.keys(space, TOKENS), deadline=10) as lease:
                hits.append(lease.pages)
        self.assertEqual(hits, [PAGES, 0])

    def test_a_worker_of_the_engine_joins_the_schedulers_lease(self):
        model, written = self.model(), Cache("K then V", 16, 10)
        keys = self.store(self.transfer(model, written), written)
        engine = bytes(range(2, 18))
        scheduler = self.transfer(model, None, engine=engine)
        space = scheduler.keyspace()
        with scheduler.acquire(space, scheduler.keys(space, TOKENS), deadline=10) as lease:
            self.assertEqual([tier for tier in lease.tiers], [crumb.Tier.HOST] * PAGES)
            code = f"""
import sys; sys.path.insert(0, {str(support.ROOT / 'python/tests')!r})
import transfer_test as t, crumb, hashlib
cache = t.Cache("K transposed", 128, 11)
with crumb.Client({self.folder!r}, engine={engine!r}) as client:
    client.wait_connected(20)
    with crumb.Transfer(client, {model!r}) as transfer:
        transfer.use_cache(cache.view())
        keys = transfer.keys(transfer.keyspace(), t.TOKENS)
        with transfer.load({lease.token!r}, keys, 0, {PAGES}, cache.table, 10) as load:
            load.layers()
            print(load.pages, hashlib.sha256(cache.rows(1).tobytes()).hexdigest())
""".replace(repr(model), f"crumb.{model!r}")
            out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True,
                                 text=True, timeout=120).stdout
        import hashlib
        digest = hashlib.sha256(written.rows(1).tobytes()).hexdigest()
        self.assertEqual(out, f"{PAGES} {digest}\n")
        self.assertEqual(len(keys), PAGES)

    def test_blocks_of_an_engine_arrive_in_another_pool(self):
        model = self.model("int2")
        geometry = blocks.block_geometry(model)
        written, read = Pool(geometry, 21), Pool(geometry, 22)
        written.fill()
        from_pool, to_pool = self.transfer(model, None), self.transfer(model, None)
        from_pool.use_blocks(written.pools(), owner=written.memory)
        to_pool.use_blocks(read.pools(), owner=read.memory)
        keys = self.store(from_pool, written)
        before = read.memory.copy()
        self.load(to_pool, read, keys)
        for page in range(1, PAGES):
            np.testing.assert_array_equal(read.tiles(page), written.tiles(page))
        np.testing.assert_array_equal(read.sink(), written.sink())
        # Only these blocks were written.
        front = geometry.sink_blocks
        kept = sorted(set(range(read.blocks)) - set(read.table[:front] + read.table[front + 1:]))
        np.testing.assert_array_equal(read.memory[kept], before[kept])

        with self.assertRaisesRegex(crumb.InvalidArgument, "layers"):
            from_pool.use_blocks(written.pools()[:1])
        with self.assertRaisesRegex(crumb.InvalidArgument, "the pool has"):
            from_pool.store(from_pool.keyspace(), keys, 0, [*written.table[:-1], written.blocks])

    @unittest.skipIf(torch is None, "needs torch")
    def test_operators_store_and_load_a_layer(self):
        import crumb.ops
        model, written = self.model(), Cache("NHD", 64, 14, use_torch=True)
        read = Cache("HND", 16, 15, use_torch=True)
        from_cache, to_cache = self.transfer(model, written), self.transfer(model, read)
        space = from_cache.keyspace()
        keys = from_cache.keys(space, TOKENS)
        with from_cache.store(space, keys, 0, written.table) as store:
            handle = crumb.ops.register(store)
            for layer in range(MODEL.layers):
                torch.ops.crumb.store(handle, layer, written.layers[layer][0][0])
            store.finish()
        from_cache.wait_published(support.SECONDS)
        with to_cache.acquire(space, keys, 10) as lease:
            with to_cache.load(lease.token, keys, 0, PAGES, read.table, 10) as load:
                other = crumb.ops.register(load)
                torch.ops.crumb.load(other, 0, read.layers[0][0][0])
        # A compiler takes the cache as written by a load and as read by a store.
        written_by = [op.default._schema.arguments[2].alias_info is not None and
                      op.default._schema.arguments[2].alias_info.is_write
                      for op in (torch.ops.crumb.load, torch.ops.crumb.store)]
        self.assertEqual(written_by, [True, False])
        np.testing.assert_array_equal(read.rows(0), written.rows(0))
        for number in (handle, other):
            crumb.ops.unregister(number)

    def test_without_crumbd_there_is_no_prefix(self):
        with crumb.Client(self.folder + "/nothing") as alone:
            with crumb.Transfer(alone, self.model()) as transfer:
                space = transfer.keyspace(0.1)
                lease = transfer.acquire(space, transfer.keys(space, TOKENS))
                self.assertEqual((lease.pages, lease.reason), (0, crumb.Miss.UNAVAILABLE))
                lease.close()

    def test_keys_continue_behind_a_page(self):
        transfer = self.transfer(self.model(), None)
        space = transfer.keyspace()
        extra = [bytes([page]) * 32 for page in range(PAGES)]
        keys = transfer.keys(space, TOKENS, extra)
        for page in range(1, PAGES + 1):
            self.assertEqual(transfer.keys(space, TOKENS[page * 64:], extra[page:],
                                           parent=keys[page - 1]), keys[page:])
        with self.assertRaises(crumb.InvalidArgument):
            transfer.keys(space, TOKENS, extra, parent=b"short")

    def test_mistakes_are_refused(self):
        model, cache = self.model(), Cache("NHD", 64, 12)
        transfer = self.transfer(model, cache)
        space = transfer.keyspace()
        keys = transfer.keys(space, TOKENS)
        with self.assertRaisesRegex(crumb.InvalidArgument, "block table"):
            transfer.store(space, keys, 0, cache.table[:-1])
        with self.assertRaisesRegex(crumb.InvalidArgument, "the cache has"):
            transfer.store(space, keys, 0, [*cache.table[:-1], cache.blocks])
        with transfer.store(space, keys, 0, cache.table) as store:
            store.layers(0, 1)
            with self.assertRaises(crumb.FailedPrecondition):
                store.finish()
            with self.assertRaises(crumb.Error):
                store.layers(0, MODEL.layers + 1)
        other = self.transfer(self.model(), cache)
        with self.assertRaises(crumb.InvalidArgument):
            other.keys(space, TOKENS)
        self.refuse_caches(transfer, cache)

    def refuse_caches(self, transfer, cache):
        rows = np.zeros((4, 64, HEADS, DIM), "uint16")
        good = crumb.PagedRows.of(rows, "bthd")
        transfer.use_cache(crumb.PagedCache([(good, good)] * MODEL.layers, 4, 64))
        for bad in (rows[:, :, :1], rows[:3], rows[:, :32], rows[..., :32]):
            view = crumb.PagedRows.of(bad, "bthd")
            with self.assertRaisesRegex(crumb.InvalidArgument, "layer 0 has"):
                transfer.use_cache(crumb.PagedCache([(good, view)] * MODEL.layers, 4, 64))
        with self.assertRaisesRegex(crumb.InvalidArgument, "dims"):
            crumb.PagedRows.of(rows, "bthh")
        with self.assertRaisesRegex(crumb.InvalidArgument, "a paged cache is"):
            crumb.PagedRows.of(rows.astype("float32"), "bthd")
        rows.flags.writeable = False
        with self.assertRaisesRegex(crumb.InvalidArgument, "writable"):
            crumb.PagedRows.of(rows, "bthd")

    def test_a_cache_lives_as_long_as_its_transfer(self):
        import gc
        import weakref
        model, cache = self.model(), Cache("HND", 64, 13)
        transfer = self.transfer(model, cache)
        memory = weakref.ref(cache.layers[0][0][0].base)
        table = cache.table
        del cache
        gc.collect()
        self.assertIsNotNone(memory())
        space = transfer.keyspace()
        with transfer.store(space, transfer.keys(space, TOKENS), 0, table) as store:
            store.layers()


if __name__ == "__main__":
    unittest.main()
