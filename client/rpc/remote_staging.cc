// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/remote_staging.h"

#include <utility>

#include "client/rpc/call_socket.h"
#include "client/rpc/wire.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Returns a staging slot to crumbd unless it was committed.
class StagingHold {
 public:
  StagingHold(std::shared_ptr<ConnectionKeeper> keeper, std::shared_ptr<Connection> connection,
              uint64_t offset, uint64_t reserve)
      : keeper_(std::move(keeper)),
        connection_(std::move(connection)),
        offset_(offset),
        reserve_(reserve) {}
  StagingHold(const StagingHold&) = delete;
  StagingHold& operator=(const StagingHold&) = delete;
  ~StagingHold() {
    if (!committed_) keeper_->AbortLater(std::move(connection_), offset_, reserve_);
  }

  const Connection* connection() const { return connection_.get(); }
  uint64_t reserve() const { return reserve_; }
  void NoteCommitted() { committed_ = true; }

 private:
  const std::shared_ptr<ConnectionKeeper> keeper_;
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
  RemoteCommit(std::vector<StagingSlot> slots, std::shared_ptr<Connection> connection,
               std::function<void(uint64_t)> note_mark)
      : slots_(std::move(slots)),
        connection_(std::move(connection)),
        note_mark_(std::move(note_mark)) {}
  ~RemoteCommit() override {
    if (call_ != nullptr && over_socket_) NoteCommitted();
  }

  void Send(const v1::CommitRequest& request, TimePoint deadline) {
    if (CallSocket* const calls = connection_->staging_calls(); calls != nullptr) {
      call_ = calls->Start(request, deadline, &response_);
    }
    over_socket_ = call_ != nullptr;
    if (over_socket_) return;
    call_ = connection_->stub().Start({connection_->token(), deadline}, request, &response_);
  }

  absl::StatusOr<std::vector<CommitOutcome>> Finish() override {
    const absl::Status status = std::exchange(call_, nullptr)->Finish();
    // crumbd serves what it has received over the socket and frees the room. An Abort could only
    // come before and prevent that.
    if (status.ok() || (over_socket_ && absl::IsDeadlineExceeded(status))) NoteCommitted();
    CRUMB_RETURN_IF_ERROR(status);
    note_mark_(response_.flush_mark());
    return OutcomesOf(response_.outcomes(), slots_.size());
  }

 private:
  void NoteCommitted() {
    for (const StagingSlot& slot : slots_) HoldOf(slot).NoteCommitted();
  }

  const std::vector<StagingSlot> slots_;
  const std::shared_ptr<Connection> connection_;
  const std::function<void(uint64_t)> note_mark_;
  v1::CommitResponse response_;
  bool over_socket_ = false;
  std::unique_ptr<PendingCall> call_;  // null once finished
};

// Whether crumbd may have granted room to a Reserve that ended with this status.
bool MayHaveReserved(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) ||
         absl::IsUnavailable(status) || absl::IsUnknown(status);
}

}  // namespace

absl::StatusOr<std::vector<StagingSlot>> ReserveRemote(
    int count, size_t fragment_bytes, const PendingPages& pending, uint64_t number,
    TimePoint deadline, const std::shared_ptr<ConnectionKeeper>& keeper,
    const std::shared_ptr<Connection>& connection) {
  v1::ReserveRequest request;
  request.set_count(static_cast<uint32_t>(count));
  request.set_fragment_bytes(fragment_bytes);
  request.set_request(number);
  if (!pending.keys.empty()) {
    request.set_keyspace(ToBytes(pending.keyspace));
    request.set_keys(ToBytes(pending.keys));
  }
  v1::ReserveResponse response;
  CallSocket* const calls = connection->staging_calls();
  std::unique_ptr<PendingCall> call;
  if (calls != nullptr) call = calls->Start(request, deadline, &response);
  const absl::Status reserved =
      call != nullptr
          ? call->Finish()
          : connection->stub().Call({connection->token(), deadline}, request, &response);
  if (MayHaveReserved(reserved)) keeper->GiveUpReserveLater(connection, number);
  CRUMB_RETURN_IF_ERROR(reserved);
  std::vector<StagingSlot> slots;
  for (const uint64_t offset : response.offsets()) {
    auto hold = std::make_shared<StagingHold>(keeper, connection, offset, number);
    CRUMB_ASSIGN_OR_RETURN(const std::span<std::byte> bytes,
                           connection->StagingBytes(offset, fragment_bytes));
    slots.emplace_back(bytes, offset, std::move(hold));
  }
  return slots;
}

std::unique_ptr<PendingCommit> StartRemoteCommit(const KeyspaceId& keyspace,
                                                 std::vector<StagingSlot> slots, size_t tiles_bytes,
                                                 TimePoint deadline,
                                                 std::shared_ptr<Connection> connection,
                                                 std::function<void(uint64_t)> note_mark) {
  v1::CommitRequest request;
  request.set_keyspace(ToBytes(keyspace));
  for (const StagingSlot& slot : slots) {
    if (HoldOf(slot).connection() != connection.get()) {
      return std::make_unique<FinishedCommit>(
          absl::AbortedError("the connection that staged these fragments was lost"));
    }
    request.add_offsets(slot.offset());
    request.add_reserves(HoldOf(slot).reserve());
    request.add_header_offsets(static_cast<uint32_t>(tiles_bytes));
  }
  auto pending =
      std::make_unique<RemoteCommit>(std::move(slots), std::move(connection), std::move(note_mark));
  pending->Send(request, deadline);
  return pending;
}

}  // namespace crumb::client
