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

// Puts the messages of one Put together into fragments and commits them. Holds one fragment.
// Not thread-safe.
class PutAssembler {
 public:
  explicit PutAssembler(const CallContext& context) : context_(context) {}

  // Takes the next message. True: a fragment is complete, call Commit before the next. An error
  // ends the stream; what is wrong with one fragment only becomes its outcome.
  absl::StatusOr<bool> Add(const v1::PutRequest& request);

  // CPU work.
  void Commit();

  // After the last message: what became of each fragment.
  v1::PutResponse Finish();

 private:
  absl::Status Begin(const std::string& header);
  void Refuse(const std::string& why);
  // Refuses the fragment whose tiles have not all come.
  void EndIncomplete();

  const CallContext context_;
  std::shared_ptr<Keyspace> keyspace_;
  std::vector<std::byte> fragment_;  // tiles, then header
  size_t tiles_bytes_ = 0;           // 0: no fragment in progress
  size_t received_ = 0;              // of tiles_bytes_
  v1::PutResponse response_;
};

}  // namespace crumb::server
