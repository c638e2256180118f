// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/connection.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/errno_status.h"
#include "common/fd_channel.h"
#include "common/hex.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "crumb/v1/session.pb.h"

namespace crumb::client {
namespace {

constexpr uint32_t kProtocolVersion = 1;
constexpr size_t kTokenBytes = 16;
// upper bound for a plausible welcome; 64 TiB of 1 GiB slabs
constexpr uint32_t kSlabsMax = 1 << 16;

// Receives a message before `deadline`.
absl::StatusOr<FdMessage> ReceiveBefore(int socket, TimePoint deadline) {
  CRUMB_RETURN_IF_ERROR(SetSocketTimeout(socket, deadline - Clock::Real().Now()));
  return ReceiveFdMessage(socket);
}

absl::StatusOr<UniqueFd> OwnPidfd() {
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!fd.valid()) return ErrnoStatus(errno, "pidfd_open of this process");
  return fd;
}

// Checks the size first: a mapping beyond the end of its file would kill the process at the first
// access.
absl::Status CheckSize(int fd, uint64_t size) {
  struct stat status;
  if (::fstat(fd, &status) != 0) return ErrnoStatus(errno, "fstat of shared memory");
  if (status.st_size < 0 || static_cast<uint64_t>(status.st_size) < size) {
    return absl::DataLossError("crumbd announced " + std::to_string(size) +
                               " bytes of shared memory and sent " +
                               std::to_string(status.st_size));
  }
  return absl::OkStatus();
}

absl::StatusOr<Mapping> MapChecked(int fd, uint64_t size, Mapping::Access access) {
  CRUMB_RETURN_IF_ERROR(CheckSize(fd, size));
  return Mapping::Of(fd, size, access);
}

// Number of descriptors that an attempt to connect needs at once: those of one message and the
// sockets.
constexpr rlim_t kDescriptorsToConnect = kFdsPerMessageMax + 16;

// Raises this process's soft limit on descriptors as far as an attempt to connect needs, within the
// hard limit. The limit belongs to the host program, so this happens only after an attempt has
// failed for lack of descriptors. Returns false if the limit cannot be raised.
bool RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = std::min(limit.rlim_max, limit.rlim_cur + kDescriptorsToConnect);
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
  LogWarning("this process may open {} file descriptors, which are used up: the limit is {} now",
             before, limit.rlim_cur);
  return true;
}

absl::Status NoDescriptors(const absl::Status& status) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return absl::ResourceExhaustedError(
      "this process may open " + std::to_string(limit.rlim_cur) +
      " file descriptors (RLIMIT_NOFILE) and has too few left to connect to crumbd: raise the hard "
      "limit (LimitNOFILE= in systemd, ulimit -Hn, --ulimit nofile= of a container) by " +
      std::to_string(kDescriptorsToConnect) + " (" + std::string(status.message()) + ")");
}

}  // namespace

Connection::Connection() : pid_(::getpid()) {}

Connection::~Connection() {
  // gRPC's threads do not exist in a forked child, and closing the channel there would wait for
  // them.
  if (::getpid() != pid_) static_cast<void>(stub_.release());
}

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(const ClientOptions& options) {
  std::shared_ptr<Connection> connection(new Connection());
  const TimePoint deadline = Clock::Real().Now() + options.connect_timeout;
  absl::Status handshake = connection->Handshake(options, deadline);
  if (absl::IsResourceExhausted(handshake) && RaiseDescriptorLimit()) {
    connection.reset(new Connection());
    handshake = connection->Handshake(options, deadline);
  }
  if (absl::IsResourceExhausted(handshake)) return NoDescriptors(handshake);
  CRUMB_RETURN_IF_ERROR(handshake);
  connection->stub_ = RpcStub::Connect("unix:" + options.socket_dir + "/crumbd.sock", options);
  if (!connection->stub_->WaitConnected(deadline)) {
    return absl::DeadlineExceededError("crumbd.sock in " + options.socket_dir +
                                       " does not respond");
  }
  return connection;
}

std::shared_ptr<Connection> Connection::OpenTcp(const ClientOptions& options) {
  std::shared_ptr<Connection> connection(new Connection());
  connection->stub_ = RpcStub::Connect(options.address, options);
  connection->stub_->WaitConnected(Clock::Real().Now() + options.connect_timeout);
  return connection;
}

absl::Status Connection::Handshake(const ClientOptions& options, TimePoint deadline) {
  CRUMB_ASSIGN_OR_RETURN(socket_, ConnectFdChannel(options.socket_dir + "/crumbd.fd.sock",
                                                   deadline - Clock::Real().Now()));
  CRUMB_RETURN_IF_ERROR(SetSocketTimeout(socket_.get(), deadline - Clock::Real().Now()));
  CRUMB_ASSIGN_OR_RETURN(const UniqueFd pidfd, OwnPidfd());
  v1::SessionHello hello;
  hello.set_protocol_version(kProtocolVersion);
  hello.set_process_name(options.process_name);
  hello.set_engine(options.engine);
  hello.set_staging_bytes(options.staging_bytes);
  hello.set_tenant_token(options.token);
  hello.set_slab_grants(true);
  hello.set_pool_socket(true);
  hello.set_call_socket(true);
  hello.set_staging_socket(true);
  const int fds[] = {pidfd.get()};
  CRUMB_RETURN_IF_ERROR(SendFdMessage(socket_.get(), hello.SerializeAsString(), fds));

  CRUMB_ASSIGN_OR_RETURN(FdMessage response, ReceiveBefore(socket_.get(), deadline));
  v1::SessionWelcome welcome;
  if (!welcome.ParseFromString(response.bytes)) {
    return absl::DataLossError("crumbd's response to the hello is not a welcome");
  }
  if (!welcome.error().empty()) {
    return absl::FailedPreconditionError("crumbd refused the session: " + welcome.error());
  }
  if (welcome.token().size() != kTokenBytes || welcome.slab_count() > kSlabsMax) {
    return absl::DataLossError("crumbd's welcome holds impossible values");
  }
  const std::string& token = welcome.token();
  token_ = HexEncode({reinterpret_cast<const uint8_t*>(token.data()), token.size()});
  engine_ = welcome.engine();
  epoch_ = welcome.epoch();
  device_pools_ = welcome.device_pools();
  grants_ = welcome.slab_grants();
  const size_t expected = welcome.slab_count() + (welcome.staging_bytes() > 0 ? 1 : 0) +
                          (welcome.pool_socket() ? 1 : 0) + (welcome.call_socket() ? 1 : 0) +
                          (welcome.staging_socket() ? 1 : 0);
  size_t taken = 0;
  while (true) {
    for (UniqueFd& fd : response.fds) {
      if (taken == expected) return absl::DataLossError("crumbd sent too many descriptors");
      CRUMB_RETURN_IF_ERROR(TakeDescriptor(welcome, taken++, std::move(fd), options));
    }
    if (taken == expected) break;
    CRUMB_ASSIGN_OR_RETURN(response, ReceiveBefore(socket_.get(), deadline));
    if (response.fds.empty()) {
      return absl::DataLossError("crumbd announced " + std::to_string(expected) +
                                 " descriptors and sent " + std::to_string(taken));
    }
  }
  mapped_.staging = staging_.bytes();
  return SetSocketTimeout(socket_.get(), options.connect_timeout);
}

absl::Status Connection::TakeDescriptor(const v1::SessionWelcome& welcome, size_t index,
                                        UniqueFd fd, const ClientOptions& options) {
  const size_t staging = welcome.staging_bytes() > 0 ? 1 : 0;
  if (index < staging) {
    CRUMB_ASSIGN_OR_RETURN(
        staging_, MapChecked(fd.get(), welcome.staging_bytes(), Mapping::Access::kReadWrite));
    return absl::OkStatus();
  }
  const size_t sockets = staging + welcome.slab_count();
  if (index < sockets) {
    CRUMB_ASSIGN_OR_RETURN(Mapping slab,
                           MapChecked(fd.get(), welcome.slab_bytes(), Mapping::Access::kReadOnly));
    slabs_.push_back(std::move(slab));
    mapped_.slabs.emplace_back(slabs_.back().bytes());
    return absl::OkStatus();
  }
  if (welcome.pool_socket() && index == sockets) {
    pool_socket_ = std::move(fd);
    return SetSocketTimeout(pool_socket_.get(), options.connect_timeout);
  }
  const bool acquires = welcome.call_socket() && calls_ == nullptr;
  (acquires ? calls_ : staging_calls_) = std::make_unique<CallSocket>(std::move(fd));
  return absl::OkStatus();
}

absl::StatusOr<PoolExchange> Connection::CallPool(const v1::PoolRequest& request,
                                                  std::span<const int> fds) {
  if (!device_pools_) return absl::FailedPreconditionError("crumbd keeps no device pools");
  MutexLock lock(&pool_call_mutex_);
  if (out_of_step_) return absl::UnavailableError("crumbd's socket for descriptors is out of step");
  out_of_step_ = true;  // reset when the response is complete
  const int socket = pool_socket_.valid() ? pool_socket_.get() : socket_.get();
  const absl::Status sent = SendFdMessage(socket, request.SerializeAsString(), fds);
  if (!sent.ok()) return absl::UnavailableError(sent.message());
  absl::StatusOr<FdMessage> message = ReceiveFdMessage(socket);
  if (!message.ok()) return absl::UnavailableError(message.status().message());
  PoolExchange exchange;
  if (!exchange.response.ParseFromString(message->bytes)) {
    return absl::DataLossError("crumbd's response to a PoolRequest is not a PoolResponse");
  }
  exchange.fds = std::move(message->fds);
  // the response names the handle whose descriptor the caller has
  const bool own = request.has_offer();
  const size_t expected = (exchange.response.roster() ? 1 : 0) +
                          (own ? 0 : static_cast<size_t>(exchange.response.handles_size()));
  while (exchange.fds.size() < expected) {
    message = ReceiveFdMessage(socket);
    if (!message.ok()) return absl::UnavailableError(message.status().message());
    if (message->fds.empty()) return absl::DataLossError("crumbd sent too few descriptors");
    for (UniqueFd& fd : message->fds) exchange.fds.push_back(std::move(fd));
  }
  out_of_step_ = false;
  if (exchange.response.code() != 0) {
    return absl::Status(static_cast<absl::StatusCode>(exchange.response.code()),
                        exchange.response.error());
  }
  return exchange;
}

// Maps the slabs whose descriptors have arrived. crumbd sends a slab before the response that names
// it, so that it is in the socket by now.
void Connection::ReceiveGrants() const {
  pollfd waiting{.fd = socket_.get(), .events = POLLIN, .revents = 0};
  while (::poll(&waiting, 1, 0) == 1) {
    const absl::StatusOr<FdMessage> message = ReceiveFdMessage(socket_.get());
    v1::SlabGrant grant;
    if (!message.ok() || !grant.ParseFromString(message->bytes) || message->fds.size() != 1) return;
    absl::StatusOr<Mapping> slab =
        MapChecked(message->fds[0].get(), grant.bytes(), Mapping::Access::kReadOnly);
    if (slab.ok()) granted_.insert_or_assign(grant.slab(), *std::move(slab));
  }
}

absl::StatusOr<std::span<const std::byte>> Connection::SlabBytes(uint32_t slab,
                                                                 uint64_t offset) const {
  if (grants_) {
    MutexLock lock(&mutex_);
    if (!granted_.contains(slab)) ReceiveGrants();
    const auto found = granted_.find(slab);
    if (found == granted_.end() || offset >= found->second.size()) {
      return absl::DataLossError("a fragment lies in no slab that crumbd sent: slab " +
                                 std::to_string(slab) + ", byte " + std::to_string(offset));
    }
    return std::span<const std::byte>(found->second.bytes()).subspan(offset);
  }
  if (slab >= slabs_.size() || offset >= slabs_[slab].size()) {
    return absl::DataLossError("a fragment lies outside crumbd's slabs: slab " +
                               std::to_string(slab) + ", byte " + std::to_string(offset));
  }
  return std::span<const std::byte>(slabs_[slab].bytes()).subspan(offset);
}

void Connection::ForgetSlab(uint32_t slab) const {
  MutexLock lock(&mutex_);
  if (grants_) {
    ReceiveGrants();  // a slab may have arrived of which no response was read
    granted_.erase(slab);
    return;
  }
  if (slab >= slabs_.size() || mapped_used_) return;
  // The addresses stay reserved, so that other threads find the slab as it was described to them.
  ::mmap(slabs_[slab].data(), slabs_[slab].size(), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mapped_.slabs[slab] = {};
}

const MappedMemory& Connection::mapped() const {
  MutexLock lock(&mutex_);
  mapped_used_ = true;
  return mapped_;
}

absl::StatusOr<std::span<std::byte>> Connection::StagingBytes(uint64_t offset, size_t size) const {
  if (offset > staging_.size() || size > staging_.size() - offset) {
    return absl::DataLossError("reserved room lies outside the staging memory: byte " +
                               std::to_string(offset));
  }
  return staging_.bytes().subspan(offset, size);
}

}  // namespace crumb::client
