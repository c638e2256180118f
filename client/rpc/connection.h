// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "client/rpc/call_socket.h"
#include "client/rpc/rpc_stub.h"
#include "common/clock.h"
#include "common/mapping.h"
#include "common/mutex.h"
#include "common/unique_fd.h"
#include "crumb/client_options.h"
#include "crumb/staging.h"
#include "crumb/v1/session.pb.h"

namespace crumb::client {

// crumbd's answer to a PoolRequest.
struct PoolExchange {
  v1::PoolAnswer answer;
  std::vector<UniqueFd> fds;
};

// One session with one life of crumbd: its token, its memory and the channel to it. Stays usable
// for reading when crumbd is gone. Thread-safe. In a forked child it must not be used, only
// destroyed.
class Connection {
 public:
  // Opens a session at the socket folder and maps the memory that crumbd sends. kUnavailable or
  // kNotFound: no process listens there; kFailedPrecondition: crumbd refused; kDeadlineExceeded.
  // Blocks up to connect_timeout for all steps together, and even if crumbd accepts no connection.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const ClientOptions& options);

  // Without session and memory. Waits up to connect_timeout for the first connection.
  static std::shared_ptr<Connection> OpenTcp(const ClientOptions& options);

  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  RpcStub& stub() const { return *stub_; }
  // Null: questions go over gRPC.
  CallSocket* calls() const { return calls_.get(); }
  const std::string& token() const { return token_; }  // hexadecimal; empty over TCP
  const std::string& engine() const { return engine_; }
  uint64_t epoch() const { return epoch_; }

  // For who pins it: from the first call on nothing of it is let go before the connection is.
  const MappedMemory& mapped() const;
  // Asks about device pools; `fds` stay the caller's. Blocks up to connect_timeout, and while
  // others ask. Errors are crumbd's; kFailedPrecondition: it has no device pools; kUnavailable: the
  // connection is broken.
  absl::StatusOr<PoolExchange> CallPool(const v1::PoolRequest& request, std::span<const int> fds);

  // kDataLoss: outside the slabs. Valid under a lease that names the slab.
  absl::StatusOr<std::span<const std::byte>> SlabBytes(uint32_t slab, uint64_t offset) const;
  // Lets the memory of a slab go that crumbd says holds nothing any more, under no lease of this
  // session; not when it may be pinned.
  void ForgetSlab(uint32_t slab) const;
  // `size` bytes at `offset` of the staging memory. kDataLoss: outside.
  absl::StatusOr<std::span<std::byte>> StagingBytes(uint64_t offset, size_t size) const;

 private:
  Connection();
  absl::Status Handshake(const ClientOptions& options, TimePoint deadline);
  // Takes the `index`th descriptor of those that crumbd sends for `welcome`, in the order of
  // SessionWelcome. Memory is mapped and its descriptor closed at once.
  absl::Status TakeDescriptor(const v1::SessionWelcome& welcome, size_t index, UniqueFd fd,
                              const ClientOptions& options);
  void ReceiveGrants() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const pid_t pid_;
  bool device_pools_ = false;
  Mutex pool_call_mutex_;
  bool out_of_step_ ABSL_GUARDED_BY(pool_call_mutex_) =
      false;              // question and answer may be out of step
  UniqueFd socket_;       // crumbd ends the session when it is closed and no lease is left
  UniqueFd pool_socket_;  // for questions about pools; none: `socket_`
  std::string token_;
  std::string engine_;
  uint64_t epoch_ = 0;
  Mapping staging_;
  std::vector<Mapping> slabs_;  // all of them, unless they are granted one by one
  bool grants_ = false;
  mutable Mutex mutex_;
  mutable bool mapped_used_ ABSL_GUARDED_BY(mutex_) = false;
  mutable MappedMemory mapped_;  // changes, with the lock, until it is used; no granted slabs
  mutable std::unordered_map<uint32_t, Mapping> granted_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<RpcStub> stub_;
  std::unique_ptr<CallSocket> calls_;
};

}  // namespace crumb::client
