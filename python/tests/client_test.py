# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""crumb.Client against a crumbd: pages by key, errors, statistics, lifetimes."""

import gc
import hashlib
import unittest

import crumb
import support

FIELDS = {"model": "made-up", "weights": "1", "format": "int2", "layout": "1", "page_tokens": "64"}


class ClientTest(support.CrumbdTest):
    def setUp(self):
        self.connection = self.client()
        self.space = self.connection.open_keyspace(FIELDS, layers=2, kv_heads=2, head_dim=64)
        self.tiles = bytes(range(256)) * (4 * self.space.int2_tile_bytes // 256)

    def fragment(self, name, tiles=None, parent=crumb.NO_PARENT):
        return crumb.Fragment(key=crumb.foreign_key(self.space, name),
                              tiles=self.tiles if tiles is None else tiles, layers=range(2),
                              heads=range(2), parent=parent)

    def test_put_lookup_get(self):
        first = self.fragment(b"first")
        second = self.fragment(b"second", bytearray(reversed(self.tiles)), parent=first.key)
        outcomes = self.connection.put(self.space, [first, second])
        self.assertEqual(outcomes, [crumb.PutOutcome.STORED] * 2)
        self.assertEqual(self.connection.put(self.space, [first]),
                         [crumb.PutOutcome.DEDUPLICATED])
        keys = [first.key, second.key, crumb.foreign_key(self.space, b"absent")]
        found = self.connection.lookup(self.space, keys)
        self.assertEqual((found.hits, found.reason), (2, crumb.Miss.ABSENT))
        self.assertEqual(list(found.tiers), [crumb.Tier.HOST] * 2)
        got = self.connection.get(self.space, keys)
        self.assertEqual(got.reason, crumb.Miss.ABSENT)
        self.assertEqual([fragment.tiles for fragment in got.fragments],
                         [self.tiles, bytes(reversed(self.tiles))])
        self.assertEqual([fragment.page for fragment in got.fragments], [0, 1])
        self.assertEqual(got.fragments[1].parent, first.key)
        self.assertEqual((got.fragments[0].layers, got.fragments[0].heads), (range(2), range(2)))

    def test_a_receiver_sees_tiles_in_place(self):
        fragment = self.fragment(b"in place")
        self.connection.put(self.space, [fragment])
        seen = []

        def receive(given):
            seen.append((given.page, hashlib.sha256(given.tiles).digest(), given.tiles))

        got = self.connection.get(self.space, [fragment.key], receiver=receive)
        self.assertEqual(list(got.fragments), [])
        page, digest, tiles = seen[0]
        self.assertEqual((page, digest), (0, hashlib.sha256(self.tiles).digest()))
        with self.assertRaises(ValueError):
            tiles[0]  # the memory was crumbd's response, valid during the call only

    def test_a_receiver_that_raises_ends_the_get(self):
        fragment = self.fragment(b"raises")
        self.connection.put(self.space, [fragment])

        def receive(_):
            raise RuntimeError("enough")

        with self.assertRaisesRegex(RuntimeError, "enough"):
            self.connection.get(self.space, [fragment.key], receiver=receive)
        self.assertEqual(len(self.connection.get(self.space, [fragment.key]).fragments), 1)

    def test_errors_carry_code_and_message(self):
        with self.assertRaisesRegex(crumb.InvalidArgument, "4 tiles") as caught:
            self.connection.put(self.space, [self.fragment(b"short", self.tiles[:-1])])
        self.assertEqual(caught.exception.code, 3)
        self.assertIsInstance(caught.exception, ValueError)
        with self.assertRaises(crumb.NotFound):
            self.connection.put(crumb.Keyspace(bytes(range(32)), 1, self.space.int2_tile_bytes,
                                               self.space.bf16_tile_bytes, False),
                                [self.fragment(b"x")])
        with self.assertRaisesRegex(crumb.InvalidArgument, "32 bytes"):
            self.connection.lookup(self.space, [b"short"])

    def test_without_crumbd(self):
        with crumb.Client(self.folder + "/nothing") as alone:
            self.assertFalse(alone.connected)
            with self.assertRaises(crumb.Unavailable):
                alone.wait_connected(0.05)
            with self.assertRaises(crumb.Unavailable):
                alone.lookup(self.space, [bytes(32)])

    def test_page_keys_of_lists_and_arrays_are_the_same(self):
        ids = list(range(1000, 1200))
        keys = crumb.page_keys(self.space, ids)
        self.assertEqual(len(keys), 3)
        self.assertEqual(crumb.page_keys(self.space, ids[:64]), keys[:1])
        self.assertNotEqual(crumb.page_keys(self.space, [7] + ids[1:])[2], keys[2])
        for name, make in (("numpy", lambda np: np.array(ids, dtype="int64")),
                           ("torch", lambda torch: torch.tensor(ids))):
            module = support.installed(name)
            if module is not None:
                self.assertEqual(crumb.page_keys(self.space, make(module)), keys, name)
        with self.assertRaises(crumb.InvalidArgument):
            crumb.page_keys(self.space, [2**31])

    def test_stats_are_a_table(self):
        self.connection.put(self.space, [self.fragment(b"counted")])
        stats = self.connection.stats()
        self.assertGreaterEqual(stats["tier.host.pages"], 1)
        self.assertGreaterEqual(stats["sessions"], 1)
        self.assertEqual(stats["version"], "0.1.0")
        self.assertIn("tier.host.pages", str(stats))
        self.assertIn("<td>tier.host.pages</td>", stats._repr_html_())

    def test_flush_counts_durable_pages(self):
        self.connection.put(self.space, [self.fragment(b"durable")])
        self.assertGreaterEqual(self.connection.flush(support.SECONDS), 1)

    def test_closing(self):
        client = self.client()
        sessions = self.connection.stats()["sessions"]
        client.close()
        client.close()
        self.assertTrue(client.closed)
        with self.assertRaisesRegex(crumb.InvalidArgument, "the Client is closed"):
            client.lookup(self.space, [bytes(32)])
        with self.assertRaisesRegex(crumb.InvalidArgument, "the Client is closed"):
            _ = client.connected
        self.wait_for_sessions(sessions - 1)
        dropped = crumb.Client(self.folder)
        dropped.wait_connected(support.SECONDS)
        self.wait_for_sessions(sessions)
        del dropped  # the garbage collector closes it
        gc.collect()
        self.wait_for_sessions(sessions - 1)

    def wait_for_sessions(self, count):
        import services  # found by support
        services.wait_for(f"{count} sessions",
                          lambda: self.connection.stats()["sessions"] == count)


if __name__ == "__main__":
    unittest.main()
