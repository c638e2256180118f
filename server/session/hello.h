// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/fd_channel.h"
#include "common/unique_fd.h"
#include "server/base/limits.h"
#include "server/session/session_table.h"
#include "server/tenants/tenant_table.h"
#include "storage/tiered_store.h"

// The first messages on crumbd.fd.sock, crumbd's side.
namespace crumb::server {

// Version of the messages on crumbd.fd.sock. A hello of any other version is refused.
inline constexpr uint32_t kSessionProtocolVersion = 1;

// Whether sessions need a tenant's token, and the resources that they get with it.
struct SessionTenants {
  const TenantTable* table = nullptr;  // null: no tokens
  bool shared_memory = false;          // whether tenants may open sessions at all
  bool own_slabs = false;              // whether they get slabs one by one
};

// A process's hello after its checks. `request` is passed to SessionTable::Open.
struct Hello {
  SessionTable::OpenRequest request;
  bool pool_socket = false;     // the process takes a socket for pools
  bool call_socket = false;     // the process takes a socket for Acquires
  bool staging_socket = false;  // the process takes a second socket, for Reserve and Commit
  UniqueFd pidfd;
};

// Checks a process's first message, its credentials and its pidfd. kInvalidArgument: not a hello,
// of another version, or with other descriptors than one pidfd; kFailedPrecondition: the user may
// not, or tenants may not; kUnauthenticated: no tenant's token. Does not block: takes the message's
// descriptor only if it is a pidfd, and leaves all others in the message. Administrators, that is
// root and crumbd's own user, need neither a place in sessions.allowed_uids nor a token.
absl::StatusOr<Hello> ReadHello(int socket, FdMessage& message, const SessionLimits& limits,
                                const SessionTenants& tenants = {});

// Sends the reason in a welcome without a token, as far as the process reads it. Does not block;
// the caller closes the connection next.
void RefuseHello(int socket, const absl::Status& why);

// The process's way to send PoolRequests.
struct WelcomePools {
  bool kept = false;  // the process may send PoolRequests
  int socket = -1;    // the socket for PoolRequests; -1: the session's
};

// The process's ends of its sockets for calls; -1: none.
struct WelcomeCalls {
  int acquires = -1;
  int staging = -1;
};

// Sends a message, and descriptors with it.
using DescriptorSender =
    std::function<absl::Status(const std::string& bytes, std::span<const int> fds)>;

// Sends token, descriptors of staging memory and slabs; without slabs the session gets grants.
// Without sockets for calls, the process makes them over gRPC alone. Returns the result of `send`.
// `epoch` is the epoch of the slabs, `lease_pages_max` the bound of one engine's leased pages. The
// descriptors go in this order: staging memory, slabs, the sockets for pools, Acquires and staging.
absl::Status SendWelcome(const DescriptorSender& send, const Session& session,
                         std::span<const storage::Slab> slabs, uint64_t epoch,
                         uint32_t lease_pages_max, WelcomePools pools = {},
                         WelcomeCalls calls = {});

// Returns the owner of tasks that a process can make block (OwnerTasks): its tenant, or its user if
// it has no tenant.
std::string OwnerOf(const std::string& tenant, unsigned user);

}  // namespace crumb::server
