// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/field_bounds.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "common/fragment_header.h"
#include "common/holder_directory.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "server/calls/device_calls.h"
#include "server/cluster/peer_calls.h"

namespace crumb::server {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// The kind of a field, from which and from the limits its bound follows.
enum class Kind : uint8_t {
  kId,            // a keyspace, a page key
  kShortId,       // 16 bytes: a pool, a session, an incarnation
  kKeys,          // page keys, one after the other
  kPools,         // ids of device pools
  kLeases,        // numbers of leases
  kAbandoned,     // numbers of Acquires or Reserves that were given up
  kFragments,     // a number for each fragment of one call
  kHeaders,       // an encoded header for each fragment of one call
  kHeader,        // one encoded header
  kFragmentKeys,  // a page key for each fragment of one call
  kSlots,         // slots of a device pool that are let go
  kTiles,         // a piece of a fragment
  kFields,        // the fields of a keyspace
  kFieldName,
  kFieldValue,
  kName,  // the name of a tenant or a node
  kReason,
  kSamples,  // quality samples
  kText,     // an address, a version, a zone
  kRuns,     // the keys of each run of pages
  kNumbers,  // a number for each page of one call
  kPeerLeases,
  kShortfalls,  // one for each run and each node that a referral names
  kRecords,
  kRecordPart,  // a part of a keyspace's record
};

struct Row {
  std::string_view field;
  Kind kind;
};

// More pools than one host keeps.
constexpr uint64_t kPoolsMax = 256;
// Acquires that one Release gives up. A session remembers 1,024 of each kind.
constexpr uint64_t kAbandonedMax = 4096;
constexpr uint64_t kFieldsMax = 64;
constexpr uint64_t kFieldNameBytesMax = 64;
constexpr uint64_t kFieldValueBytesMax = 1024;
constexpr uint64_t kNameBytesMax = 128;
constexpr uint64_t kReasonBytesMax = 512;
constexpr uint64_t kTextBytesMax = 1024;
// Records in one PeerKeyspaces: more than a message has room for, because each names its keyspace
// and fields.
constexpr uint64_t kRecordsMax = 65'536;
// A client sends 4,096 at a time.
constexpr uint64_t kSamplesMax = 16'384;

constexpr auto kRows = std::to_array<Row>({
    {"crumb.v1.AbortRequest.offsets", Kind::kFragments},
    {"crumb.v1.AbortRequest.requests", Kind::kAbandoned},
    {"crumb.v1.AbortRequest.reserves", Kind::kFragments},
    {"crumb.v1.AcquireRequest.keys", Kind::kKeys},
    {"crumb.v1.AcquireRequest.keyspace", Kind::kId},
    {"crumb.v1.AcquireRequest.peers", Kind::kPools},
    {"crumb.v1.AcquireRequest.pools", Kind::kPools},
    {"crumb.v1.AcquireRequest.run", Kind::kId},
    {"crumb.v1.ClaimSlotsRequest.headers", Kind::kHeaders},
    {"crumb.v1.ClaimSlotsRequest.keyspace", Kind::kId},
    {"crumb.v1.ClaimSlotsRequest.pool", Kind::kShortId},
    {"crumb.v1.ClaimSlotsRequest.slots", Kind::kFragments},
    {"crumb.v1.CommitRequest.header_offsets", Kind::kFragments},
    {"crumb.v1.CommitRequest.headers", Kind::kHeaders},
    {"crumb.v1.CommitRequest.keyspace", Kind::kId},
    {"crumb.v1.CommitRequest.offsets", Kind::kFragments},
    {"crumb.v1.CommitRequest.pool", Kind::kShortId},
    {"crumb.v1.CommitRequest.reserves", Kind::kFragments},
    {"crumb.v1.CommitRequest.slots", Kind::kFragments},
    {"crumb.v1.DeleteRequest.keys", Kind::kKeys},
    {"crumb.v1.DeleteRequest.keyspace", Kind::kId},
    {"crumb.v1.Deletion.keys", Kind::kRecordPart},
    {"crumb.v1.Deletion.node", Kind::kRecordPart},
    {"crumb.v1.DrainNodeRequest.node", Kind::kName},
    {"crumb.v1.DropKeyspaceRequest.keyspace", Kind::kId},
    {"crumb.v1.GetRequest.keys", Kind::kKeys},
    {"crumb.v1.GetRequest.keyspace", Kind::kId},
    {"crumb.v1.GetRequest.run", Kind::kId},
    {"crumb.v1.KeyspaceEntry.keyspace", Kind::kId},
    {"crumb.v1.KeyspaceRecord.FieldsEntry.key", Kind::kRecordPart},
    {"crumb.v1.KeyspaceRecord.FieldsEntry.value", Kind::kRecordPart},
    {"crumb.v1.KeyspaceRecord.ForgottenDeletionsEntry.key", Kind::kRecordPart},
    {"crumb.v1.KeyspaceRecord.deletions", Kind::kRecordPart},
    {"crumb.v1.KeyspaceRecord.fields", Kind::kRecordPart},
    {"crumb.v1.KeyspaceRecord.forgotten_deletions", Kind::kRecordPart},
    {"crumb.v1.KeyspaceRecord.state_reason", Kind::kRecordPart},
    {"crumb.v1.KeyspaceRecord.state_who", Kind::kRecordPart},
    {"crumb.v1.KeyspaceRecord.tenant", Kind::kRecordPart},
    {"crumb.v1.LocatePageRequest.key", Kind::kId},
    {"crumb.v1.LocatePageRequest.keyspace", Kind::kId},
    {"crumb.v1.LocatePageRequest.run", Kind::kId},
    {"crumb.v1.LookupRequest.keys", Kind::kKeys},
    {"crumb.v1.LookupRequest.keyspace", Kind::kId},
    {"crumb.v1.LookupRequest.run", Kind::kId},
    {"crumb.v1.NodeRecord.cluster", Kind::kText},
    {"crumb.v1.NodeRecord.grpc_address", Kind::kText},
    {"crumb.v1.NodeRecord.host", Kind::kText},
    {"crumb.v1.NodeRecord.id", Kind::kName},
    {"crumb.v1.NodeRecord.incarnation", Kind::kId},
    {"crumb.v1.NodeRecord.transport_address", Kind::kText},
    {"crumb.v1.NodeRecord.version", Kind::kText},
    {"crumb.v1.NodeRecord.zone", Kind::kText},
    {"crumb.v1.OpenKeyspaceRequest.FieldsEntry.key", Kind::kFieldName},
    {"crumb.v1.OpenKeyspaceRequest.FieldsEntry.value", Kind::kFieldValue},
    {"crumb.v1.OpenKeyspaceRequest.fields", Kind::kFields},
    {"crumb.v1.OpenKeyspaceRequest.tenant", Kind::kName},
    {"crumb.v1.PeerAcquireRequest.keyspace", Kind::kId},
    {"crumb.v1.PeerAcquireRequest.not_at", Kind::kShortfalls},
    {"crumb.v1.PeerAcquireRequest.runs", Kind::kRuns},
    {"crumb.v1.PeerCaller.incarnation", Kind::kId},
    {"crumb.v1.PeerCaller.node", Kind::kName},
    {"crumb.v1.PeerKeyspacesRequest.keyspaces", Kind::kRecords},
    {"crumb.v1.PeerPushRequest.keys", Kind::kKeys},
    {"crumb.v1.PeerPushRequest.session", Kind::kShortId},
    {"crumb.v1.PeerPushRequest.tile_bytes", Kind::kNumbers},
    {"crumb.v1.PeerReadRequest.keys", Kind::kKeys},
    {"crumb.v1.PeerReadRequest.keyspace", Kind::kId},
    {"crumb.v1.PeerReadRequest.session", Kind::kShortId},
    {"crumb.v1.PeerReleaseRequest.leases", Kind::kPeerLeases},
    {"crumb.v1.PeerShortfall.node", Kind::kName},
    {"crumb.v1.PinRequest.keys", Kind::kKeys},
    {"crumb.v1.PinRequest.keyspace", Kind::kId},
    {"crumb.v1.PinRequest.run", Kind::kId},
    {"crumb.v1.PrefetchRequest.keys", Kind::kKeys},
    {"crumb.v1.PrefetchRequest.keyspace", Kind::kId},
    {"crumb.v1.PrefetchRequest.run", Kind::kId},
    {"crumb.v1.PutRequest.header", Kind::kHeader},
    {"crumb.v1.PutRequest.keyspace", Kind::kId},
    {"crumb.v1.PutRequest.tiles", Kind::kTiles},
    {"crumb.v1.ReleaseRequest.demoted", Kind::kSlots},
    {"crumb.v1.ReleaseRequest.leases", Kind::kLeases},
    {"crumb.v1.ReleaseRequest.pool", Kind::kShortId},
    {"crumb.v1.ReleaseRequest.requests", Kind::kAbandoned},
    {"crumb.v1.ReleaseRequest.slots", Kind::kSlots},
    {"crumb.v1.ReserveRequest.keys", Kind::kKeys},
    {"crumb.v1.ReserveRequest.keyspace", Kind::kId},
    {"crumb.v1.ReserveRequest.pool", Kind::kShortId},
    {"crumb.v1.ScrubSlotsRequest.damaged", Kind::kFragments},
    {"crumb.v1.ScrubSlotsRequest.damaged_keys", Kind::kFragmentKeys},
    {"crumb.v1.ScrubSlotsRequest.pool", Kind::kShortId},
    {"crumb.v1.ScrubSlotsRequest.slots", Kind::kFragments},
    {"crumb.v1.SessionRequest.quality", Kind::kSamples},
    {"crumb.v1.SetKeyspaceStateRequest.keyspace", Kind::kId},
    {"crumb.v1.SetKeyspaceStateRequest.reason", Kind::kReason},
    {"crumb.v1.SetKeyspaceStateRequest.who", Kind::kReason},
    {"crumb.v1.UnpinRequest.keys", Kind::kKeys},
    {"crumb.v1.UnpinRequest.keyspace", Kind::kId},
    {"crumb.v1.WatchEventsRequest.keyspace", Kind::kId},
});

FieldBound BoundOf(const Row& row, const Limits& limits) {
  constexpr uint64_t kId = sizeof(PageKey);
  constexpr uint64_t kShortId = 16;
  constexpr uint64_t kHeader = FragmentHeaderBytes(kFragmentTilesMax);
  const auto keys = static_cast<uint64_t>(limits.acquire_keys_max);
  const auto fragments = static_cast<uint64_t>(limits.commit_fragments_max);
  switch (row.kind) {
    case Kind::kId:
      return {row.field, 1, kId, {}};
    case Kind::kShortId:
      return {row.field, 1, kShortId, {}};
    case Kind::kKeys:
      return {row.field, 1, keys * kId, "limits.acquire_keys_max", kId};
    case Kind::kPools:
      return {row.field, kPoolsMax, kShortId, {}};
    case Kind::kLeases:
      return {row.field, static_cast<uint64_t>(limits.release_leases_max), 0,
              "limits.release_leases_max"};
    case Kind::kAbandoned:
      return {row.field, kAbandonedMax, 0, {}};
    case Kind::kFragments:
      return {row.field, fragments, 0, "limits.commit_fragments_max"};
    case Kind::kHeaders:
      return {row.field, fragments, kHeader, "limits.commit_fragments_max"};
    case Kind::kHeader:
      return {row.field, 1, kHeader, {}};
    case Kind::kFragmentKeys:
      return {row.field, 1, fragments * kId, "limits.commit_fragments_max"};
    case Kind::kSlots:
      return {row.field, kKeptSlotsMax, 0, {}};
    case Kind::kTiles:
      return {row.field, 1, limits.fragment_bytes_max.value, "limits.fragment_bytes_max"};
    case Kind::kFields:
      return {row.field, kFieldsMax, 0, {}};
    case Kind::kFieldName:
      return {row.field, 1, kFieldNameBytesMax, {}};
    case Kind::kFieldValue:
      return {row.field, 1, kFieldValueBytesMax, {}};
    case Kind::kName:
      return {row.field, 1, kNameBytesMax, {}};
    case Kind::kReason:
      return {row.field, 1, kReasonBytesMax, {}};
    case Kind::kSamples:
      return {row.field, kSamplesMax, 0, {}};
    case Kind::kText:
      return {row.field, 1, kTextBytesMax, {}};
    case Kind::kRuns:
      return {row.field, keys, keys * kId, "limits.acquire_keys_max", 1};
    case Kind::kNumbers:
      return {row.field, keys, 0, "limits.acquire_keys_max"};
    case Kind::kPeerLeases:
      return {row.field, kReleasesMax, 0, {}};
    case Kind::kShortfalls:
      return {row.field, keys * HolderDirectory::kReferralNodesMax, 0, "limits.acquire_keys_max"};
    case Kind::kRecords:
      return {row.field, kRecordsMax, 0, {}};
    case Kind::kRecordPart:
      return {row.field, kMessageBytesMax, kMessageBytesMax, {}};
  }
  return {row.field, 0, 0, {}};
}

absl::Status TooLong(const FieldBound& bound, const FieldDescriptor& field, const char* what,
                     uint64_t is, uint64_t most) {
  return absl::InvalidArgumentError(fmt::format("{} has {} {}, {} allows {}",
                                                std::string(field.name()), is, what,
                                                bound.key.empty() ? "the call" : bound.key, most));
}

absl::Status CheckBytes(const FieldBound& bound, const FieldDescriptor& field, size_t bytes) {
  if (bytes <= bound.bytes) return absl::OkStatus();
  return TooLong(bound, field, bound.item_bytes > 1 ? "entries" : "bytes",
                 (bytes + bound.item_bytes - 1) / bound.item_bytes, bound.bytes / bound.item_bytes);
}

absl::Status CheckField(const Limits& limits, const Message& message, const Reflection& reflection,
                        const FieldDescriptor& field) {
  const bool is_text = field.cpp_type() == FieldDescriptor::CPPTYPE_STRING;
  const bool is_message = field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
  std::string scratch;
  if (!field.is_repeated()) {
    if (is_message && reflection.HasField(message, &field)) {
      return CheckFields(limits, reflection.GetMessage(message, &field));
    }
    if (!is_text) return absl::OkStatus();
  }
  const std::optional<FieldBound> bound = BoundOf(std::string_view(field.full_name()), limits);
  if (!bound) {
    return absl::InvalidArgumentError(fmt::format("{} has no bound", std::string(field.name())));
  }
  if (!field.is_repeated()) {
    return CheckBytes(*bound, field,
                      reflection.GetStringReference(message, &field, &scratch).size());
  }
  const int count = reflection.FieldSize(message, &field);
  if (static_cast<uint64_t>(count) > bound->count) {
    return TooLong(*bound, field, "entries", static_cast<uint64_t>(count), bound->count);
  }
  for (int i = 0; i < count && (is_text || is_message); ++i) {
    CRUMB_RETURN_IF_ERROR(
        is_message
            ? CheckFields(limits, reflection.GetRepeatedMessage(message, &field, i))
            : CheckBytes(
                  *bound, field,
                  reflection.GetRepeatedStringReference(message, &field, i, &scratch).size()));
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<FieldBound> BoundOf(std::string_view field, const Limits& limits) {
  const auto row = std::lower_bound(kRows.begin(), kRows.end(), field,
                                    [](const Row& a, std::string_view b) { return a.field < b; });
  if (row == kRows.end() || row->field != field) return std::nullopt;
  return BoundOf(*row, limits);
}

absl::Status CheckFields(const Limits& limits, const Message& request) {
  const Reflection& reflection = *request.GetReflection();
  std::vector<const FieldDescriptor*> set;
  reflection.ListFields(request, &set);
  for (const FieldDescriptor* field : set) {
    CRUMB_RETURN_IF_ERROR(CheckField(limits, request, reflection, *field));
  }
  return absl::OkStatus();
}

absl::Status CheckCount(const Limits& limits, const char* field, uint64_t count) {
  if (count >= 1 && count <= static_cast<uint64_t>(limits.commit_fragments_max)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      fmt::format("{} is {}, must be from 1 to limits.commit_fragments_max, {}", field, count,
                  limits.commit_fragments_max));
}

}  // namespace crumb::server
