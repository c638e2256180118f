// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "crumb/v1/cache_service.pb.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// Puts the messages of one Put together into fragments and commits them: for writers without shared
// memory. Holds one fragment, limits.fragment_bytes_max at most. The stream of the call owns it;
// Commit runs on a commit thread while the stream reads nothing. Not thread-safe.
//
//   no fragment --Add: header--> filling --Add: all tiles there--> complete --Commit--> no fragment
//                                   '------Add: next header: refused as incomplete----^
class PutAssembler {
 public:
  explicit PutAssembler(const CallContext& context) : context_(context) {}

  // Adds the next message. Returns true if a fragment is complete; the caller must then call Commit
  // before the next message. An error ends the stream. A fault of one fragment alone becomes the
  // outcome of that fragment.
  absl::StatusOr<bool> Add(const v1::PutRequest& request);

  // CPU work.
  void Commit();

  // Returns the outcome of each fragment. REQUIRES: it is called after the last message.
  v1::PutResponse Finish();

 private:
  // Begins a fragment with its encoded header.
  absl::Status Begin(const std::string& header);
  // Adds the outcome REFUSED and counts it; no fragment is in progress afterwards.
  void Refuse(const std::string& why);
  // Refuses the fragment whose tiles have not all come.
  void EndIncomplete();

  const CallContext context_;
  std::shared_ptr<Keyspace> keyspace_;
  std::vector<std::byte> fragment_;  // tiles, then header
  size_t tiles_bytes_ = 0;           // 0: no fragment in progress
  size_t received_ = 0;              // bytes of tiles_bytes_ that were received
  v1::PutResponse response_;
};

}  // namespace crumb::server
