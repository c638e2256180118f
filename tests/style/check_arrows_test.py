#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The arrow check itself: it must see forbidden includes, links and cycles."""

import unittest

import check_arrows


class CheckArrowsTest(unittest.TestCase):
    def offences(self, path, text):
        return list(check_arrows.check_file(path, text))

    def test_allowed_include(self):
        self.assertEqual(self.offences("storage/a.cc", '#include "common/page_key.h"\n'), [])

    def test_forbidden_include(self):
        found = self.offences("kernels/a.cc", '#include "common/page_key.h"\n')
        self.assertEqual(found, ["kernels/a.cc: kernels may include only common/page_format.h, not "
                                 "common/page_key.h"])

    def test_a_header_that_a_folder_may_include_alone(self):
        self.assertEqual(self.offences("kernels/a.h", '#include "common/page_format.h"\n'), [])
        found = self.offences("kernels/CMakeLists.txt", "crumb_library(kernels DEPS crumb::common)")
        self.assertEqual(found, ["kernels/CMakeLists.txt: kernels may include headers of common, "
                                 "but not link it"])

    def test_examples_may_use_models_but_client_may_not(self):
        text = '#include "models/engine.h"\n'
        self.assertEqual(self.offences("client/examples/tiny_lm/main.cc", text), [])
        self.assertEqual(len(self.offences("client/worker/a.cc", text)), 1)

    def test_no_folder_knows_the_server(self):
        self.assertEqual(len(self.offences("tools/a.cc", '#include "server/daemon/daemon.h"\n')), 1)

    def test_public_headers_belong_to_the_client(self):
        self.assertEqual(len(self.offences("server/calls/a.cc", '#include "crumb/client.h"\n')), 1)
        self.assertEqual(self.offences("server/calls/a.cc", '#include "crumb/v1/page.pb.h"\n'), [])

    def test_rooms_of_the_client(self):
        self.assertEqual(self.offences("client/gpu/a.cc", '#include "client/cpu/b.h"\n'), [])
        self.assertEqual(self.offences("client/cpu/a.cc", '#include "crumb/client.h"\n'), [])
        found = self.offences("client/worker/a.cc", '#include "client/gpu/device/b.h"\n')
        self.assertEqual(found, ["client/worker/a.cc: client/worker may not know client/gpu"])

    def test_rooms_of_the_server(self):
        text = '#include "server/cluster/etcd/etcd_client.h"\n'
        self.assertEqual(self.offences("server/cluster/a.cc", text), [])
        found = self.offences("server/session/a.cc", '#include "server/device/device_pools.h"\n')
        self.assertEqual(found, ["server/session/a.cc: server/session may not know server/device"])
        found = self.offences("server/cluster/etcd/a.cc", '#include "server/cluster/view.h"\n')
        self.assertEqual(found,
                         ["server/cluster/etcd/a.cc: server/cluster/etcd may not know server/cluster"])

    def test_no_file_lies_outside_the_rooms(self):
        found = self.offences("server/a.cc", "")
        self.assertEqual(found, ["server/a.cc: server has rooms, and the file lies in none"])
        self.assertEqual(self.offences("tools/a.cc", ""), [])

    def test_third_party_is_confined(self):
        text = "#include <rocksdb/db.h>\n"
        self.assertEqual(self.offences("storage/ssd/index.cc", text), [])
        self.assertEqual(len(self.offences("storage/store/open_tiered_store.cc", text)), 1)

    def test_links_follow_the_arrows(self):
        text = "crumb_library(storage DEPS crumb::common crumb::server)"
        found = self.offences("storage/CMakeLists.txt", text)
        self.assertEqual(found, ["storage/CMakeLists.txt: storage may not know server"])

    def test_cycles_are_found(self):
        self.assertIsNone(check_arrows.find_cycle(check_arrows.ARROWS))
        self.assertIsNone(check_arrows.find_cycle(check_arrows.ROOMS))
        self.assertEqual(check_arrows.find_cycle({"a": {"b"}, "b": {"a"}}), ["a", "b", "a"])


if __name__ == "__main__":
    unittest.main()
