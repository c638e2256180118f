// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "crumb/v1/cache_service.pb.h"
#include "tools/fragment_file.h"

namespace crumb::tools {

// A blocking connection to one crumbd for people's commands: every call waits for the answer, or
// for the timeout. Errors are crumbd's, or kUnavailable naming the address and what to do when
// nobody answers there. Not thread-safe.
class CrumbdConnection {
 public:
  // Does not connect yet. `target` is a gRPC address: unix:/path or host:port.
  static std::unique_ptr<CrumbdConnection> To(const std::string& target, Duration timeout);
  virtual ~CrumbdConnection() = default;

  // "serving", "not serving", as the health service says.
  virtual absl::StatusOr<std::string> Health() = 0;
  virtual absl::StatusOr<v1::StatsResponse> Stats() = 0;
  virtual absl::StatusOr<v1::LookupResponse> Lookup(const v1::LookupRequest& request) = 0;
  virtual absl::StatusOr<v1::FlushResponse> Flush() = 0;
  virtual absl::StatusOr<v1::PinResponse> Pin(const v1::PinRequest& request) = 0;
  virtual absl::StatusOr<v1::UnpinResponse> Unpin(const v1::UnpinRequest& request) = 0;
  virtual absl::StatusOr<v1::DeleteResponse> Delete(const v1::DeleteRequest& request) = 0;
  virtual absl::StatusOr<v1::DropKeyspaceResponse> DropKeyspace(
      const v1::DropKeyspaceRequest& request) = 0;
  virtual absl::Status SetKeyspaceState(const v1::SetKeyspaceStateRequest& request) = 0;

  // All fragments of one page; their headers and sums are checked against the request. kNotFound
  // with the reason when the page is a miss; kDataLoss: what came is damaged.
  virtual absl::StatusOr<std::vector<FragmentFile>> GetPage(const KeyspaceId& keyspace,
                                                            const PageKey& key) = 0;
  // One outcome per fragment.
  virtual absl::StatusOr<v1::PutResponse> Put(const KeyspaceId& keyspace,
                                              const std::vector<FragmentFile>& fragments) = 0;
};

// "absent", "deadline", ... as people read it.
std::string MissReasonName(v1::MissReason reason);

// "host", "ssd", ...
std::string TierName(v1::Tier tier);

}  // namespace crumb::tools
