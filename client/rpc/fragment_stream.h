// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "crumb/staging.h"
#include "crumb/v1/cache_service.pb.h"

namespace crumb::client {

// Puts the messages of a Get together to fragments and checks them. Not thread-safe.
class FragmentAssembler {
 public:
  // `keys` and `receiver` are borrowed.
  FragmentAssembler(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                    const FragmentReceiver& receiver)
      : keyspace_(keyspace), keys_(keys), receiver_(receiver) {}

  // kDataLoss: a fragment that is damaged or not what was asked for; the receiver's error.
  absl::Status Add(v1::GetResponse& message);

  // Why the pages ended. kDataLoss: in the middle of a fragment.
  absl::StatusOr<MissReason> End() const;

 private:
  absl::Status Begin(const v1::GetResponse& message);
  absl::Status Deliver();

  const KeyspaceId keyspace_;
  const std::span<const PageKey> keys_;
  const FragmentReceiver& receiver_;
  std::optional<FragmentBytes> open_;
  size_t open_bytes_ = 0;  // that its header announces
  MissReason miss_reason_ = MissReason::kNone;
};

// Cuts fragments into the messages of a Put. Not thread-safe.
class FragmentSplitter {
 public:
  FragmentSplitter(const KeyspaceId& keyspace, std::span<const FragmentBytes> fragments)
      : keyspace_(keyspace), fragments_(fragments) {}

  // False: there is no more.
  bool Next(v1::PutRequest* message);

 private:
  const KeyspaceId keyspace_;
  const std::span<const FragmentBytes> fragments_;
  size_t fragment_ = 0;
  size_t sent_ = 0;  // bytes of the fragment's tiles
  bool first_ = true;
};

}  // namespace crumb::client
