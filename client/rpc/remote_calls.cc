// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Acquire, Reserve and Commit of RemoteClient: over a connection's call sockets, or over gRPC if
// the connection has none, another call is in flight there, or the call is too large for it.
// remote_client.cc has the other functions.

#include <algorithm>
#include <utility>
#include <vector>

#include "client/rpc/call_socket.h"
#include "client/rpc/fragment_reader.h"
#include "client/rpc/remote_client.h"
#include "client/rpc/wire.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Returns a lease to crumbd when the last reference goes.
class LeaseHold {
 public:
  LeaseHold(std::shared_ptr<Reconnector> reconnector, std::shared_ptr<Connection> connection,
            uint64_t lease)
      : reconnector_(std::move(reconnector)), connection_(std::move(connection)), lease_(lease) {}
  LeaseHold(const LeaseHold&) = delete;
  LeaseHold& operator=(const LeaseHold&) = delete;
  ~LeaseHold() { reconnector_->ReleaseLater(std::move(connection_), lease_); }

 private:
  const std::shared_ptr<Reconnector> reconnector_;
  std::shared_ptr<Connection> connection_;
  const uint64_t lease_;
};

void FillRequest(const AcquireRequest& request, uint64_t number, v1::AcquireRequest& wire) {
  wire.set_keyspace(ToBytes(request.keyspace));
  wire.set_keys(ToBytes(request.keys));
  wire.set_first_page(request.first_page);
  if (request.first_page > 0) wire.set_run(std::string(request.run.view()));
  if (request.range.has_value()) *wire.mutable_range() = ToWire(*request.range);
  wire.set_wait_ms(request.wait_for_lower_tiers ? WaitMs(request.timeout) : 0);
  wire.set_window_tokens(request.window_tokens);
  wire.set_lease(request.lease);
  for (const PoolId& pool : request.pools) wire.add_pools(pool.ToBytes());
  for (const PoolId& pool : request.peers) wire.add_peers(pool.ToBytes());
  wire.set_device_sums(request.device_sums);
  if (request.peer_sums.has_value()) *wire.mutable_peer_sums() = ToWire(*request.peer_sums);
  wire.set_behind_miss(request.behind_miss);
  wire.set_request(number);
}

// An Acquire over one connection. Its number identifies the request: if its response is lost, the
// reconnector returns the lease that crumbd may have granted. Of the hit pages, those with index
// (page + verify_offset) % verify_every == 0 are verified.
class PendingLease final : public PendingAcquire {
 public:
  // Sends the request.
  PendingLease(const AcquireRequest& request, uint64_t number,
               std::shared_ptr<Reconnector> reconnector, std::shared_ptr<Connection> connection,
               uint32_t verify_offset)
      : request_(request),
        reconnector_(std::move(reconnector)),
        connection_(std::move(connection)),
        verify_offset_(verify_offset),
        number_(number),
        deadline_(Clock::Real().Now() + request_.timeout) {
    v1::AcquireRequest& wire = *socket_call_.mutable_acquire();
    FillRequest(request, number, wire);
    // Checksums of all tiles take megabytes, too many for the call socket.
    const bool small = (wire.peers().empty() || wire.has_peer_sums()) && !wire.device_sums();
    if (small && connection_->calls() != nullptr) {
      call_ = connection_->calls()->Start(socket_call_, deadline_, &response_);
    }
    if (call_ == nullptr) call_ = StartOverGrpc(response_.mutable_acquire());
  }
  ~PendingLease() override {
    if (call_ == nullptr) return;
    call_.reset();
    reconnector_->ForgetLater(connection_, number_);
  }

  bool Ready() override { return call_ == nullptr || call_->Ready(); }
  absl::StatusOr<AcquireResult> Finish() override;

 private:
  std::unique_ptr<PendingCall> StartOverGrpc(v1::AcquireResponse* response) const {
    return connection_->stub().Start({connection_->token(), deadline_}, socket_call_.acquire(),
                                     response);
  }
  absl::Status BringFragments(std::shared_ptr<void>* hold);

  const AcquireRequest request_;
  const std::shared_ptr<Reconnector> reconnector_;
  const std::shared_ptr<Connection> connection_;
  const uint32_t verify_offset_;
  const uint64_t number_;
  const TimePoint deadline_;
  v1::SocketCall socket_call_;
  v1::SocketResponse response_;
  std::unique_ptr<PendingCall> call_;  // null once finished
};

// Fetches the fragments of a lease whose first response had none. This grants the lease a second
// time; `hold` comes to hold both.
absl::Status PendingLease::BringFragments(std::shared_ptr<void>* hold) {
  v1::AcquireResponse& first = *response_.mutable_acquire();
  socket_call_.mutable_acquire()->set_lease(first.lease());
  v1::AcquireResponse joined;
  CRUMB_RETURN_IF_ERROR(StartOverGrpc(&joined)->Finish());
  if (joined.lease() == 0) return absl::UnavailableError("crumbd does not know its lease any more");
  using Holds = std::pair<std::shared_ptr<void>, std::shared_ptr<void>>;
  *hold = std::make_shared<Holds>(
      *hold, std::make_shared<LeaseHold>(reconnector_, connection_, joined.lease()));
  first.mutable_fragments()->Swap(joined.mutable_fragments());
  first.mutable_device_fragments()->Swap(joined.mutable_device_fragments());
  return absl::OkStatus();
}

absl::StatusOr<AcquireResult> PendingLease::Finish() {
  absl::Status status = std::exchange(call_, nullptr)->Finish();
  v1::AcquireResponse& response = *response_.mutable_acquire();
  std::shared_ptr<void> hold;
  if (status.ok() && response.lease() != 0) {
    hold = std::make_shared<LeaseHold>(reconnector_, connection_, response.lease());
  }
  if (status.ok() && response_.fragments_apart()) status = BringFragments(&hold);
  if (absl::IsDeadlineExceeded(status)) reconnector_->Count({.deadline_exceeded = 1});
  if (!status.ok()) {
    // crumbd may have granted a lease, or grant it later.
    reconnector_->ForgetLater(connection_, number_);
    return status;
  }
  const uint32_t every = request_.verify_every;
  ReadFragments read = ReadAcquireResponse(*connection_, request_, response, [&](int page) {
    return every > 0 && (static_cast<uint32_t>(page) + verify_offset_) % every == 0;
  });
  AcquireResult result;
  result.hit_pages = read.hit_pages;
  result.miss_reason = static_cast<MissReason>(response.miss_reason());
  if (read.miss_reason != MissReason::kNone) {
    result.miss_reason = read.miss_reason;
    if (read.miss_reason != MissReason::kGeneration) reconnector_->Count({.verify_failures = 1});
  }
  const int reported = std::min(result.hit_pages, response.page_tiers_size());
  result.page_tiers.reserve(static_cast<size_t>(result.hit_pages));
  for (int page = 0; page < reported; ++page) {
    result.page_tiers.push_back(static_cast<Tier>(response.page_tiers(page)));
  }
  result.page_tiers.resize(result.hit_pages, Tier::kUnknown);
  if (result.hit_pages > 0 && hold != nullptr) {
    result.lease = std::make_shared<const Lease>(
        std::move(read.fragments), std::move(read.device_fragments), std::move(read.device_store),
        connection_->epoch(), std::move(hold));
    result.lease_id = response.lease();
  } else {
    result.hit_pages = 0;
    result.page_tiers.clear();
  }
  return result;
}

// The result of a request that could not be sent.
class FailedAcquire final : public PendingAcquire {
 public:
  explicit FailedAcquire(absl::Status status) : status_(std::move(status)) {}
  absl::StatusOr<AcquireResult> Finish() override { return status_; }

 private:
  const absl::Status status_;
};

// Returns a staging slot to crumbd unless it was committed.
class StagingHold {
 public:
  StagingHold(std::shared_ptr<Reconnector> reconnector, std::shared_ptr<Connection> connection,
              uint64_t offset, uint64_t reserve)
      : reconnector_(std::move(reconnector)),
        connection_(std::move(connection)),
        offset_(offset),
        reserve_(reserve) {}
  StagingHold(const StagingHold&) = delete;
  StagingHold& operator=(const StagingHold&) = delete;
  ~StagingHold() {
    if (!committed_) reconnector_->AbortLater(std::move(connection_), offset_, reserve_);
  }

  const Connection* connection() const { return connection_.get(); }
  uint64_t reserve() const { return reserve_; }
  void NoteCommitted() { committed_ = true; }

 private:
  const std::shared_ptr<Reconnector> reconnector_;
  std::shared_ptr<Connection> connection_;
  const uint64_t offset_;
  const uint64_t reserve_;  // number of the Reserve
  bool committed_ = false;
};

StagingHold& HoldOf(const StagingSlot& slot) {
  return *static_cast<StagingHold*>(slot.hold().get());
}

// A Commit over one connection.
class RemoteCommit final : public PendingCommit {
 public:
  // Sends the request. `note_mark` is called with the flush mark of the response, on the thread
  // that finishes the call.
  RemoteCommit(v1::SocketCall socket_call, TimePoint deadline, std::vector<StagingSlot> slots,
               std::shared_ptr<Connection> connection, std::function<void(uint64_t)> note_mark)
      : slots_(std::move(slots)),
        connection_(std::move(connection)),
        note_mark_(std::move(note_mark)) {
    if (CallSocket* const calls = connection_->staging_calls(); calls != nullptr) {
      call_ = calls->Start(socket_call, deadline, &response_);
    }
    over_socket_ = call_ != nullptr;
    if (over_socket_) return;
    call_ = connection_->stub().Start({connection_->token(), deadline}, socket_call.commit(),
                                      response_.mutable_commit());
  }
  ~RemoteCommit() override {
    if (call_ != nullptr && over_socket_) NoteCommitted();
  }

  absl::StatusOr<std::vector<CommitOutcome>> Finish() override {
    const absl::Status status = std::exchange(call_, nullptr)->Finish();
    // crumbd serves a Commit that it has received over the socket, and frees the room. An Abort
    // could only overtake the Commit and prevent that.
    if (status.ok() || (over_socket_ && absl::IsDeadlineExceeded(status))) NoteCommitted();
    CRUMB_RETURN_IF_ERROR(status);
    note_mark_(response_.commit().flush_mark());
    return OutcomesOf(response_.commit().outcomes(), slots_.size());
  }

 private:
  void NoteCommitted() {
    for (const StagingSlot& slot : slots_) HoldOf(slot).NoteCommitted();
  }

  const std::vector<StagingSlot> slots_;
  const std::shared_ptr<Connection> connection_;
  const std::function<void(uint64_t)> note_mark_;
  v1::SocketResponse response_;
  bool over_socket_ = false;
  std::unique_ptr<PendingCall> call_;  // null once finished
};

// Whether crumbd may have granted room to a Reserve that ended with this status.
bool MayHaveReserved(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) ||
         absl::IsUnavailable(status) || absl::IsUnknown(status);
}

}  // namespace

std::unique_ptr<PendingAcquire> RemoteClient::StartAcquire(const AcquireRequest& request) {
  Link& link = CurrentLink();
  absl::StatusOr<std::shared_ptr<Connection>> connection = Connected();
  if (!connection.ok()) return std::make_unique<FailedAcquire>(connection.status());
  if (link.reconnector == nullptr) {
    return std::make_unique<FailedAcquire>(
        absl::FailedPreconditionError("Acquire needs shared memory, not " + options_.address));
  }
  if (request.lease_epoch != 0 && request.lease_epoch != (*connection)->epoch()) {
    return std::make_unique<FailedAcquire>(
        absl::AbortedError("the lease was given by a crumbd that has ended: acquire again"));
  }
  return std::make_unique<PendingLease>(request, last_request_.fetch_add(1) + 1, link.reconnector,
                                        *std::move(connection),
                                        verify_offset_.fetch_add(1, std::memory_order_relaxed));
}

// The reconnector gives back the room of slots that are not committed, and room that crumbd grants
// after `timeout`.
absl::StatusOr<std::vector<StagingSlot>> RemoteClient::Reserve(int count, size_t fragment_bytes,
                                                               const PendingPages& pending,
                                                               Duration timeout) {
  Link& link = CurrentLink();
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connected());
  if (link.reconnector == nullptr) {
    return absl::FailedPreconditionError("Reserve needs shared memory, not " + options_.address);
  }
  const uint64_t number = last_request_.fetch_add(1) + 1;
  const TimePoint deadline = Clock::Real().Now() + timeout;
  v1::SocketCall socket_call;
  v1::ReserveRequest& request = *socket_call.mutable_reserve();
  request.set_count(static_cast<uint32_t>(count));
  request.set_fragment_bytes(fragment_bytes);
  request.set_request(number);
  if (!pending.keys.empty()) {
    request.set_keyspace(ToBytes(pending.keyspace));
    request.set_keys(ToBytes(pending.keys));
  }
  v1::SocketResponse response;
  CallSocket* const calls = connection->staging_calls();
  std::unique_ptr<PendingCall> call;
  if (calls != nullptr) call = calls->Start(socket_call, deadline, &response);
  const absl::Status reserved = call != nullptr
                                    ? call->Finish()
                                    : connection->stub().Call({connection->token(), deadline},
                                                              request, response.mutable_reserve());
  if (MayHaveReserved(reserved)) link.reconnector->GiveUpReserveLater(connection, number);
  CRUMB_RETURN_IF_ERROR(reserved);
  std::vector<StagingSlot> slots;
  for (const uint64_t offset : response.reserve().offsets()) {
    auto hold = std::make_shared<StagingHold>(link.reconnector, connection, offset, number);
    CRUMB_ASSIGN_OR_RETURN(const std::span<std::byte> bytes,
                           connection->StagingBytes(offset, fragment_bytes));
    slots.emplace_back(bytes, offset, std::move(hold));
  }
  return slots;
}

std::unique_ptr<PendingCommit> RemoteClient::StartCommit(const KeyspaceId& keyspace,
                                                         std::vector<StagingSlot> slots,
                                                         size_t tiles_bytes, Duration timeout) {
  if (slots.empty()) return std::make_unique<FinishedCommit>(std::vector<CommitOutcome>());
  absl::StatusOr<std::shared_ptr<Connection>> connection = Connected();
  if (!connection.ok()) return std::make_unique<FinishedCommit>(connection.status());
  v1::SocketCall socket_call;
  v1::CommitRequest& request = *socket_call.mutable_commit();
  request.set_keyspace(ToBytes(keyspace));
  for (const StagingSlot& slot : slots) {
    if (HoldOf(slot).connection() != connection->get()) {
      return std::make_unique<FinishedCommit>(
          absl::AbortedError("the connection that staged these fragments was lost"));
    }
    request.add_offsets(slot.offset());
    request.add_reserves(HoldOf(slot).reserve());
    request.add_header_offsets(static_cast<uint32_t>(tiles_bytes));
  }
  return std::make_unique<RemoteCommit>(std::move(socket_call), Clock::Real().Now() + timeout,
                                        std::move(slots), *std::move(connection),
                                        [this](uint64_t mark) { NoteMark(mark); });
}

}  // namespace crumb::client
