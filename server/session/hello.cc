// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/hello.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "common/status_macros.h"
#include "crumb/v1/session.pb.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

constexpr size_t kProcessNameBytesMax = 64;

// The kernel's name of every pidfd.
constexpr std::string_view kPidfdLink = "anon_inode:[pidfd]";
constexpr std::string_view kPidLine = "Pid:\t";

// The process of a pidfd according to /proc; 0 when it is outside our namespace, -1 when it is
// gone.
int PidOf(int fd) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(fd));
  std::string line;
  while (std::getline(info, line)) {
    if (!line.starts_with(kPidLine)) continue;
    int pid = -1;
    std::from_chars(line.data() + kPidLine.size(), line.data() + line.size(), pid);
    return pid;
  }
  return -1;
}

// Checks that `fd` is a pidfd of a living process, and of process `pid` when that is not 0 and both
// live in a PID namespace that this process sees. kInvalidArgument otherwise.
absl::Status CheckPidfd(int fd, int pid) {
  std::array<char, 64> link;
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t size = ::readlink(path.c_str(), link.data(), link.size());
  if (size < 0 || std::string_view(link.data(), static_cast<size_t>(size)) != kPidfdLink) {
    return absl::InvalidArgumentError("the descriptor is no pidfd");
  }
  pollfd ended{fd, POLLIN, 0};
  if (::poll(&ended, 1, 0) != 0) {
    return absl::InvalidArgumentError("the pidfd's process has ended");
  }
  const int named = PidOf(fd);
  if (pid != 0 && named != 0 && named != pid) {
    return absl::InvalidArgumentError("the pidfd is not the sender's own");
  }
  return absl::OkStatus();
}

bool IsAdministrator(unsigned uid) { return uid == ::geteuid() || uid == 0; }

bool MayOpen(unsigned uid, const SessionLimits& limits) {
  return IsAdministrator(uid) || std::find(limits.allowed_uids.begin(), limits.allowed_uids.end(),
                                           std::to_string(uid)) != limits.allowed_uids.end();
}

// Returns the tenant of the session; empty: of no tenant.
absl::StatusOr<std::string> TenantOf(const v1::SessionHello& hello, unsigned uid,
                                     const SessionTenants& tenants) {
  if (tenants.table == nullptr) return std::string();
  if (hello.tenant_token().empty()) {
    if (IsAdministrator(uid)) return std::string();
    return tenants.table->Refuse(AuthFailure::kMissing,
                                 "a session needs a tenant's token: tenants.file is set");
  }
  CRUMB_ASSIGN_OR_RETURN(const Caller caller, tenants.table->Authenticate(hello.tenant_token()));
  if (!tenants.shared_memory) {
    return absl::FailedPreconditionError(
        "tenants have no shared memory here: use gRPC with the token, or set "
        "tenants.shared_memory");
  }
  return caller.name();
}

// A name for log lines, whatever the process sent.
std::string Printable(const std::string& name) {
  std::string printable = name.substr(0, kProcessNameBytesMax);
  for (char& c : printable) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return printable.empty() ? "unnamed" : printable;
}

}  // namespace

absl::StatusOr<Hello> ReadHello(int socket, FdMessage& message, const SessionLimits& limits,
                                const SessionTenants& tenants) {
  CRUMB_ASSIGN_OR_RETURN(const PeerCredentials peer, CredentialsOf(socket));
  if (!MayOpen(peer.uid, limits)) {
    return absl::FailedPreconditionError(
        fmt::format("user {} may not open sessions: add it to sessions.allowed_uids", peer.uid));
  }
  v1::SessionHello hello;
  if (!hello.ParseFromString(message.bytes)) {
    return absl::InvalidArgumentError("the first message is no SessionHello");
  }
  if (hello.protocol_version() != kSessionProtocolVersion) {
    return absl::InvalidArgumentError(fmt::format("protocol version {}, crumbd supports {}",
                                                  hello.protocol_version(),
                                                  kSessionProtocolVersion));
  }
  if (message.fds.size() != 1) {
    return absl::InvalidArgumentError(
        fmt::format("a hello carries one pidfd, not {} descriptors", message.fds.size()));
  }
  CRUMB_RETURN_IF_ERROR(CheckPidfd(message.fds.front().get(), peer.pid));
  if (tenants.own_slabs && !hello.slab_grants()) {
    return absl::FailedPreconditionError(
        "tenants.shared_memory is own here, which this client does not know: use a newer one");
  }
  Hello read;
  CRUMB_ASSIGN_OR_RETURN(read.request.tenant, TenantOf(hello, peer.uid, tenants));
  read.request.process_name = Printable(hello.process_name());
  read.request.engine = hello.engine();
  read.request.uid = peer.uid;
  read.request.staging_bytes = hello.staging_bytes();
  read.pool_socket = hello.pool_socket();
  read.call_socket = hello.call_socket();
  read.staging_socket = hello.staging_socket();
  read.pidfd = std::move(message.fds.front());
  message.fds.clear();
  return read;
}

void RefuseHello(int socket, const absl::Status& why) {
  v1::SessionWelcome welcome;
  welcome.set_error(why.ToString());
  // The connection is closed next; a process that does not read learns nothing.
  SendFdMessage(socket, welcome.SerializeAsString(), {}).IgnoreError();
}

absl::Status SendWelcome(const DescriptorSender& send, const Session& session,
                         std::span<const storage::Slab> slabs, uint64_t epoch,
                         uint32_t lease_pages_max, WelcomePools pools, WelcomeCalls calls) {
  std::vector<int> fds;
  v1::SessionWelcome welcome;
  if (const auto staging = session.staging()) {
    welcome.set_staging_bytes(staging->size());
    fds.push_back(staging->fd());
  }
  for (const storage::Slab& slab : slabs) fds.push_back(slab.fd);
  welcome.set_token(std::string(session.token().view()));
  welcome.set_engine(std::string(session.engine().id().view()));
  welcome.set_epoch(epoch);
  welcome.set_slab_grants(session.slabs() != nullptr);
  welcome.set_slab_bytes(slabs.empty() ? 0 : slabs.front().bytes);
  welcome.set_slab_count(static_cast<uint32_t>(slabs.size()));
  welcome.set_lease_pages_max(lease_pages_max);
  welcome.set_device_pools(pools.kept);
  if (pools.socket >= 0) {
    welcome.set_pool_socket(true);
    fds.push_back(pools.socket);
  }
  if (calls.acquires >= 0) {
    welcome.set_call_socket(true);
    fds.push_back(calls.acquires);
  }
  if (calls.staging >= 0) {
    welcome.set_staging_socket(true);
    fds.push_back(calls.staging);
  }
  return send(welcome.SerializeAsString(), fds);
}

std::string OwnerOf(const std::string& tenant, unsigned user) {
  return tenant.empty() ? fmt::format("user {}", user) : "tenant " + tenant;
}

}  // namespace crumb::server
