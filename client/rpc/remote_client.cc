// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/remote_client.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "client/rpc/fragment_reader.h"
#include "client/rpc/fragment_stream.h"
#include "client/rpc/wire.h"
#include "common/status_macros.h"
#include "common/tls_files.h"

namespace crumb::client {
namespace {

// What a call of `timeout` leaves crumbd for waiting on lower tiers: the answer has to travel too.
uint32_t WaitMs(Duration timeout) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout * 9 / 10).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(ms, 0, 3'600'000));
}

// Ends a lease when the last reference goes.
class LeaseHold {
 public:
  LeaseHold(std::shared_ptr<ConnectionKeeper> keeper, std::shared_ptr<Connection> connection,
            uint64_t lease)
      : keeper_(std::move(keeper)), connection_(std::move(connection)), lease_(lease) {}
  LeaseHold(const LeaseHold&) = delete;
  LeaseHold& operator=(const LeaseHold&) = delete;
  ~LeaseHold() { keeper_->ReleaseLater(std::move(connection_), lease_); }

 private:
  const std::shared_ptr<ConnectionKeeper> keeper_;
  std::shared_ptr<Connection> connection_;
  const uint64_t lease_;
};

// Gives a staging slot back unless it was committed.
class StagingHold {
 public:
  StagingHold(std::shared_ptr<ConnectionKeeper> keeper, std::shared_ptr<Connection> connection,
              uint64_t offset)
      : keeper_(std::move(keeper)), connection_(std::move(connection)), offset_(offset) {}
  StagingHold(const StagingHold&) = delete;
  StagingHold& operator=(const StagingHold&) = delete;
  ~StagingHold() {
    if (!committed_) keeper_->AbortLater(std::move(connection_), offset_);
  }

  const Connection* connection() const { return connection_.get(); }
  void NoteCommitted() { committed_ = true; }

 private:
  const std::shared_ptr<ConnectionKeeper> keeper_;
  std::shared_ptr<Connection> connection_;
  const uint64_t offset_;
  bool committed_ = false;
};

absl::Status CheckTls(const ClientOptions& options) {
  const bool any = !options.tls_ca_file.empty() || !options.tls_cert_file.empty() ||
                   !options.tls_key_file.empty() || !options.tls_server_name.empty();
  if (!any) return absl::OkStatus();
  if (options.address.empty() || options.tls_ca_file.empty()) {
    return absl::InvalidArgumentError(
        "ClientOptions: TLS needs address and tls_ca_file; a Unix socket has none");
  }
  return CheckTlsFiles({{"tls_cert_file", options.tls_cert_file},
                        {"tls_key_file", options.tls_key_file},
                        {"tls_ca_file", options.tls_ca_file}},
                       std::chrono::system_clock::now());
}

StagingHold& HoldOf(const StagingSlot& slot) {
  return *static_cast<StagingHold*>(slot.hold().get());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Open(const ClientOptions& options) {
  if (options.socket_dir.empty() && options.address.empty()) {
    return absl::InvalidArgumentError("ClientOptions: neither socket_dir nor address is set");
  }
  if (!options.engine.empty() && options.engine.size() != 16) {
    return absl::InvalidArgumentError("ClientOptions.engine must have 16 bytes");
  }
  if (options.connect_timeout <= Duration::zero() || options.call_timeout <= Duration::zero() ||
      options.backoff_min <= Duration::zero() || options.backoff_max < options.backoff_min) {
    return absl::InvalidArgumentError(
        "ClientOptions: timeouts and backoffs must be positive, "
        "backoff_max at least backoff_min");
  }
  CRUMB_RETURN_IF_ERROR(CheckTls(options));
  return std::make_unique<RemoteClient>(options);
}

RemoteClient::RemoteClient(const ClientOptions& options) : options_(options), link_(MakeLink()) {}

RemoteClient::~RemoteClient() {
  Link* link = link_.load();
  if (link->pid != ::getpid()) return;
  // Leases may outlive the client: they find a stopped keeper, not a thread that nobody joins.
  if (link->keeper != nullptr) link->keeper->Stop();
  delete link;
}

RemoteClient::Link* RemoteClient::MakeLink() const {
  auto link = std::make_unique<Link>();
  link->pid = ::getpid();
  if (!RpcStub::Usable()) return link.release();
  if (options_.address.empty()) {
    link->keeper = std::make_shared<ConnectionKeeper>(options_);
    link->keeper->Start();
    link->pools = std::make_unique<RemotePools>(link->keeper);
  } else {
    link->tcp = Connection::OpenTcp(options_);
  }
  return link.release();
}

RemoteClient::Link& RemoteClient::CurrentLink() {
  Link* link = link_.load(std::memory_order_acquire);
  if (link->pid == ::getpid()) return *link;
  std::unique_ptr<Link> fresh(MakeLink());
  if (link_.compare_exchange_strong(link, fresh.get())) return *fresh.release();
  if (fresh->keeper != nullptr) fresh->keeper->Stop();
  return *link;
}

std::shared_ptr<Connection> RemoteClient::CurrentConnection() {
  Link& link = CurrentLink();
  return link.keeper != nullptr ? link.keeper->current() : link.tcp;
}

absl::StatusOr<std::shared_ptr<Connection>> RemoteClient::Connected() {
  std::shared_ptr<Connection> connection = CurrentConnection();
  if (connection != nullptr) return connection;
  if (!RpcStub::Usable()) {
    return absl::UnavailableError("this process was forked from one that had a connection");
  }
  return absl::UnavailableError("no crumbd in " + options_.socket_dir);
}

template <typename Request, typename Response>
absl::Status RemoteClient::Call(const Request& request, Response* response, Duration timeout) {
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connected());
  return connection->stub().Call({connection->token(), Clock::Real().Now() + timeout}, request,
                                 response);
}

bool RemoteClient::connected() {
  Link& link = CurrentLink();
  return link.tcp != nullptr ? link.tcp->stub().connected() : CurrentConnection() != nullptr;
}

uint64_t RemoteClient::epoch() {
  const std::shared_ptr<Connection> connection = CurrentConnection();
  return connection == nullptr ? 0 : connection->epoch();
}

bool RemoteClient::WaitConnected(Duration timeout) {
  Link& link = CurrentLink();
  const TimePoint deadline = Clock::Real().Now() + timeout;
  if (link.tcp != nullptr) return link.tcp->stub().WaitConnected(deadline);
  return link.keeper != nullptr && link.keeper->Wait(deadline) != nullptr;
}

absl::StatusOr<KeyspaceInfo> RemoteClient::OpenKeyspace(const KeyspaceSpec& spec,
                                                        Duration timeout) {
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connected());
  v1::OpenKeyspaceRequest request;
  request.mutable_fields()->insert(spec.fields.begin(), spec.fields.end());
  request.set_layers(spec.layers);
  request.set_kv_heads(spec.kv_heads);
  request.set_head_dim(spec.head_dim);
  request.set_group_size(spec.group_size);
  request.set_tenant(spec.tenant);
  v1::OpenKeyspaceResponse response;
  CRUMB_RETURN_IF_ERROR(connection->stub().Call(
      {connection->token(), Clock::Real().Now() + timeout}, request, &response));
  KeyspaceInfo info;
  CRUMB_ASSIGN_OR_RETURN(info.id, KeyspaceId::FromBytes(response.keyspace()));
  info.generation = response.generation();
  info.state = static_cast<KeyspaceState>(response.state());
  info.int2_tile_bytes = response.int2_tile_bytes();
  info.bf16_tile_bytes = response.bf16_tile_bytes();
  info.epoch = connection->epoch();
  if (Link& link = CurrentLink(); link.keeper != nullptr) {
    link.keeper->NoteState(info.id, info.state);
    link.keeper->NoteGeneration(info.id, info.generation);
  }
  return info;
}

absl::Status RemoteClient::SetKeyspaceState(const KeyspaceId& keyspace, KeyspaceState state,
                                            const std::string& who, const std::string& reason) {
  v1::SetKeyspaceStateRequest request;
  request.set_keyspace(ToBytes(keyspace));
  request.set_state(static_cast<v1::KeyspaceState>(state));
  request.set_who(who);
  request.set_reason(reason);
  v1::SetKeyspaceStateResponse response;
  CRUMB_RETURN_IF_ERROR(Call(request, &response, options_.call_timeout));
  if (Link& link = CurrentLink(); link.keeper != nullptr) link.keeper->NoteState(keyspace, state);
  return absl::OkStatus();
}

KeyspaceState RemoteClient::StateOf(const KeyspaceId& keyspace) {
  Link& link = CurrentLink();
  return link.keeper == nullptr ? KeyspaceState::kUnknown : link.keeper->StateOf(keyspace);
}

uint64_t RemoteClient::GenerationOf(const KeyspaceId& keyspace) {
  Link& link = CurrentLink();
  return link.keeper == nullptr ? 0 : link.keeper->GenerationOf(keyspace);
}

// An Acquire over one connection.
class RemoteClient::PendingLease final : public PendingAcquire {
 public:
  PendingLease(const AcquireRequest& request, std::shared_ptr<ConnectionKeeper> keeper,
               std::shared_ptr<Connection> connection, uint32_t turn)
      : request_(request),
        keeper_(std::move(keeper)),
        connection_(std::move(connection)),
        turn_(turn) {}
  ~PendingLease() override {
    if (call_ == nullptr) return;
    call_.reset();
    keeper_->ForgetLater(connection_, number_);
  }

  void Send(v1::AcquireRequest wire) {
    wire_ = std::move(wire);
    number_ = wire_.request();
    deadline_ = Clock::Real().Now() + request_.timeout;
    // All sums are megabytes.
    const bool small = (wire_.peers().empty() || wire_.has_peer_sums()) && !wire_.device_sums();
    if (small && connection_->calls() != nullptr) {
      call_ = connection_->calls()->Start(wire_, deadline_, &answer_, &flags_);
    }
    if (call_ == nullptr) call_ = StartOverGrpc(&answer_);
  }

  bool Ready() override { return call_ == nullptr || call_->Ready(); }
  absl::StatusOr<AcquireResult> Finish() override;

 private:
  std::unique_ptr<PendingCall> StartOverGrpc(v1::AcquireResponse* answer) const {
    return connection_->stub().Start({connection_->token(), deadline_}, wire_, answer);
  }
  absl::Status BringFragments(std::shared_ptr<void>* hold);

  const AcquireRequest request_;
  const std::shared_ptr<ConnectionKeeper> keeper_;
  const std::shared_ptr<Connection> connection_;
  const uint32_t turn_;
  v1::AcquireRequest wire_;
  uint64_t number_ = 0;
  TimePoint deadline_;
  CallSocket::ResponseFlags flags_;
  v1::AcquireResponse answer_;
  std::unique_ptr<PendingCall> call_;  // null: finished
};

// Of a lease that was answered without them, which is held twice for it: `hold` becomes both.
absl::Status RemoteClient::PendingLease::BringFragments(std::shared_ptr<void>* hold) {
  wire_.set_lease(answer_.lease());
  v1::AcquireResponse joined;
  CRUMB_RETURN_IF_ERROR(StartOverGrpc(&joined)->Finish());
  if (joined.lease() == 0) return absl::UnavailableError("crumbd does not know its lease any more");
  using Holds = std::pair<std::shared_ptr<void>, std::shared_ptr<void>>;
  *hold = std::make_shared<Holds>(
      *hold, std::make_shared<LeaseHold>(keeper_, connection_, joined.lease()));
  answer_.mutable_fragments()->Swap(joined.mutable_fragments());
  answer_.mutable_device_fragments()->Swap(joined.mutable_device_fragments());
  return absl::OkStatus();
}

absl::StatusOr<AcquireResult> RemoteClient::PendingLease::Finish() {
  absl::Status status = std::exchange(call_, nullptr)->Finish();
  std::shared_ptr<void> hold;
  if (status.ok() && answer_.lease() != 0) {
    hold = std::make_shared<LeaseHold>(keeper_, connection_, answer_.lease());
  }
  if (status.ok() && flags_.fragments_apart) status = BringFragments(&hold);
  if (absl::IsDeadlineExceeded(status)) keeper_->Count({.deadline_exceeded = 1});
  if (!status.ok()) {
    // A lease may have been granted, or still be.
    keeper_->ForgetLater(connection_, number_);
    return status;
  }
  const uint32_t every = request_.verify_every;
  ReadFragments read = ReadAcquireResponse(*connection_, request_, answer_, [&](int page) {
    return every > 0 && (static_cast<uint32_t>(page) + turn_) % every == 0;
  });
  AcquireResult result;
  result.hit_pages = read.hit_pages;
  result.miss_reason = static_cast<MissReason>(answer_.miss_reason());
  if (read.miss_reason != MissReason::kNone) {
    result.miss_reason = read.miss_reason;
    if (read.miss_reason != MissReason::kGeneration) keeper_->Count({.verify_failures = 1});
  }
  const int reported = std::min(result.hit_pages, answer_.page_tiers_size());
  result.page_tiers.reserve(static_cast<size_t>(result.hit_pages));
  for (int page = 0; page < reported; ++page) {
    result.page_tiers.push_back(static_cast<Tier>(answer_.page_tiers(page)));
  }
  result.page_tiers.resize(result.hit_pages, Tier::kUnknown);
  if (result.hit_pages > 0 && hold != nullptr) {
    result.lease = std::make_shared<const Lease>(
        std::move(read.fragments), std::move(read.device_fragments), std::move(read.device_store),
        connection_->epoch(), std::move(hold));
    result.lease_id = answer_.lease();
  } else {
    result.hit_pages = 0;
    result.page_tiers.clear();
  }
  return result;
}

// What could not be sent.
class RemoteClient::FailedAcquire final : public PendingAcquire {
 public:
  explicit FailedAcquire(absl::Status status) : status_(std::move(status)) {}
  absl::StatusOr<AcquireResult> Finish() override { return status_; }

 private:
  const absl::Status status_;
};

std::unique_ptr<PendingAcquire> RemoteClient::StartAcquire(const AcquireRequest& request) {
  Link& link = CurrentLink();
  absl::StatusOr<std::shared_ptr<Connection>> connection = Connected();
  if (!connection.ok()) return std::make_unique<FailedAcquire>(connection.status());
  if (link.keeper == nullptr) {
    return std::make_unique<FailedAcquire>(
        absl::FailedPreconditionError("Acquire needs shared memory, not " + options_.address));
  }
  if (request.lease_epoch != 0 && request.lease_epoch != (*connection)->epoch()) {
    return std::make_unique<FailedAcquire>(
        absl::AbortedError("the lease was given by a crumbd that has ended: acquire again"));
  }
  v1::AcquireRequest wire;
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
  wire.set_request(last_request_.fetch_add(1) + 1);
  auto pending =
      std::make_unique<PendingLease>(request, link.keeper, *std::move(connection),
                                     verify_turn_.fetch_add(1, std::memory_order_relaxed));
  pending->Send(std::move(wire));
  return pending;
}

absl::StatusOr<AcquireResult> RemoteClient::Acquire(const AcquireRequest& request) {
  return StartAcquire(request)->Finish();
}

absl::StatusOr<LookupResult> RemoteClient::Lookup(const KeyspaceId& keyspace,
                                                  std::span<const PageKey> keys) {
  v1::LookupRequest request;
  request.set_wait_ms(WaitMs(options_.call_timeout));
  request.set_everyone(options_.query_every_node);
  CRUMB_ASSIGN_OR_RETURN(
      const v1::LookupResponse answer,
      (KeysCall<v1::LookupRequest, v1::LookupResponse>(keyspace, keys, std::move(request))));
  LookupResult result;
  result.hit_pages = static_cast<int>(answer.hit_pages());
  result.miss_reason = static_cast<MissReason>(answer.miss_reason());
  int remote = 0;
  for (const int tier : answer.page_tiers()) {
    result.page_tiers.push_back(static_cast<Tier>(tier));
    std::string& node = result.page_nodes.emplace_back();
    if (result.page_tiers.back() != Tier::kRemote || remote >= answer.page_nodes_size()) continue;
    const uint32_t index = answer.page_nodes(remote++);
    if (index < static_cast<uint32_t>(answer.nodes_size())) {
      node = answer.nodes(static_cast<int>(index));
    }
  }
  return result;
}

absl::StatusOr<std::vector<StagingSlot>> RemoteClient::Reserve(int count, size_t fragment_bytes,
                                                               const PendingPages& pending,
                                                               Duration timeout) {
  Link& link = CurrentLink();
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connected());
  if (link.keeper == nullptr) {
    return absl::FailedPreconditionError("Reserve needs shared memory, not " + options_.address);
  }
  v1::ReserveRequest request;
  request.set_count(static_cast<uint32_t>(count));
  request.set_fragment_bytes(fragment_bytes);
  if (!pending.keys.empty()) {
    request.set_keyspace(ToBytes(pending.keyspace));
    request.set_keys(ToBytes(pending.keys));
  }
  v1::ReserveResponse response;
  CRUMB_RETURN_IF_ERROR(connection->stub().Call(
      {connection->token(), Clock::Real().Now() + timeout}, request, &response));
  std::vector<StagingSlot> slots;
  for (const uint64_t offset : response.offsets()) {
    auto hold = std::make_shared<StagingHold>(link.keeper, connection, offset);
    CRUMB_ASSIGN_OR_RETURN(const std::span<std::byte> bytes,
                           connection->StagingBytes(offset, fragment_bytes));
    slots.emplace_back(bytes, offset, std::move(hold));
  }
  return slots;
}

absl::StatusOr<std::vector<CommitOutcome>> RemoteClient::Commit(const KeyspaceId& keyspace,
                                                                std::vector<StagingSlot> slots,
                                                                size_t tiles_bytes,
                                                                Duration timeout) {
  if (slots.empty()) return std::vector<CommitOutcome>();
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connected());
  v1::CommitRequest request;
  request.set_keyspace(ToBytes(keyspace));
  for (const StagingSlot& slot : slots) {
    if (HoldOf(slot).connection() != connection.get()) {
      return absl::AbortedError("the connection that staged these fragments was lost");
    }
    request.add_offsets(slot.offset());
    request.add_header_offsets(static_cast<uint32_t>(tiles_bytes));
  }
  v1::CommitResponse response;
  CRUMB_RETURN_IF_ERROR(connection->stub().Call(
      {connection->token(), Clock::Real().Now() + timeout}, request, &response));
  NoteMark(response.flush_mark());
  for (const StagingSlot& slot : slots) HoldOf(slot).NoteCommitted();
  return OutcomesOf(response.outcomes(), slots.size());
}

void RemoteClient::NoteMark(uint64_t mark) {
  if (mark == 0) return;
  uint64_t before = flush_since_.load();
  // Answers may overtake each other: the lowest mark covers all commits.
  while ((before == 0 || mark < before) && !flush_since_.compare_exchange_weak(before, mark)) {
  }
}

absl::StatusOr<FlushReport> RemoteClient::FlushPages(Duration timeout) {
  v1::FlushRequest request;
  request.set_report(true);
  // Commits from here on are covered by the next Flush.
  uint64_t since = flush_since_.load();
  while (since != 0 && !flush_since_.compare_exchange_weak(since, kNothingCommitted)) {
  }
  if (since != 0) request.set_since(since);
  v1::FlushResponse response;
  const absl::Status called = Call(request, &response, timeout);
  if (!called.ok()) {
    // Pages that were lost are still to be reported, unless crumbd has just said that they are
    // gone.
    if (since != kNothingCommitted && !absl::IsDataLoss(called)) RestoreMark(since);
    return called;
  }
  FlushReport report;
  report.durable_pages = response.durable_pages();
  report.tier_off_pages = response.tier_off_pages();
  report.no_room_pages = response.no_room_pages();
  report.lost_pages = response.lost_pages();
  report.unread_pages = response.unread_pages();
  report.why = response.why();
  report.mark = response.mark();
  return report;
}

// The older mark covers what a commit has noted meanwhile.
void RemoteClient::RestoreMark(uint64_t since) {
  uint64_t now = flush_since_.load();
  while (since != 0 && !flush_since_.compare_exchange_weak(now, std::min(now, since))) {
  }
}

absl::StatusOr<uint64_t> RemoteClient::Flush(Duration timeout) {
  CRUMB_ASSIGN_OR_RETURN(const FlushReport report, FlushPages(timeout));
  CRUMB_RETURN_IF_ERROR(report.ToStatus());
  return report.durable_pages;
}

absl::StatusOr<MissReason> RemoteClient::Get(const KeyspaceId& keyspace,
                                             std::span<const PageKey> keys, Duration timeout,
                                             const FragmentReceiver& receiver) {
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connected());
  v1::GetRequest request;
  request.set_keyspace(ToBytes(keyspace));
  request.set_keys(ToBytes(keys));
  request.set_wait_ms(WaitMs(timeout));
  request.set_everyone(options_.query_every_node);
  FragmentAssembler assembler(keyspace, keys, receiver);
  CRUMB_RETURN_IF_ERROR(
      connection->stub().Get({connection->token(), Clock::Real().Now() + timeout}, request,
                             [&](v1::GetResponse& message) { return assembler.Add(message); }));
  return assembler.End();
}

absl::StatusOr<std::vector<CommitOutcome>> RemoteClient::Put(
    const KeyspaceId& keyspace, std::span<const FragmentBytes> fragments, Duration timeout) {
  for (const FragmentBytes& fragment : fragments) {
    const int tiles = fragment.header.range.tiles();
    if (static_cast<int>(fragment.header.tile_sums.size()) != tiles ||
        fragment.tiles.size() != FragmentTilesBytes(tiles, fragment.header.tile_bytes)) {
      return absl::InvalidArgumentError("a fragment's tiles or sums do not fit its header");
    }
  }
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connected());
  FragmentSplitter splitter(keyspace, fragments);
  v1::PutResponse response;
  CRUMB_RETURN_IF_ERROR(connection->stub().Put(
      {connection->token(), Clock::Real().Now() + timeout},
      [&](v1::PutRequest* message) { return splitter.Next(message); }, &response));
  NoteMark(response.flush_mark());
  return OutcomesOf(response.outcomes(), fragments.size());
}

template <typename Request, typename Response>
absl::StatusOr<Response> RemoteClient::KeysCall(const KeyspaceId& keyspace,
                                                std::span<const PageKey> keys, Request request) {
  request.set_keyspace(ToBytes(keyspace));
  request.set_keys(ToBytes(keys));
  Response response;
  CRUMB_RETURN_IF_ERROR(Call(request, &response, options_.call_timeout));
  return response;
}

absl::StatusOr<uint32_t> RemoteClient::Prefetch(const KeyspaceId& keyspace,
                                                std::span<const PageKey> keys) {
  v1::PrefetchRequest request;
  request.set_everyone(options_.query_every_node);
  CRUMB_ASSIGN_OR_RETURN(
      const v1::PrefetchResponse response,
      (KeysCall<v1::PrefetchRequest, v1::PrefetchResponse>(keyspace, keys, std::move(request))));
  return response.queued_pages() + response.asked_pages();
}

absl::StatusOr<uint32_t> RemoteClient::Pin(const KeyspaceId& keyspace,
                                           std::span<const PageKey> keys, Duration ttl) {
  v1::PinRequest request;
  request.set_ttl_ms(std::chrono::duration_cast<std::chrono::milliseconds>(ttl).count());
  request.set_wait_ms(WaitMs(options_.call_timeout));
  request.set_everyone(options_.query_every_node);
  CRUMB_ASSIGN_OR_RETURN(const v1::PinResponse response, (KeysCall<v1::PinRequest, v1::PinResponse>(
                                                             keyspace, keys, std::move(request))));
  return response.pinned_pages();
}

absl::StatusOr<uint32_t> RemoteClient::Unpin(const KeyspaceId& keyspace,
                                             std::span<const PageKey> keys) {
  CRUMB_ASSIGN_OR_RETURN(const v1::UnpinResponse response,
                         (KeysCall<v1::UnpinRequest, v1::UnpinResponse>(keyspace, keys, {})));
  return response.unpinned_pages();
}

absl::StatusOr<uint32_t> RemoteClient::Delete(const KeyspaceId& keyspace,
                                              std::span<const PageKey> keys) {
  CRUMB_ASSIGN_OR_RETURN(const v1::DeleteResponse response,
                         (KeysCall<v1::DeleteRequest, v1::DeleteResponse>(keyspace, keys, {})));
  return response.deleted_pages();
}

absl::StatusOr<uint64_t> RemoteClient::DropKeyspace(const KeyspaceId& keyspace) {
  v1::DropKeyspaceRequest request;
  request.set_keyspace(ToBytes(keyspace));
  v1::DropKeyspaceResponse response;
  CRUMB_RETURN_IF_ERROR(Call(request, &response, options_.call_timeout));
  return response.generation();
}

absl::StatusOr<NodeList> RemoteClient::ListNodes() {
  v1::ListNodesResponse response;
  CRUMB_RETURN_IF_ERROR(Call(v1::ListNodesRequest(), &response, options_.call_timeout));
  return NodesOf(response);
}

absl::StatusOr<PageLocation> RemoteClient::LocatePage(const KeyspaceId& keyspace,
                                                      const PageKey& key) {
  v1::LocatePageRequest request;
  request.set_key(std::string(key.view()));
  if (keyspace != KeyspaceId()) request.set_keyspace(ToBytes(keyspace));
  v1::LocatePageResponse response;
  CRUMB_RETURN_IF_ERROR(Call(request, &response, options_.call_timeout));
  return PlaceOf(response);
}

absl::Status RemoteClient::DrainNode(const std::string& node) {
  v1::DrainNodeRequest request;
  request.set_node(node);
  v1::DrainNodeResponse response;
  return Call(request, &response, options_.call_timeout);
}

absl::StatusOr<CacheStats> RemoteClient::Stats() {
  v1::StatsResponse response;
  CRUMB_RETURN_IF_ERROR(Call(v1::StatsRequest(), &response, options_.call_timeout));
  return StatsOf(response);
}

std::shared_ptr<const MappedMemory> RemoteClient::mapped() {
  const std::shared_ptr<Connection> connection = CurrentConnection();
  if (connection == nullptr) return nullptr;
  return {connection, &connection->mapped()};
}

PoolLink* RemoteClient::pools() { return CurrentLink().pools.get(); }

void RemoteClient::Count(const SessionCounters& amounts) {
  if (Link& link = CurrentLink(); link.keeper != nullptr) link.keeper->Count(amounts);
}

}  // namespace crumb::client
