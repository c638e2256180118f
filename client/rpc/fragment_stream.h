// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "crumb/staging.h"
#include "crumb/v1/cache_service.pb.h"

namespace crumb::client {

// FragmentAssembler reassembles and verifies fragments from the messages of a Get. Not thread-safe.
//
// A fragment's first message has its header, from which the number of bytes of its tiles is known;
// further messages append to them. The fragment is delivered when it is complete, so that at most
// one is in memory.
class FragmentAssembler {
 public:
  // `keys` and `receiver` are borrowed.
  FragmentAssembler(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                    const FragmentReceiver& receiver)
      : keyspace_(keyspace), keys_(keys), receiver_(receiver) {}

  // Adds a message. kDataLoss: a fragment is damaged or was not requested. Other errors are the
  // receiver's.
  absl::Status Add(v1::GetResponse& message);

  // Returns why the pages ended. kDataLoss: the stream ended inside a fragment.
  absl::StatusOr<MissReason> End() const;

 private:
  absl::Status Begin(const v1::GetResponse& message);
  absl::Status Deliver();

  const KeyspaceId keyspace_;
  const std::span<const PageKey> keys_;
  const FragmentReceiver& receiver_;
  std::optional<FragmentBytes> open_;
  size_t open_bytes_ = 0;  // size of its tiles, from its header
  MissReason miss_reason_ = MissReason::kNone;
};

// FragmentSplitter cuts fragments into the messages of a Put. Not thread-safe.
//
// The first message names the keyspace, the first message of each fragment has the encoded header,
// and each message has at most 2 MiB of tiles. `fragments` is borrowed.
class FragmentSplitter {
 public:
  FragmentSplitter(const KeyspaceId& keyspace, std::span<const FragmentBytes> fragments)
      : keyspace_(keyspace), fragments_(fragments) {}

  // Fills in the next message. Returns false if there is none.
  bool Next(v1::PutRequest* message);

 private:
  const KeyspaceId keyspace_;
  const std::span<const FragmentBytes> fragments_;
  size_t fragment_ = 0;
  size_t sent_ = 0;  // bytes of the present fragment's tiles
  bool first_ = true;
};

}  // namespace crumb::client
