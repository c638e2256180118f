// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/device_calls.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "common/limited_log.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "server/calls/field_bounds.h"
#include "server/device/device_pools.h"
#include "storage/device/device_tier.h"

namespace crumb::server {
namespace {

using storage::DevicePoolNumber;

// Returns a pool of the session, which must be open unless it releases slots.
absl::StatusOr<DevicePoolNumber> PoolOf(const CallContext& context, const Session& session,
                                        const std::string& pool, bool must_be_open) {
  if (context.pools == nullptr || !context.pools->enabled()) {
    return absl::FailedPreconditionError("this crumbd keeps no device pools");
  }
  if (must_be_open && session.phase() != Session::Phase::kOpen) {
    return absl::UnauthenticatedError("the session is closed");
  }
  return context.pools->Joined(session, pool);
}

// The keyspace whose pages the session may put into its pools: those of its own tenant.
absl::StatusOr<std::shared_ptr<Keyspace>> KeyspaceFor(const CallContext& context,
                                                      const Session& session,
                                                      const std::string& id) {
  CRUMB_ASSIGN_OR_RETURN(auto keyspace, FindKeyspace(context, id));
  if (context.tenants != nullptr && keyspace->tenant != session.engine().tenant()) {
    return absl::NotFoundError("the keyspace is not of the session's tenant");
  }
  return keyspace;
}

absl::StatusOr<std::shared_ptr<const FragmentHeader>> ReadHeader(const Keyspace& keyspace,
                                                                 const std::string& bytes) {
  CRUMB_ASSIGN_OR_RETURN(
      FragmentHeader header,
      DecodeFragmentHeader(std::as_bytes(std::span(bytes.data(), bytes.size()))));
  CRUMB_RETURN_IF_ERROR(keyspace.CheckHeader(header));
  return std::make_shared<const FragmentHeader>(std::move(header));
}

v1::CommitOutcome CommitSlot(const CallContext& context, const Session& session,
                             const Keyspace& keyspace, DevicePoolNumber pool, uint64_t slot,
                             const std::string& header_bytes, absl::Status* why) {
  const auto header = ReadHeader(keyspace, header_bytes);
  absl::Status status = header.status();
  if (header.ok()) {
    status = context.pools->tier().slots().Commit(pool, session.token().slot(), slot, *header,
                                                  keyspace.geometry.bf16_tile_bytes());
  }
  if (status.ok()) return v1::COMMIT_OUTCOME_STORED;
  if (absl::IsAlreadyExists(status)) return v1::COMMIT_OUTCOME_DEDUPLICATED;
  context.metrics.Refuse(absl::IsDataLoss(status) ? Refusal::kChecksum : Refusal::kInvalid);
  if (why->ok()) *why = status;
  return v1::COMMIT_OUTCOME_REFUSED;
}

v1::DeviceFragments::Shape ShapeOf(const FragmentHeader& header) {
  v1::DeviceFragments::Shape shape;
  shape.mutable_range()->set_layer_begin(header.range.layers.begin);
  shape.mutable_range()->set_layer_end(header.range.layers.end);
  shape.mutable_range()->set_head_begin(header.range.heads.begin);
  shape.mutable_range()->set_head_end(header.range.heads.end);
  shape.set_format(static_cast<v1::PageFormat>(header.format));
  shape.set_tile_bytes(header.tile_bytes);
  shape.set_layout_id(header.layout_id);
  shape.set_over_int2_prefix(header.over_int2_prefix);
  shape.set_generation(header.generation);
  return shape;
}

// Returns the tiles whose checksums the request wants; none if it wants none. REQUIRES:
// CheckPeerSums accepted the request.
TileRange FirstSumsOf(const v1::AcquireRequest& request) {
  const v1::TileRange& wanted = request.peer_sums();
  return {{static_cast<uint16_t>(wanted.layer_begin()), static_cast<uint16_t>(wanted.layer_end())},
          {static_cast<uint16_t>(wanted.head_begin()), static_cast<uint16_t>(wanted.head_end())}};
}

// The sums of `tiles` if the fragment has all of them. False: there is no room.
bool AddSums(const FragmentHeader& header, const TileRange& tiles, uint64_t* room,
             v1::DeviceFragments* fragments) {
  if (Intersect(header.range, tiles) != tiles) return true;
  const auto heads = static_cast<size_t>(tiles.heads.size());
  const size_t bytes = sizeof(uint32_t) * static_cast<size_t>(tiles.tiles());
  if (bytes > *room) return false;
  *room -= bytes;
  for (int layer = tiles.layers.begin; layer < tiles.layers.end; ++layer) {
    const size_t at = static_cast<size_t>(layer - header.range.layers.begin) *
                          static_cast<size_t>(header.range.heads.size()) +
                      static_cast<size_t>(tiles.heads.begin - header.range.heads.begin);
    fragments->mutable_sums()->append(reinterpret_cast<const char*>(header.tile_sums.data() + at),
                                      sizeof(uint32_t) * heads);
  }
  return true;
}

// Orders headers by the fields that ShapeOf returns. An Acquire may find as many shapes as
// fragments.
struct ByShape {
  static auto KeyOf(const FragmentHeader& header) {
    const TileRange& range = header.range;
    return std::tuple(range.layers.begin, range.layers.end, range.heads.begin, range.heads.end,
                      header.format, header.tile_bytes, header.layout_id, header.over_int2_prefix,
                      header.generation);
  }
  bool operator()(const FragmentHeader* a, const FragmentHeader* b) const {
    return KeyOf(*a) < KeyOf(*b);
  }
};

}  // namespace

std::string ToBytes(const FragmentHeader& header) {
  std::string bytes(FragmentHeaderBytes(header.range.tiles()), '\0');
  EncodeFragmentHeader(header, std::as_writable_bytes(std::span(bytes.data(), bytes.size())));
  return bytes;
}

namespace {

// Adds the encoded headers, or an empty string for a slot without a page. Headers for which
// limits.device_sums_bytes_max leaves no room are left out, as if there were no page.
void AddHeaders(const CallContext& context,
                const std::vector<std::shared_ptr<const FragmentHeader>>& headers,
                v1::ScrubSlotsResponse* response) {
  uint64_t room = context.limits.device_sums_bytes_max.value;
  bool cut = false;
  for (const auto& header : headers) {
    std::string& bytes = *response->add_headers();
    if (header == nullptr) continue;
    const size_t needed = FragmentHeaderBytes(header->range.tiles());
    if (needed > room) {
      cut = true;
      continue;
    }
    room -= needed;
    bytes = ToBytes(*header);
  }
  if (cut) context.metrics.Reject(Rejection::kDeviceSums);
}

}  // namespace

absl::Status ReserveSlots(const CallContext& context, const Session& session,
                          const v1::ReserveRequest& request, v1::ReserveResponse* response) {
  CRUMB_ASSIGN_OR_RETURN(const DevicePoolNumber pool,
                         PoolOf(context, session, request.pool(), true));
  CRUMB_RETURN_IF_ERROR(CheckCount(context.limits, "count", request.count()));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<uint64_t> slots,
                         context.pools->Reserve(session, pool, request.request(), request.count()));
  for (const uint64_t slot : slots) response->add_slots(slot);
  return absl::OkStatus();
}

absl::Status CommitSlots(const CallContext& context, const Session& session,
                         const v1::CommitRequest& request, v1::CommitResponse* response) {
  CRUMB_ASSIGN_OR_RETURN(const DevicePoolNumber pool,
                         PoolOf(context, session, request.pool(), true));
  CRUMB_RETURN_IF_ERROR(CheckCount(context.limits, "slots", request.slots_size()));
  if (request.headers_size() != request.slots_size()) {
    return absl::InvalidArgumentError(fmt::format("headers has {} entries, slots {}",
                                                  request.headers_size(), request.slots_size()));
  }
  CRUMB_ASSIGN_OR_RETURN(const auto keyspace, KeyspaceFor(context, session, request.keyspace()));
  absl::Status why;
  for (int i = 0; i < request.slots_size(); ++i) {
    response->add_outcomes(
        CommitSlot(context, session, *keyspace, pool, request.slots(i), request.headers(i), &why));
  }
  if (!why.ok()) response->set_first_error(why.ToString());
  return absl::OkStatus();
}

absl::Status ReleaseSlots(const CallContext& context, const Session& session,
                          const v1::ReleaseRequest& request) {
  CRUMB_ASSIGN_OR_RETURN(const DevicePoolNumber pool,
                         PoolOf(context, session, request.pool(), false));
  const int64_t slots_max =
      request.all_but_slots() ? kKeptSlotsMax : context.limits.acquire_keys_max;
  if (request.slots_size() + request.demoted_size() > slots_max) {
    return absl::InvalidArgumentError(fmt::format("slots: more than {}", slots_max));
  }
  storage::DeviceTier& tier = context.pools->tier();
  const storage::HolderId holder = session.token().slot();
  if (request.all_but_slots()) {
    const size_t gone = context.pools->ReleaseAllBut(
        session, pool, std::vector<uint64_t>(request.slots().begin(), request.slots().end()));
    if (gone > 0) {
      LogInfoLimited("device pool {}: {} slots of a lost connection are free", pool, gone);
    }
    context.sessions.NoteLetGo(session);
    return absl::OkStatus();
  }
  const size_t unknown =
      tier.slots().Release(pool, holder,
                           std::vector<uint64_t>(request.slots().begin(), request.slots().end())) +
      tier.slots().Demoted(
          pool, holder, std::vector<uint64_t>(request.demoted().begin(), request.demoted().end()));
  context.sessions.NoteLetGo(session);
  if (unknown == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("slots: {} of them are not held by the session", unknown));
}

absl::Status ClaimSlots(const CallContext& context, const Session& session,
                        const v1::ClaimSlotsRequest& request, v1::ClaimSlotsResponse* response) {
  CRUMB_RETURN_IF_ERROR(CheckFields(context.limits, request));
  CRUMB_ASSIGN_OR_RETURN(const DevicePoolNumber pool,
                         PoolOf(context, session, request.pool(), true));
  CRUMB_RETURN_IF_ERROR(CheckCount(context.limits, "slots", request.slots_size()));
  if (request.headers_size() != request.slots_size()) {
    return absl::InvalidArgumentError(fmt::format("headers has {} entries, slots {}",
                                                  request.headers_size(), request.slots_size()));
  }
  storage::DeviceTier& tier = context.pools->tier();
  if (!tier.slots().recovering(pool)) {
    return absl::FailedPreconditionError("pool: it is not recovering");
  }
  std::shared_ptr<Keyspace> keyspace;
  if (!request.keyspace().empty()) {
    CRUMB_ASSIGN_OR_RETURN(keyspace, KeyspaceFor(context, session, request.keyspace()));
    keyspace->recovered.store(true);  // the slots were filled before this node's start
  }
  for (int i = 0; i < request.slots_size(); ++i) {
    std::shared_ptr<const FragmentHeader> header;
    if (keyspace != nullptr && !request.headers(i).empty()) {
      // It may be of an older generation: the slot stays the process's, and the page is dropped.
      header = ReadHeader(*keyspace, request.headers(i)).value_or(nullptr);
    }
    const uint32_t logical = keyspace == nullptr ? 0 : keyspace->geometry.bf16_tile_bytes();
    response->add_claimed(tier.slots().Claim(pool, session.token().slot(), request.slots(i),
                                             std::move(header), logical));
  }
  if (!context.pools->Sealed(session, pool)) return absl::OkStatus();
  // The session has closed, or the process has meanwhile reported its slots over another session.
  // It claims these slots over that one.
  tier.slots().Release(pool, session.token().slot(),
                       std::vector<uint64_t>(request.slots().begin(), request.slots().end()));
  return absl::AbortedError("the process has another session");
}

absl::Status ScrubSlots(const CallContext& context, const Session& session,
                        const v1::ScrubSlotsRequest& request, v1::ScrubSlotsResponse* response) {
  CRUMB_RETURN_IF_ERROR(CheckFields(context.limits, request));
  CRUMB_ASSIGN_OR_RETURN(const DevicePoolNumber pool,
                         PoolOf(context, session, request.pool(), true));
  CRUMB_RETURN_IF_ERROR(
      CheckCount(context.limits, "slots",
                 static_cast<uint64_t>(request.slots_size()) + request.damaged_size()));
  if (request.damaged_keys().size() != request.damaged_size() * sizeof(PageKey)) {
    return absl::InvalidArgumentError(
        fmt::format("damaged_keys has {} bytes, not 32 for each of {} slots",
                    request.damaged_keys().size(), request.damaged_size()));
  }
  std::vector<uint64_t> slots(request.slots().begin(), request.slots().end());
  std::sort(slots.begin(), slots.end());
  if (std::adjacent_find(slots.begin(), slots.end()) != slots.end()) {
    return absl::InvalidArgumentError("slots: a slot is named twice");
  }
  storage::DeviceTier& tier = context.pools->tier();
  uint32_t withdrawn = 0;
  for (int i = 0; i < request.damaged_size(); ++i) {
    PageKey key;
    std::memcpy(&key, request.damaged_keys().data() + i * sizeof(PageKey), sizeof(PageKey));
    withdrawn += tier.slots().Withdraw(pool, request.damaged(i), key) ? 1 : 0;
  }
  if (withdrawn > 0) LogWarningLimited("{} damaged pages leave device pool {}", withdrawn, pool);
  response->set_withdrawn(withdrawn);
  AddHeaders(context,
             tier.slots().HeadersAt(
                 pool, std::vector<uint64_t>(request.slots().begin(), request.slots().end())),
             response);
  return absl::OkStatus();
}

absl::Status CheckNamedPools(const CallContext& context, const v1::AcquireRequest& request) {
  if (context.pools == nullptr) return absl::OkStatus();
  const size_t named =
      static_cast<size_t>(request.pools_size()) + static_cast<size_t>(request.peers_size());
  if (named <= context.pools->named_max()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("pools and peers name {} pools, device_pools.named_max allows {}", named,
                  context.pools->named_max()));
}

std::vector<DevicePoolNumber> PoolsOf(const CallContext& context, const Session& session,
                                      const v1::AcquireRequest& request) {
  std::vector<DevicePoolNumber> pools;
  if (context.pools == nullptr || !context.pools->enabled()) return pools;
  if (request.pools().empty() && request.peers().empty()) return pools;
  const auto add = [&](DevicePoolNumber pool) {
    if (pool == 0 || pools.size() >= context.pools->named_max()) return;
    if (std::find(pools.begin(), pools.end(), pool) == pools.end()) pools.push_back(pool);
  };
  for (const std::string& pool : request.pools()) add(context.pools->OfTenant(session, pool));
  for (const std::string& pool : request.peers()) add(context.pools->OfTenant(session, pool));
  for (const DevicePoolNumber pool : context.pools->OfEngine(session.engine())) add(pool);
  return pools;
}

void FillDeviceFragments(const CallContext& context, const Session& session,
                         const v1::AcquireRequest& request,
                         const std::vector<storage::DeviceFragmentRef>& found,
                         v1::DeviceFragments* fragments) {
  if (found.empty()) return;
  std::vector<DevicePoolNumber> named;
  for (const std::string& pool : request.pools()) {
    named.push_back(context.pools->OfTenant(session, pool));
  }
  for (const std::string& pool : request.peers()) {
    named.push_back(context.pools->OfTenant(session, pool));
  }
  const int count = static_cast<int>(found.size());
  fragments->mutable_pages()->Reserve(count);
  fragments->mutable_pools()->Reserve(count);
  fragments->mutable_slots()->Reserve(count);
  fragments->mutable_shapes()->Reserve(count);
  std::map<const FragmentHeader*, uint32_t, ByShape> shapes;
  uint64_t room = context.limits.device_sums_bytes_max.value;
  bool cut = false;
  const TileRange first = FirstSumsOf(request);
  const bool of_peers = !request.peers().empty() && !request.has_peer_sums();
  const bool sums_wanted = request.device_sums() || of_peers;
  for (const storage::DeviceFragmentRef& fragment : found) {
    const auto pool = std::find(named.begin(), named.end(), fragment.pool);
    if (pool == named.end()) continue;
    const auto index = static_cast<uint32_t>(pool - named.begin());
    const FragmentHeader& header = *fragment.header;
    const auto [shape, is_new] = shapes.emplace(&header, static_cast<uint32_t>(shapes.size()));
    if (is_new) *fragments->add_shape() = ShapeOf(header);
    fragments->add_pages(fragment.page);
    fragments->add_pools(index);
    fragments->add_slots(fragment.slot);
    fragments->add_shapes(shape->second);
    const bool peer = index >= static_cast<uint32_t>(request.pools_size());
    if (peer && first.tiles() > 0 && !cut) cut = !AddSums(header, first, &room, fragments);
    if (!sums_wanted) continue;
    std::string& sums = *fragments->add_headers();
    if (peer ? !of_peers : !request.device_sums()) continue;
    const size_t bytes = FragmentHeaderBytes(header.range.tiles());
    if (bytes > room) {
      cut = true;
      continue;
    }
    room -= bytes;
    sums = ToBytes(header);
  }
  if (cut) {
    fragments->clear_sums();
    context.metrics.Reject(Rejection::kDeviceSums);
  }
}

}  // namespace crumb::server
