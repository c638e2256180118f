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

// The response to a PoolRequest, with the descriptors that crumbd sent along.
struct PoolExchange {
  v1::PoolResponse response;
  std::vector<UniqueFd> fds;
};

// Connection is one session with one process of crumbd: its token, its shared memory and its
// channels. It stays usable for reading after crumbd has died. Thread-safe. A forked child may only
// destroy it.
//
// The handshake over crumbd.fd.sock:
//     process                                    crumbd
//     SessionHello, a pidfd of this process -->
//                               <-- SessionWelcome: token, epoch, sizes
//                               <-- descriptors: staging memory, slabs, sockets for calls
//
// Leases and slots hold the connection by shared_ptr, so that their memory stays mapped as long as
// one of them exists. A new connection is another object with mappings of its own.
//
// Locks: mutex_ guards the slabs that crumbd grants one by one; pool_call_mutex_ is held during a
// whole pool request, because its response has no number.
class Connection {
 public:
  // Opens a session at the socket folder and maps the memory that crumbd sends. Blocks up to
  // connect_timeout for all steps together, even if crumbd accepts no connection. kUnavailable,
  // kNotFound: no process listens there; kFailedPrecondition: crumbd refused; kDeadlineExceeded: it
  // took too long.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const ClientOptions& options);

  // Opens a channel over TCP, without session and memory. Blocks up to connect_timeout for it.
  // Never fails: gRPC goes on connecting in the background.
  static std::shared_ptr<Connection> OpenTcp(const ClientOptions& options);

  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection();

  RpcStub& stub() const { return *stub_; }
  // The sockets for Acquire and for Reserve and Commit; null if these calls have to use gRPC.
  CallSocket* calls() const { return calls_.get(); }
  CallSocket* staging_calls() const { return staging_calls_.get(); }
  const std::string& token() const { return token_; }  // hexadecimal; empty over TCP
  const std::string& engine() const { return engine_; }
  uint64_t epoch() const { return epoch_; }

  // Returns the mapped memory for callers that pin it: after the first call all of it stays mapped
  // until the connection is destroyed.
  const MappedMemory& mapped() const;
  // Sends a request about device pools and receives the response. `fds` stay the caller's. Blocks
  // up to connect_timeout, and longer while other threads call. Returns crumbd's errors;
  // kFailedPrecondition: crumbd has no device pools; kUnavailable: the connection is broken.
  absl::StatusOr<PoolExchange> CallPool(const v1::PoolRequest& request, std::span<const int> fds);

  // Returns the bytes of a slab from `offset` on; valid under a lease that names the slab.
  // kDataLoss: outside the slabs. Maps a slab at its first use, if crumbd grants slabs one by one.
  absl::StatusOr<std::span<const std::byte>> SlabBytes(uint32_t slab, uint64_t offset) const;
  // Releases the memory of a slab that crumbd has reported empty and that no lease of this session
  // uses. Does nothing if the memory may be pinned.
  void ForgetSlab(uint32_t slab) const;
  // Returns `size` bytes at `offset` of the staging memory. kDataLoss: outside of it.
  absl::StatusOr<std::span<std::byte>> StagingBytes(uint64_t offset, size_t size) const;

 private:
  Connection();
  absl::Status Handshake(const ClientOptions& options, TimePoint deadline);
  // Takes over the `index`th descriptor that belongs to `welcome`, in the order of SessionWelcome.
  // Memory is mapped and its descriptor closed at once.
  absl::Status TakeDescriptor(const v1::SessionWelcome& welcome, size_t index, UniqueFd fd,
                              const ClientOptions& options);
  void ReceiveGrants() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const pid_t pid_;
  bool device_pools_ = false;
  Mutex pool_call_mutex_;
  // A pool request lacks its complete response.
  bool out_of_step_ ABSL_GUARDED_BY(pool_call_mutex_) = false;
  UniqueFd socket_;       // crumbd ends the session when it is closed and no lease is left
  UniqueFd pool_socket_;  // carries pool requests; if invalid, `socket_` does
  std::string token_;
  std::string engine_;
  uint64_t epoch_ = 0;
  Mapping staging_;
  std::vector<Mapping> slabs_;  // all slabs, unless crumbd grants them one by one
  bool grants_ = false;
  mutable Mutex mutex_;
  mutable bool mapped_used_ ABSL_GUARDED_BY(mutex_) = false;
  mutable MappedMemory mapped_;  // excludes granted slabs; fixed after mapped_used_
  mutable std::unordered_map<uint32_t, Mapping> granted_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<RpcStub> stub_;
  std::unique_ptr<CallSocket> calls_;
  std::unique_ptr<CallSocket> staging_calls_;
};

}  // namespace crumb::client
