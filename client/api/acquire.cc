// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/acquire.h"

#include <utility>

#include "common/status_macros.h"
#include "crumb/client.h"

namespace crumb::client {
namespace {

// Performs the whole Acquire in Finish.
class AcquireLater final : public PendingAcquire {
 public:
  AcquireLater(Client& client, const AcquireRequest& request)
      : client_(client), request_(request) {}
  absl::StatusOr<AcquireResult> Finish() override { return client_.Acquire(request_); }

 private:
  Client& client_;
  const AcquireRequest request_;
};

}  // namespace

std::unique_ptr<PendingAcquire> Client::StartAcquire(const AcquireRequest& request) {
  return std::make_unique<AcquireLater>(*this, request);
}

std::unique_ptr<PendingCommit> Client::StartCommit(const KeyspaceId& keyspace,
                                                   std::vector<StagingSlot> slots,
                                                   size_t tiles_bytes, Duration timeout) {
  return std::make_unique<FinishedCommit>(Commit(keyspace, std::move(slots), tiles_bytes, timeout));
}

absl::StatusOr<FlushReport> Client::FlushPages(Duration timeout) {
  FlushReport report;
  CRUMB_ASSIGN_OR_RETURN(report.durable_pages, Flush(timeout));
  return report;
}

}  // namespace crumb::client
