// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "crumb/v1/cache_service.pb.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// The pages of one Get, leased while they are read message by message: for callers without shared
// memory. The stream of the call owns it and reads the next message when gRPC has sent the last.
// The destructor ends the lease. Not thread-safe.
class GetReader {
 public:
  using Opened = std::function<void(absl::StatusOr<std::unique_ptr<GetReader>>)>;

  // One message: the fields in `message` and then `tiles`, which stay valid as long as the reader.
  struct Part {
    v1::GetResponse message;  // the response without its tiles
    std::span<const std::byte> tiles;
  };

  // Leases the prefix. `opened` is called once, possibly before this returns or on a store thread.
  // Keyspaces whose pages are not served give a reader with the miss reason and no pages.
  static void Open(const CallContext& context, const v1::GetRequest& request, TimePoint deadline,
                   Opened opened);
  ~GetReader();

  // Fills in the next message; returns false after the last. If the prefix ends early, the last one
  // has the miss reason.
  bool Next(Part& part);

 private:
  GetReader(const CallContext& context, storage::AcquireResult result, v1::MissReason miss)
      : context_(context), result_(std::move(result)), miss_reason_(miss) {}

  const CallContext context_;
  const storage::AcquireResult result_;
  const v1::MissReason miss_reason_;
  size_t fragment_ = 0;  // being read
  size_t sent_ = 0;      // bytes of its tiles that were sent
  bool finished_ = false;
};

}  // namespace crumb::server
