# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The serde for LMCache, with LMCache's own memory objects and storage.

Needs the package lmcache; tests/engines/install_lmcache.sh installs it.
"""

import dataclasses
import select
import unittest

import crumb
import support

torch = support.installed("torch")
lmcache = support.installed("lmcache") if torch is not None else None
if lmcache is not None:
    import crumb.lmcache  # registers the serde
    from crumb.lmcache import _tiles
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.serde import (SerdeConfig, create_serde_processor,
                                              serialized_layout_desc)
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

LAYERS, TOKENS, HEADS, DIM = 3, 256, 2, 128
SHAPE = (2, LAYERS, TOKENS, HEADS * DIM)
# Digests of docs/formats/page-tile.md, column "pattern", by (head_dim, group size).
PATTERNS = {(128, 128): 0xc1cf47d857a6b292, (64, 32): 0x3a763192202412fd,
            (256, 64): 0x466176273e263e08}


def fnv(data):
    """64-bit FNV-1a."""
    digest = 0xcbf29ce484222325
    for byte in data:
        digest = (digest ^ byte) * 0x100000001b3 % 2**64
    return digest


def memory(tensor):
    """LMCache's memory object over a tensor."""
    metadata = MemoryObjMetadata(
        shape=tensor.shape, dtype=tensor.dtype, address=0, phy_size=tensor.nbytes, ref_count=1,
        pin_count=0, fmt=MemoryFormat.KV_2LTD, shapes=[tensor.shape], dtypes=[tensor.dtype])
    return TensorMemoryObj(tensor.view(torch.uint8).flatten(), metadata, None)


def rows(seed, *shape):
    """BF16 rows with a channel that is larger than the others, as keys have."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    made[..., 5] *= 8
    return made.to(torch.bfloat16)


@unittest.skipIf(lmcache is None, "needs lmcache and torch")
class TilesTest(unittest.TestCase):
    def test_the_layout_is_that_of_the_format_document(self):
        for (dim, group), digest in PATTERNS.items():
            codec = _tiles.TileCodec(dim, group)
            t = torch.arange(64).view(-1, 1)
            ch, y = torch.arange(dim), torch.arange(dim // group)
            codes = ((7 * t + 3 * ch + t * ch // 5) % 4,
                     (5 * t + ch + t * ch // 3 + 1) % 4)
            meta = ((37 * t + 11 * y + 1, 41 * t + 13 * y + 2),
                    (43 * t + 17 * y + 3, 47 * t + 19 * y + 4))
            areas = [codec.pack_codes(part.to(torch.uint8).view(1, -1), number)
                     for number, part in enumerate(codes)]
            areas += [codec.pack_meta(torch.stack(pair, -1).to(torch.int16).view(torch.float16)
                                      .view(1, -1, 2)) for pair in meta]
            tile = torch.cat(areas, 1)
            self.assertEqual(tile.shape, (1, codec.tile_bytes))
            self.assertEqual(fnv(tile.flatten().tolist()), digest, (dim, group))

    def test_rows_that_are_not_finite_or_saturate(self):
        codec = _tiles.TileCodec(64)
        k, v = rows(1, 1, 64, 64), rows(2, 1, 64, 64)
        k[0, 3, 7], k[0, 4, 1], v[0, 9] = float("nan"), float("inf"), 3e38
        found_k, found_v = codec.decode(codec.encode(k, v))
        self.assertTrue(torch.isfinite(found_k).all() and torch.isfinite(found_v).all())
        self.assertEqual(int(found_k[0, 3:5].count_nonzero()), 0)

    def test_shapes_without_tiles_are_refused(self):
        for dim, group in ((96, 0), (64, 128), (128, 16)):
            with self.assertRaisesRegex(ValueError, "head_dim is 64, 128 or 256"):
                _tiles.TileCodec(dim, group)


@unittest.skipIf(lmcache is None, "needs lmcache and torch")
class OracleTest(support.CrumbdTest):
    def test_rows_are_those_that_crumbd_and_its_client_give_back(self):
        for dim in (64, 128, 256):
            model = dataclasses.replace(support.MODEL, layers=1, head_dim=dim, weights=f"l{dim}")
            cache = rows(dim, 2, 3, 64, model.kv_heads, dim)
            sent, pages = cache.clone(), range(3)
            with crumb.Transfer(self.client(), model) as transfer:
                transfer.use_cache(crumb.PagedCache(
                    [tuple(crumb.PagedRows.of(part, "bthd") for part in cache)], 3, 64))
                space = transfer.keyspace()
                keys = transfer.keys(space, range(3 * 64))
                with transfer.store(space, keys, 0, list(pages)) as store:
                    store.layers()
                    store.finish()
                transfer.wait_published(support.SECONDS)
                with transfer.acquire(space, keys, 10) as lease, \
                        transfer.load(lease.token, keys, 0, 3, list(pages), 10) as load:
                    load.layers()
            codec = _tiles.TileCodec(dim)
            tiles = sent[:, 1:].transpose(2, 3).flatten(1, 2)  # page 0 stays in BF16
            for found, expected in zip(codec.decode(codec.encode(*tiles)),
                                       cache[:, 1:].transpose(2, 3).flatten(1, 2).float()):
                # Rounded to BF16, and codes of values on a boundary between two may differ.
                near = torch.isclose(found, expected, rtol=2**-7, atol=2**-7)
                self.assertGreater(near.all(-1).float().mean(), 0.98)


@unittest.skipIf(lmcache is None, "needs lmcache and torch")
class SerdeTest(unittest.TestCase):
    def processor(self, **options):
        processor = create_serde_processor(SerdeConfig("crumb", {"head_dim": DIM, **options}))
        self.addCleanup(processor.close)
        return processor

    def serializers(self, **options):
        made = self.processor(**options)
        return made._serializer, made._deserializer

    def buffer(self, serializer, shape=SHAPE):
        layout = MemoryLayoutDesc([torch.Size(shape)], [torch.bfloat16])
        size = serializer.estimate_serialized_size(layout)
        return memory(torch.zeros(size, dtype=torch.uint8))

    def test_a_chunk_comes_back_through_lmcaches_processor(self):
        processor, chunk = self.processor(), rows(1, *SHAPE)
        layout = serialized_layout_desc(MemoryLayoutDesc([torch.Size(SHAPE)], [torch.bfloat16]),
                                        processor)
        stored = memory(torch.zeros(layout.shapes[0], dtype=torch.uint8))
        back = memory(torch.zeros(SHAPE, dtype=torch.bfloat16))
        self.assertLess(stored.tensor.nbytes * 4.9, chunk.nbytes)
        key = ObjectKey(b"chunk", "model", 0)
        task = processor.submit_serialize([memory(chunk)], [stored], [key])
        self.wait(processor.get_serialize_event_fd())
        self.assertTrue(processor.query_serialize_result(task))
        task = processor.submit_deserialize([stored], [back], [key])
        self.wait(processor.get_deserialize_event_fd())
        self.assertTrue(processor.query_deserialize_result(task))
        self.assertTrue(torch.equal(back.tensor[:, :, :16], chunk[:, :, :16]))
        cosine = torch.nn.functional.cosine_similarity(
            back.tensor[:, :, 16:].flatten().float(), chunk[:, :, 16:].flatten().float(), dim=0)
        self.assertTrue(0.9 < cosine < 0.999, cosine)

    def wait(self, descriptor):
        self.assertTrue(select.select([descriptor], [], [], support.SECONDS)[0])

    def test_every_row_has_its_place(self):
        serializer, deserializer = self.serializers(exact_tokens=0)
        stored, back = self.buffer(serializer), memory(torch.zeros(SHAPE, dtype=torch.bfloat16))
        chunk = torch.zeros(SHAPE, dtype=torch.bfloat16)
        places = ((0, 0, 0, 0), (0, 1, 63, 1), (1, 2, 64, 0), (1, 0, 255, 1))
        for number, (part, layer, token, head) in enumerate(places):
            chunk[part, layer, token, head * DIM:(head + 1) * DIM] = rows(number, DIM)
        written = serializer.serialize(memory(chunk), stored, None)
        self.assertEqual(written, stored.tensor.numel())
        deserializer.deserialize(stored, back, None)
        for part, layer, token, head in places:
            found, expected = (tensor[part, layer, token].view(HEADS, DIM)[head].clone()
                               for tensor in (back.tensor, chunk))
            cosine = torch.nn.functional.cosine_similarity(found.float(), expected.float(), dim=0)
            self.assertGreater(cosine, 0.85)
            back.tensor[part, layer, token].view(HEADS, DIM)[head] = 0
        self.assertEqual(int(back.tensor.count_nonzero()), 0)

    def test_what_is_stored_is_checked(self):
        serializer, deserializer = self.serializers()
        stored, back = self.buffer(serializer), memory(torch.zeros(SHAPE, dtype=torch.bfloat16))
        serializer.serialize(memory(rows(1, *SHAPE)), stored, None)
        whole = stored.tensor.clone()
        for place in (0, 12, 40, len(whole) // 2, len(whole) - 1):
            damaged = whole.clone()
            damaged[place] ^= 4
            with self.assertRaisesRegex(ValueError, "damaged"):
                deserializer.deserialize(memory(damaged), back, None)
        with self.assertRaisesRegex(ValueError, "damaged"):
            deserializer.deserialize(memory(whole[:-1].clone()), back, None)
        processor, key = self.processor(), ObjectKey(b"chunk", "model", 0)
        task = processor.submit_deserialize([memory(damaged)], [back], [key])
        self.wait(processor.get_deserialize_event_fd())
        self.assertIs(processor.query_deserialize_result(task), False)
        with self.assertRaisesRegex(ValueError, "damaged"):
            self.serializers(exact_tokens=0)[1].deserialize(stored, back, None)
        other = memory(torch.zeros((2, LAYERS, 128, HEADS * DIM), dtype=torch.bfloat16))
        with self.assertRaisesRegex(ValueError, "damaged"):
            deserializer.deserialize(stored, other, None)

    def test_what_does_not_fit_is_refused(self):
        serializer, _ = self.serializers()
        for shape in ((2, LAYERS, 100, DIM), (1, LAYERS, 256, DIM), (2, LAYERS, 256, 100),
                      (LAYERS, 256, DIM)):
            with self.assertRaisesRegex(ValueError, "multiple of 64 tokens"):
                self.buffer(serializer, shape)
        with self.assertRaisesRegex(ValueError, "buffer has 100"):
            serializer.serialize(memory(rows(1, *SHAPE)),
                                 memory(torch.zeros(100, dtype=torch.uint8)), None)
        for options in ({}, {"head_dim": 128, "bits": 2}):
            with self.assertRaisesRegex(ValueError, "needs head_dim"):
                create_serde_processor(SerdeConfig("crumb", options))
        with self.assertRaisesRegex(ValueError, "exact_tokens"):
            create_serde_processor(SerdeConfig("crumb", {"head_dim": 128, "exact_tokens": 65}))


if __name__ == "__main__":
    unittest.main()
