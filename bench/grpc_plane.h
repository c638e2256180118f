// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/fragment_set.h"
#include "bench/store_plane.h"
#include "crumb/client.h"

namespace crumb::bench {

// Bytes through gRPC streams: one Get or Put stream a call. Not thread-safe; borrows what it is
// made of.
class GrpcPlane : public StorePlane {
 public:
  // The keyspace of `fragments` must be bound.
  GrpcPlane(client::Client& client, const FragmentSet& fragments)
      : client_(client), fragments_(fragments) {}

  absl::Status Put(size_t first, size_t count) override;
  absl::Status Get(size_t first, size_t count) override;

 private:
  client::Client& client_;
  const FragmentSet& fragments_;
  std::vector<client::FragmentBytes> put_;  // kept, like the buffers inside
};

}  // namespace crumb::bench
