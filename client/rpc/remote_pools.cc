// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/remote_pools.h"

#include <atomic>
#include <utility>

#include "client/rpc/wire.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Bytes and slots of one ClaimSlots call; well within gRPC's bound of 4 MiB per message.
constexpr size_t kClaimBytesMax = 1 << 20;
constexpr size_t kClaimsMax = 1024;

// Returns the number of a Reserve, unique in this process. A session that joins a pool again is the
// same member to crumbd, which would respond to a repeated number with slots that are in use.
uint64_t NewReserveNumber() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1) + 1;
}

std::string Encoded(const FragmentHeader& header) {
  std::string bytes(FragmentHeaderBytes(header.range.tiles()), '\0');
  EncodeFragmentHeader(header, std::as_writable_bytes(std::span(bytes.data(), bytes.size())));
  return bytes;
}

absl::Status CheckTiles(const FragmentHeader& header) {
  if (static_cast<int>(header.tile_sums.size()) == header.range.tiles()) return absl::OkStatus();
  return absl::InvalidArgumentError("a fragment's header has not one sum for each tile");
}

v1::PoolRequest JoinMessage(const PoolName& name, const PoolId& known) {
  v1::PoolRequest message;
  v1::PoolRequest::Join& join = *message.mutable_join();
  join.set_device(name.device.ToBytes());
  join.set_slot_bytes(name.slot_bytes);
  join.set_handle_bytes(name.handle_bytes);
  if (known != PoolId()) join.set_pool(known.ToBytes());
  return message;
}

// Combines the response's handle numbers with `fds`, the descriptors behind the roster's.
absl::StatusOr<std::vector<PoolHandle>> HandlesOf(const v1::PoolResponse& response,
                                                  std::span<UniqueFd> fds) {
  if (fds.size() != static_cast<size_t>(response.handles_size())) {
    return absl::DataLossError("crumbd announced " + std::to_string(response.handles_size()) +
                               " handles and sent " + std::to_string(fds.size()));
  }
  std::vector<PoolHandle> handles;
  for (int i = 0; i < response.handles_size(); ++i) {
    handles.push_back({response.handles(i), std::move(fds[static_cast<size_t>(i)])});
  }
  return handles;
}

class RemotePoolSession final : public PoolSession {
 public:
  RemotePoolSession(std::shared_ptr<Reconnector> reconnector,
                    std::shared_ptr<Connection> connection, const PoolName& name, const PoolId& id,
                    std::vector<PoolHandle> handles, Duration timeout)
      : reconnector_(std::move(reconnector)),
        connection_(std::move(connection)),
        name_(name),
        id_(id),
        handles_(std::move(handles)),
        timeout_(timeout) {}

  const PoolId& id() const override { return id_; }
  uint64_t epoch() const override { return connection_->epoch(); }
  const std::string& holder() const override { return connection_->token(); }
  bool connected() const override { return reconnector_->current() == connection_; }

  absl::StatusOr<std::vector<PoolHandle>> Handles(uint32_t first) override {
    v1::PoolRequest request;
    request.mutable_fetch()->set_pool(id_.ToBytes());
    request.mutable_fetch()->set_first(first);
    CRUMB_ASSIGN_OR_RETURN(PoolExchange exchange, connection_->CallPool(request, {}));
    return HandlesOf(exchange.response, exchange.fds);
  }

  absl::StatusOr<uint32_t> Offer(int fd, uint64_t bytes_max) override {
    v1::PoolRequest request;
    request.mutable_offer()->set_bytes_max(bytes_max);
    return Offer(fd, std::move(request));
  }

  absl::Status OfferAgain(int fd, uint32_t number) override {
    v1::PoolRequest request;
    request.mutable_offer()->set_number(number);
    return Offer(fd, std::move(request)).status();
  }

  absl::StatusOr<std::vector<bool>> Claim(const KeyspaceId& keyspace,
                                          std::span<const SlotClaim> claims) override {
    std::vector<bool> claimed;
    while (claimed.size() < claims.size()) {
      v1::ClaimSlotsRequest request;
      request.set_pool(id_.ToBytes());
      if (keyspace != KeyspaceId()) request.set_keyspace(ToBytes(keyspace));  // else blank slots
      size_t bytes = 0;
      for (const SlotClaim& claim : claims.subspan(claimed.size())) {
        const bool whole = claim.header.has_value() && CheckTiles(*claim.header).ok();
        request.add_slots(claim.slot);
        request.add_headers(whole ? Encoded(*claim.header) : std::string());
        bytes += request.headers(request.headers_size() - 1).size();
        if (bytes >= kClaimBytesMax || request.slots_size() >= static_cast<int>(kClaimsMax)) break;
      }
      v1::ClaimSlotsResponse response;
      CRUMB_RETURN_IF_ERROR(Call(request, &response, timeout_));
      if (response.claimed_size() != request.slots_size()) {
        return absl::DataLossError("crumbd returned a wrong number of claims");
      }
      claimed.insert(claimed.end(), response.claimed().begin(), response.claimed().end());
    }
    return claimed;
  }

  // Sent over this connection, because another crumbd does not know the slots that were claimed
  // here.
  absl::Status ReportMark(uint64_t mark) override {
    v1::PoolRequest message = JoinMessage(name_, id_);
    message.mutable_join()->set_roster_mark(mark);
    return connection_->CallPool(message, {}).status();
  }

  absl::StatusOr<std::vector<uint64_t>> Reserve(int count, Duration timeout) override {
    v1::ReserveRequest request;
    request.set_pool(id_.ToBytes());
    request.set_count(static_cast<uint32_t>(count));
    request.set_request(next_reserve_.load());
    v1::ReserveResponse response;
    CRUMB_RETURN_IF_ERROR(Call(request, &response, timeout));
    next_reserve_ = NewReserveNumber();  // a lost response is requested again under the same number
    return std::vector<uint64_t>(response.slots().begin(), response.slots().end());
  }

  absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                    std::span<const uint64_t> slots,
                                                    std::span<const FragmentHeader> headers,
                                                    Duration timeout) override {
    v1::CommitRequest request;
    request.set_pool(id_.ToBytes());
    request.set_keyspace(ToBytes(keyspace));
    for (size_t i = 0; i < slots.size(); ++i) {
      CRUMB_RETURN_IF_ERROR(CheckTiles(headers[i]));
      request.add_slots(slots[i]);
      request.add_headers(Encoded(headers[i]));
    }
    v1::CommitResponse response;
    CRUMB_RETURN_IF_ERROR(Call(request, &response, timeout));
    return OutcomesOf(response.outcomes(), slots.size());
  }

  absl::StatusOr<std::vector<std::optional<FragmentHeader>>> Headers(
      std::span<const uint64_t> slots, Duration timeout) override {
    v1::ScrubSlotsRequest request;
    request.set_pool(id_.ToBytes());
    request.mutable_slots()->Assign(slots.begin(), slots.end());
    v1::ScrubSlotsResponse response;
    CRUMB_RETURN_IF_ERROR(Call(request, &response, timeout));
    if (static_cast<size_t>(response.headers_size()) != slots.size()) {
      return absl::DataLossError("crumbd returned a wrong number of headers");
    }
    std::vector<std::optional<FragmentHeader>> headers;
    for (const std::string& bytes : response.headers()) {
      auto header = DecodeFragmentHeader(std::as_bytes(std::span(bytes.data(), bytes.size())));
      const bool whole = header.ok() && CheckTiles(*header).ok();
      headers.push_back(whole ? std::optional(*std::move(header)) : std::nullopt);
    }
    return headers;
  }

  absl::Status Withdraw(std::span<const uint64_t> slots, std::span<const PageKey> keys,
                        Duration timeout) override {
    v1::ScrubSlotsRequest request;
    request.set_pool(id_.ToBytes());
    request.mutable_damaged()->Assign(slots.begin(), slots.end());
    request.set_damaged_keys(ToBytes(keys));
    v1::ScrubSlotsResponse response;
    return Call(request, &response, timeout);
  }

  absl::Status ReleaseAllBut(std::span<const uint64_t> slots) override {
    v1::ReleaseRequest request;
    request.set_pool(id_.ToBytes());
    request.mutable_slots()->Assign(slots.begin(), slots.end());
    request.set_all_but_slots(true);
    v1::ReleaseResponse response;
    return Call(request, &response, timeout_);
  }

  void ReleaseLater(std::span<const uint64_t> slots) override {
    reconnector_->ReleaseSlotsLater(connection_, id_, slots);
  }

  absl::Status Demoted(std::span<const uint64_t> slots) override {
    v1::ReleaseRequest request;
    request.set_pool(id_.ToBytes());
    request.mutable_demoted()->Assign(slots.begin(), slots.end());
    v1::ReleaseResponse response;
    return Call(request, &response, timeout_);
  }

  void Leave() override {
    v1::PoolRequest request;
    request.mutable_leave()->set_pool(id_.ToBytes());
    // otherwise the session's end does it
    connection_->CallPool(request, {}).status().IgnoreError();
  }

  std::vector<PoolHandle> TakeFirstHandles() override { return std::move(handles_); }

 private:
  absl::StatusOr<uint32_t> Offer(int fd, v1::PoolRequest request) const {
    request.mutable_offer()->set_pool(id_.ToBytes());
    CRUMB_ASSIGN_OR_RETURN(const PoolExchange exchange,
                           connection_->CallPool(request, std::span<const int>(&fd, 1)));
    if (exchange.response.handles_size() != 1) {
      return absl::DataLossError("crumbd named no handle for the one it was offered");
    }
    return exchange.response.handles(0);
  }

  template <typename Request, typename Response>
  absl::Status Call(const Request& request, Response* response, Duration timeout) const {
    return connection_->stub().Call({connection_->token(), Clock::Real().Now() + timeout}, request,
                                    response);
  }

  const std::shared_ptr<Reconnector> reconnector_;
  const std::shared_ptr<Connection> connection_;
  const PoolName name_;
  const PoolId id_;
  std::vector<PoolHandle> handles_;
  const Duration timeout_;
  std::atomic<uint64_t> next_reserve_{NewReserveNumber()};
};

}  // namespace

absl::StatusOr<JoinedPool> RemotePools::Join(const PoolJoin& request) {
  const std::shared_ptr<Connection> connection = reconnector_->current();
  if (connection == nullptr) return absl::UnavailableError("no crumbd");
  const v1::PoolRequest message = JoinMessage(request.name, request.known);
  const bool with_roster = request.known != PoolId() && request.roster_fd >= 0;
  CRUMB_ASSIGN_OR_RETURN(
      PoolExchange exchange,
      connection->CallPool(message, std::span(&request.roster_fd, with_roster ? 1 : 0)));
  if (exchange.response.pool().size() != sizeof(PoolId) || !exchange.response.roster() ||
      exchange.fds.empty()) {
    return absl::DataLossError("crumbd's response about a device pool is incomplete");
  }
  CRUMB_ASSIGN_OR_RETURN(std::vector<PoolHandle> handles,
                         HandlesOf(exchange.response, std::span(exchange.fds).subspan(1)));
  JoinedPool joined;
  joined.roster = std::move(exchange.fds.front());
  joined.session = std::make_shared<RemotePoolSession>(
      reconnector_, connection, request.name, PoolId::FromBytes(exchange.response.pool()),
      std::move(handles), reconnector_->call_timeout());
  return joined;
}

absl::StatusOr<uint64_t> RemotePools::Reclaim(const DeviceUuid& device, uint64_t bytes) {
  const std::shared_ptr<Connection> connection = reconnector_->current();
  if (connection == nullptr) return absl::UnavailableError("no crumbd");
  v1::PoolRequest request;
  request.mutable_reclaim()->set_device(device.ToBytes());
  request.mutable_reclaim()->set_bytes(bytes);
  CRUMB_ASSIGN_OR_RETURN(const PoolExchange exchange, connection->CallPool(request, {}));
  return exchange.response.bytes();
}

}  // namespace crumb::client
