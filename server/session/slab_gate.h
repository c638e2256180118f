// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>

#include "absl/status/status.h"
#include "common/mutex.h"
#include "common/page_key.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Sends a process the slabs that its leases lie in, each once, over the socket of its session.
// FdListener makes one for each session if tenants own their slabs, and shares it with the Session;
// other processes get all slabs with the welcome and have no gate. Thread-safe: threads that serve
// Acquires call Grant, and one lock keeps grants of one process in order.
//
// Tenants that own slabs must not see those of others: a process of theirs gets the descriptor of a
// slab only with the first lease in it, and before the response that names the slab.
class SlabGate {
 public:
  // Sends a message with descriptors over a socket.
  using Send = std::function<absl::Status(const std::string& bytes, std::span<const int> fds)>;

  // `socket` does not block; it is borrowed until Close. `send` sends over it; by default at once.
  SlabGate(int socket, uint64_t slab_bytes, Send send = {})
      : slab_bytes_(slab_bytes), send_(std::move(send)), socket_(socket) {}

  // Sends those slabs of leased fragments of a keyspace that the process does not have. Call before
  // the response with the fragments. kPermissionDenied: they lie in another tenant's slab;
  // kUnavailable: the process reads nothing from its socket, or has closed it. On an error some
  // slabs may have been sent; they are not sent again. The caller ends the lease.
  absl::Status Grant(const storage::TieredStore& store, const KeyspaceId& keyspace,
                     std::span<const storage::FragmentRef> fragments);

  // Records that the slab is empty and has no owner, so a later lease in it needs a new grant.
  // Returns true if the process has the slab and must be notified to unmap it.
  bool Forget(uint32_t slab);

  // Ends the use of the socket, before it is closed. Later calls of Grant fail with kUnavailable
  // unless the process has all slabs that they need.
  void Close();

 private:
  // Size of every slab, in bytes.
  const uint64_t slab_bytes_;
  const Send send_;
  Mutex mutex_;
  int socket_ ABSL_GUARDED_BY(mutex_);  // -1: closed
  // Numbers of the slabs that the process has.
  std::unordered_set<uint32_t> granted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
