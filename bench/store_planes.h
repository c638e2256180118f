// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/fragment_set.h"
#include "common/clock.h"
#include "common/page_key.h"
#include "crumb/client.h"

namespace crumb::bench {

// Connects to the crumbd whose sockets are in a folder. kUnavailable: no crumbd answers there.
absl::StatusOr<std::unique_ptr<client::Client>> ConnectTo(const std::string& socket_dir,
                                                          uint64_t staging_bytes = 128 << 20);

// Opens the keyspace of `fragments` and binds it to them.
absl::Status BindKeyspace(client::Client& client, FragmentSet& fragments);

// A way to move the fragments of a FragmentSet into a store and out of it. Blocking; not
// thread-safe.
class StorePlane {
 public:
  virtual ~StorePlane() = default;

  // Stores pages [first, first + count). kResourceExhausted: the store refused some of them.
  virtual absl::Status Put(size_t first, size_t count) = 0;

  // Reads every byte of pages [first, first + count), with the checks that a reader must make.
  // kNotFound: some pages are missing; kDataLoss: a check failed.
  virtual absl::Status Get(size_t first, size_t count) = 0;
};

// Shared memory with crumbd: Put copies into staging memory and commits, Get reads leased pages in
// place. Not thread-safe; its arguments must outlive it.
class ShmPlane : public StorePlane {
 public:
  // REQUIRES: the keyspace of `fragments` is bound.
  ShmPlane(client::Client& client, const FragmentSet& fragments);

  absl::Status Put(size_t first, size_t count) override;
  absl::Status Get(size_t first, size_t count) override;

  // Leases `keys`, which are pages of the set from page `first` on, reads one byte of the last, and
  // releases them. Returns the time of lease and read, without the release. `wait` bounds the time
  // for pages that are not in host memory. kNotFound: some pages did not hit.
  absl::StatusOr<Duration> Acquire(size_t first, std::span<const PageKey> keys, Duration wait);

  // Like Get, but copies the bytes to memory of this process and verifies them meanwhile.
  absl::Status GetCopy(size_t first, size_t count);

 private:
  absl::StatusOr<std::shared_ptr<const client::Lease>> LeasePages(size_t first,
                                                                  std::span<const PageKey> keys,
                                                                  Duration wait);
  // Returns the keys of pages [first, first + count).
  std::vector<PageKey> Keys(size_t first, size_t count) const;

  client::Client& client_;
  const FragmentSet& fragments_;
  std::vector<std::byte> copy_;  // the tiles of one fragment
};

// gRPC streams, one Get or Put per call. Not thread-safe; its arguments must outlive it.
class GrpcPlane : public StorePlane {
 public:
  // REQUIRES: the keyspace of `fragments` is bound.
  GrpcPlane(client::Client& client, const FragmentSet& fragments)
      : client_(client), fragments_(fragments) {}

  absl::Status Put(size_t first, size_t count) override;
  absl::Status Get(size_t first, size_t count) override;

 private:
  client::Client& client_;
  const FragmentSet& fragments_;
  std::vector<client::FragmentBytes> put_;  // kept for its buffers
};

// Opens a plane of SET and GET of whole fragments at a Redis server, one request at a time.
// `fragments` must outlive it.
absl::StatusOr<std::unique_ptr<StorePlane>> OpenRedisPlane(const std::string& host, int port,
                                                           const FragmentSet& fragments);

}  // namespace crumb::bench
