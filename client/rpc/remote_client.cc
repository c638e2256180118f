// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/remote_client.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "client/rpc/fragment_stream.h"
#include "client/rpc/wire.h"
#include "common/status_macros.h"
#include "common/tls_files.h"

namespace crumb::client {
namespace {

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
  // Leases may outlive the client: they need a stopped reconnector, not a thread that is never
  // joined.
  if (link->reconnector != nullptr) link->reconnector->Stop();
  delete link;
}

RemoteClient::Link* RemoteClient::MakeLink() const {
  auto link = std::make_unique<Link>();
  link->pid = ::getpid();
  if (!RpcStub::Usable()) return link.release();
  if (options_.address.empty()) {
    link->reconnector = std::make_shared<Reconnector>(options_);
    link->reconnector->Start();
    link->pools = std::make_unique<RemotePools>(link->reconnector);
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
  if (fresh->reconnector != nullptr) fresh->reconnector->Stop();
  return *link;
}

std::shared_ptr<Connection> RemoteClient::CurrentConnection() {
  Link& link = CurrentLink();
  return link.reconnector != nullptr ? link.reconnector->current() : link.tcp;
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
  return link.reconnector != nullptr && link.reconnector->Wait(deadline) != nullptr;
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
  if (Link& link = CurrentLink(); link.reconnector != nullptr) {
    link.reconnector->NoteState(info.id, info.state);
    link.reconnector->NoteGeneration(info.id, info.generation);
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
  if (Link& link = CurrentLink(); link.reconnector != nullptr)
    link.reconnector->NoteState(keyspace, state);
  return absl::OkStatus();
}

KeyspaceState RemoteClient::StateOf(const KeyspaceId& keyspace) {
  Link& link = CurrentLink();
  return link.reconnector == nullptr ? KeyspaceState::kUnknown
                                     : link.reconnector->StateOf(keyspace);
}

uint64_t RemoteClient::GenerationOf(const KeyspaceId& keyspace) {
  Link& link = CurrentLink();
  return link.reconnector == nullptr ? 0 : link.reconnector->GenerationOf(keyspace);
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
      const v1::LookupResponse response,
      (KeysCall<v1::LookupRequest, v1::LookupResponse>(keyspace, keys, std::move(request))));
  LookupResult result;
  result.hit_pages = static_cast<int>(response.hit_pages());
  result.miss_reason = static_cast<MissReason>(response.miss_reason());
  int remote = 0;
  for (const int tier : response.page_tiers()) {
    result.page_tiers.push_back(static_cast<Tier>(tier));
    std::string& node = result.page_nodes.emplace_back();
    if (result.page_tiers.back() != Tier::kRemote || remote >= response.page_nodes_size()) continue;
    const uint32_t index = response.page_nodes(remote++);
    if (index < static_cast<uint32_t>(response.nodes_size())) {
      node = response.nodes(static_cast<int>(index));
    }
  }
  return result;
}

absl::StatusOr<std::vector<CommitOutcome>> RemoteClient::Commit(const KeyspaceId& keyspace,
                                                                std::vector<StagingSlot> slots,
                                                                size_t tiles_bytes,
                                                                Duration timeout) {
  return StartCommit(keyspace, std::move(slots), tiles_bytes, timeout)->Finish();
}

void RemoteClient::NoteMark(uint64_t mark) {
  if (mark == 0) return;
  uint64_t before = flush_since_.load();
  // Responses may arrive out of order; the lowest mark covers all commits.
  while ((before == 0 || mark < before) && !flush_since_.compare_exchange_weak(before, mark)) {
  }
}

absl::StatusOr<FlushReport> RemoteClient::FlushPages(Duration timeout) {
  v1::FlushRequest request;
  request.set_report(true);
  // The next Flush covers commits from here on.
  uint64_t since = flush_since_.load();
  while (since != 0 && !flush_since_.compare_exchange_weak(since, kNothingCommitted)) {
  }
  if (since != 0) request.set_since(since);
  v1::FlushResponse response;
  const absl::Status called = Call(request, &response, timeout);
  if (!called.ok()) {
    // The next Flush must report lost pages, unless crumbd has just reported them.
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

// The older mark covers commits that were noted meanwhile.
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
      return absl::InvalidArgumentError("a fragment's tiles or checksums do not fit its header");
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
  return response.queued_pages() + response.requested_pages();
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
  return LocationOf(response);
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
  if (Link& link = CurrentLink(); link.reconnector != nullptr) link.reconnector->Count(amounts);
}

}  // namespace crumb::client
