// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/fragment_header.h"
#include "common/mapping.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "common/unique_fd.h"
#include "crumb/v1/cache_service.grpc.pb.h"
#include "crumb/v1/call_socket.pb.h"

namespace crumb::client {

// FakeCrumbd serves crumbd's two sockets from memory of this process, with faults on request:
// enough to test a client. It never evicts. Thread-safe.
class FakeCrumbd final : public v1::CacheService::Service {
 public:
  struct Page {
    uint64_t offset = 0;  // bytes from the slab's beginning
    uint32_t tiles_bytes = 0;
    FragmentHeader header;
  };
  using PageId = std::pair<KeyspaceId, PageKey>;

  // Serves `dir`/crumbd.sock and `dir`/crumbd.fd.sock until it is destroyed.
  static std::unique_ptr<FakeCrumbd> Start(const std::string& dir, uint64_t epoch);
  ~FakeCrumbd() override;

  // Faults, which may be set at any time.
  std::atomic<bool> block_acquire{false};  // Acquire returns when this ends, or the call does
  std::atomic<bool> block_commit{false};
  std::atomic<bool> block_reserve{false};  // over gRPC, whether its caller waits or not
  std::atomic<bool> block_abort{false};
  std::atomic<bool> refuse_commits{false};
  std::atomic<bool> no_staging_room{false};
  std::atomic<bool> refuse_hello{false};
  // Sessions opened from now on get sockets for Acquires, and for Reserves and Commits.
  std::atomic<bool> call_sockets{false};
  std::atomic<bool> staging_sockets{false};
  std::atomic<bool> fragments_apart{false};  // responses on call sockets have no fragments
  std::atomic<bool> claim_coverage{false};   // pages hit although fragments are missing
  std::atomic<bool> bf16_only{false};        // state of keyspaces opened from now on
  std::atomic<uint64_t> generation{1};       // generation of keyspaces opened from now on
  std::atomic<v1::Tier> tier{v1::TIER_HOST};

  // The first fragment of every page, and all fragments of one page.
  std::map<PageId, Page> pages() const;
  std::vector<Page> fragments(const PageId& id) const;
  void Drop(const PageId& id);
  // The bytes of a page in the slab, tiles and header, for tests to read or to damage.
  std::span<std::byte> Bytes(const Page& page) const;
  // Returns each of the two pages in place of the other.
  void Swap(const PageId& a, const PageId& b);

  // Returns `page` for `id` from now on.
  void Place(const PageId& id, const Page& page);
  // Makes every Acquire return, under a lease, that its pages lie on devices as in `fragments`;
  // with 0 pages it stops doing so.
  void PlaceOnDevices(uint32_t pages, const v1::DeviceFragments& fragments);

  size_t leases() const;
  size_t reservations() const;
  size_t sessions() const;  // sessions with an open socket
  uint64_t acquires() const { return acquires_.load(); }
  uint64_t socket_calls() const { return socket_calls_.load(); }    // Acquires over call sockets
  uint64_t staging_calls() const { return staging_calls_.load(); }  // over staging sockets
  uint64_t reserves() const { return reserves_.load(); }            // served
  uint64_t aborts() const { return aborts_.load(); }                // served
  // Acquires that named a lease and were granted it
  uint64_t joins() const { return joins_.load(); }
  v1::SessionRequest::Counters counters() const;
  size_t quality_samples() const;  // number reported so far
  std::set<uint32_t> quality_layers() const;
  std::string state_reason() const;  // reason of the last SetKeyspaceState
  void PushState(const KeyspaceId& keyspace, v1::KeyspaceState state);
  // Ends the session streams only.
  void BreakStreams();

 private:
  struct Room {
    UniqueFd socket;
    std::string engine;
    Mapping staging;
    struct Reserved {
      uint64_t bytes = 0;
      uint64_t request = 0;
    };
    std::map<uint64_t, Reserved> rooms;  // keyed by offset
    std::set<uint64_t> given_up;         // numbers of Reserves
  };
  struct Lease {
    std::string engine;
    std::vector<PageId> pages;
    int holders = 1;
  };
  using Context = grpc::ServerContext;

  FakeCrumbd(std::string dir, uint64_t epoch) : dir_(std::move(dir)), epoch_(epoch) {}
  absl::Status Listen();
  void Accept();
  absl::Status Welcome(UniqueFd socket);
  // Returns the process's end of a new socket for calls, and adds the other one to calls_.
  absl::StatusOr<UniqueFd> OpenCalls();
  // Serves one of a session's sockets for calls until it is closed.
  void RespondToCalls(const std::string& session, int socket);
  void RespondToAcquire(const std::string& session, const v1::AcquireRequest& request,
                        v1::SocketResponse* response);
  void ReserveLocked(Room& room, const v1::ReserveRequest& request, v1::ReserveResponse* response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CommitLocked(Room& room, const v1::CommitRequest& request, v1::CommitResponse* response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AcquireLocked(const Room& room, const v1::AcquireRequest& request,
                     v1::AcquireResponse* response) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Room* Find(Context* context) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::CommitOutcome CommitOne(Room& room, uint64_t offset, uint32_t tiles_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds leading pages that cover the range to the response; returns false at the first that does
  // not.
  bool AddPageTo(const PageId& id, const v1::AcquireRequest& request, v1::AcquireResponse* response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Join(const Room& room, const v1::AcquireRequest& request, v1::AcquireResponse* response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseOne(uint64_t lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WaitWhile(const std::atomic<bool>& blocked, Context* context);

  grpc::Status OpenKeyspace(Context*, const v1::OpenKeyspaceRequest*,
                            v1::OpenKeyspaceResponse*) override;
  // Sets bf16_only, which holds for all keyspaces; informs no session.
  grpc::Status SetKeyspaceState(Context*, const v1::SetKeyspaceStateRequest*,
                                v1::SetKeyspaceStateResponse*) override;
  grpc::Status Acquire(Context*, const v1::AcquireRequest*, v1::AcquireResponse*) override;
  grpc::Status Release(Context*, const v1::ReleaseRequest*, v1::ReleaseResponse*) override;
  grpc::Status Reserve(Context*, const v1::ReserveRequest*, v1::ReserveResponse*) override;
  grpc::Status Commit(Context*, const v1::CommitRequest*, v1::CommitResponse*) override;
  grpc::Status Abort(Context*, const v1::AbortRequest*, v1::AbortResponse*) override;
  grpc::Status Get(Context*, const v1::GetRequest*, grpc::ServerWriter<v1::GetResponse>*) override;
  grpc::Status Put(Context*, grpc::ServerReader<v1::PutRequest>*, v1::PutResponse*) override;
  grpc::Status Session(Context*,
                       grpc::ServerReaderWriter<v1::SessionResponse, v1::SessionRequest>*) override;

  const std::string dir_;
  const uint64_t epoch_;
  UniqueFd listener_;
  UniqueFd slab_fd_;
  Mapping slab_;
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> acquires_{0};
  std::atomic<uint64_t> joins_{0};
  std::atomic<uint64_t> socket_calls_{0};
  std::atomic<uint64_t> staging_calls_{0};
  std::atomic<uint64_t> reserves_{0};
  std::atomic<uint64_t> aborts_{0};

  mutable Mutex mutex_;
  CondVar changed_;
  uint64_t slab_used_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<PageId, std::vector<Page>> pages_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Room> sessions_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Lease> leases_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, uint64_t> lease_of_request_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> forgotten_ ABSL_GUARDED_BY(mutex_);  // requests that have no response yet
  v1::SessionRequest::Counters counters_ ABSL_GUARDED_BY(mutex_);
  size_t quality_samples_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<uint32_t> quality_layers_ ABSL_GUARDED_BY(mutex_);
  std::string state_reason_ ABSL_GUARDED_BY(mutex_);
  uint32_t device_pages_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::DeviceFragments device_fragments_ ABSL_GUARDED_BY(mutex_);
  std::set<grpc::ServerReaderWriter<v1::SessionResponse, v1::SessionRequest>*> streams_
      ABSL_GUARDED_BY(mutex_);
  std::set<Context*> stream_contexts_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<grpc::Server> server_;
  std::vector<UniqueFd> calls_;       // used by the accepting thread until it ends
  std::vector<Thread> call_threads_;  // used by the accepting thread until it ends
  Thread accept_thread_;
};

}  // namespace crumb::client
