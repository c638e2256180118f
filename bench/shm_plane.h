// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/fragment_set.h"
#include "bench/store_plane.h"
#include "common/clock.h"
#include "common/page_key.h"
#include "crumb/client.h"

namespace crumb::bench {

// Shared memory with crumbd. Put copies into staging and commits; Get reads leased pages where they
// lie. Not thread-safe; borrows what it is made of.
class ShmPlane : public StorePlane {
 public:
  // The keyspace of `fragments` must be bound.
  ShmPlane(client::Client& client, const FragmentSet& fragments);

  absl::Status Put(size_t first, size_t count) override;
  absl::Status Get(size_t first, size_t count) override;

  // Leases `keys`, pages of the set from its page `first` on, reads one byte of the last, and
  // releases them. Answers how long lease and read took, without the release. `wait` is for pages
  // below host memory. kNotFound: not all of them are hits.
  absl::StatusOr<Duration> Acquire(size_t first, std::span<const PageKey> keys, Duration wait);

  // Get, with the bytes copied to memory of this process and checked as they are.
  absl::Status GetCopy(size_t first, size_t count);

 private:
  absl::StatusOr<std::shared_ptr<const client::Lease>> LeasePages(size_t first,
                                                                  std::span<const PageKey> keys,
                                                                  Duration wait);
  std::vector<PageKey> Keys(size_t first, size_t count) const;

  client::Client& client_;
  const FragmentSet& fragments_;
  std::vector<std::byte> copy_;  // of one fragment's tiles
};

}  // namespace crumb::bench
