// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/fragment_header.h"
#include "common/mutex.h"
#include "common/page_key.h"

namespace crumb::server {

// Pages that are on their way here, so that each is fetched once however many requests wait for
// it. Thread-safe.
class PageFlights {
 public:
  using Landed = std::function<void(bool arrived)>;

  // True: the caller brings the page and calls Land. False: another caller does already, and
  // `landed` will be called on its thread.
  bool Claim(const KeyspaceId& keyspace, const PageKey& key, const TileRange& range, Landed landed);
  void Land(const KeyspaceId& keyspace, const PageKey& key, const TileRange& range, bool arrived);

 private:
  struct Name {
    KeyspaceId keyspace;
    PageKey key;
    TileRange range;

    friend bool operator==(const Name&, const Name&) = default;
    template <typename H>
    friend H AbslHashValue(H h, const Name& name) {
      return H::combine(std::move(h), name.keyspace, name.key, name.range.layers.begin,
                        name.range.heads.begin);
    }
  };

  Mutex mutex_;
  absl::flat_hash_map<Name, std::vector<Landed>> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
