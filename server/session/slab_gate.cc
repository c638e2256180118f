// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/slab_gate.h"

#include "common/fd_channel.h"
#include "common/status_macros.h"
#include "crumb/v1/session.pb.h"

namespace crumb::server {

absl::Status SlabGate::Grant(const storage::TieredStore& store, const KeyspaceId& keyspace,
                             std::span<const storage::FragmentRef> fragments) {
  MutexLock lock(&mutex_);
  for (const storage::FragmentRef& fragment : fragments) {
    if (granted_.contains(fragment.slab)) continue;
    if (socket_ < 0) return absl::UnavailableError("the process closed its session's socket");
    CRUMB_ASSIGN_OR_RETURN(const UniqueFd fd, store.OpenSlab(fragment.slab, keyspace));
    v1::SlabGrant grant;
    grant.set_slab(fragment.slab);
    grant.set_bytes(slab_bytes_);
    const int fds[] = {fd.get()};
    const std::string bytes = grant.SerializeAsString();
    const absl::Status sent = send_ ? send_(bytes, fds) : SendFdMessage(socket_, bytes, fds);
    if (!sent.ok()) {
      return absl::UnavailableError("the process does not take its slabs: " +
                                    std::string(sent.message()));
    }
    granted_.insert(fragment.slab);
  }
  return absl::OkStatus();
}

bool SlabGate::Forget(uint32_t slab) {
  MutexLock lock(&mutex_);
  return granted_.erase(slab) > 0;
}

void SlabGate::Close() {
  MutexLock lock(&mutex_);
  socket_ = -1;
}

}  // namespace crumb::server
