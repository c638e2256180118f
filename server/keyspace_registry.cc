// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/keyspace_registry.h"

#include <algorithm>

#include "common/hex.h"
#include "common/keyspace.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "crumb/v1/record.pb.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

constexpr std::string_view kRecordPrefix = "keyspace/";
constexpr size_t kFieldsMax = 64;
constexpr size_t kNameBytesMax = 64;
constexpr size_t kValueBytesMax = 1024;
constexpr size_t kTenantBytesMax = 128;
constexpr size_t kReasonBytesMax = 512;

absl::Status CheckSizes(const KeyspaceRegistry::Description& description) {
  if (description.fields.size() > kFieldsMax) {
    return absl::InvalidArgumentError(
        fmt::format("fields has {} entries, at most {}", description.fields.size(), kFieldsMax));
  }
  for (const auto& [name, value] : description.fields) {
    if (name.size() > kNameBytesMax || value.size() > kValueBytesMax) {
      return absl::InvalidArgumentError(
          fmt::format("fields: name or value of '{}' is longer than {} or {} bytes",
                      name.substr(0, kNameBytesMax), kNameBytesMax, kValueBytesMax));
    }
  }
  if (description.tenant.size() > kTenantBytesMax) {
    return absl::InvalidArgumentError(fmt::format("tenant is {} bytes long, at most {}",
                                                  description.tenant.size(), kTenantBytesMax));
  }
  return absl::OkStatus();
}

v1::KeyspaceState ToProto(ServingState state) {
  return state == ServingState::kBf16 ? v1::KEYSPACE_STATE_BF16 : v1::KEYSPACE_STATE_ACTIVE;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KeyspaceRegistry>> KeyspaceRegistry::Open(
    storage::TieredStore& store, std::string secret, ModelTokens& tokens, size_t keyspaces_max) {
  std::unique_ptr<KeyspaceRegistry> registry(
      new KeyspaceRegistry(store, std::move(secret), tokens, keyspaces_max));
  CRUMB_ASSIGN_OR_RETURN(const auto records, store.Records());
  for (const auto& [name, value] : records) {
    if (!name.starts_with(kRecordPrefix)) continue;
    // One damaged record loses one keyspace's pages, not the node.
    const absl::Status loaded = registry->Load(name, value);
    if (!loaded.ok()) LogWarning("record {} is left out: {}", name, loaded.ToString());
  }
  return registry;
}

absl::StatusOr<KeyspaceId> KeyspaceRegistry::IdOf(const Description& description) const {
  CRUMB_RETURN_IF_ERROR(CheckSizes(description));
  CRUMB_RETURN_IF_ERROR(description.geometry.Validate());
  KeyspaceDescription canonical;
  const Geometry& geometry = description.geometry;
  CRUMB_RETURN_IF_ERROR(canonical.Set("layers", std::to_string(geometry.layers)));
  CRUMB_RETURN_IF_ERROR(canonical.Set("kv_heads", std::to_string(geometry.kv_heads)));
  CRUMB_RETURN_IF_ERROR(canonical.Set("head_dim", std::to_string(geometry.head_dim)));
  CRUMB_RETURN_IF_ERROR(canonical.Set("group_size", std::to_string(geometry.group_size)));
  CRUMB_RETURN_IF_ERROR(
      canonical.Set("tenant_salt", HexEncode(HmacSha256(secret_, description.tenant))));
  for (const auto& [name, value] : description.fields) {
    if (canonical.fields().contains(name)) {
      return absl::InvalidArgumentError("fields: '" + name + "' is set by crumbd");
    }
    CRUMB_RETURN_IF_ERROR(canonical.Set(name, value));
  }
  return canonical.Id();
}

std::shared_ptr<Keyspace> KeyspaceRegistry::Find(const KeyspaceId& id) const {
  MutexLock lock(&mutex_);
  const auto found = keyspaces_.find(id);
  return found == keyspaces_.end() ? nullptr : found->second;
}

absl::StatusOr<std::shared_ptr<Keyspace>> KeyspaceRegistry::OpenKeyspace(
    const Description& description) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId id, IdOf(description));
  MutexLock changing(&changing_);
  if (auto found = Find(id)) return found;
  if (List().size() >= keyspaces_max_) {
    return absl::ResourceExhaustedError(
        fmt::format("{} keyspaces are open, limits.keyspaces_max allows no more", keyspaces_max_));
  }
  const auto keyspace = Make(id, description.fields, description.geometry);
  CRUMB_RETURN_IF_ERROR(
      Persist(*keyspace, keyspace->generation.load(), keyspace->state.load(), StateReason()));
  MutexLock lock(&mutex_);
  keyspaces_.emplace(id, keyspace);
  return keyspace;
}

absl::Status KeyspaceRegistry::SetState(const KeyspaceId& id, ServingState state,
                                        const StateReason& why) {
  if (why.who.size() > kReasonBytesMax || why.reason.size() > kReasonBytesMax) {
    return absl::InvalidArgumentError(
        fmt::format("who and reason may have {} bytes", kReasonBytesMax));
  }
  MutexLock changing(&changing_);
  const auto keyspace = Find(id);
  if (keyspace == nullptr) return absl::NotFoundError("unknown keyspace " + id.ToHex());
  CRUMB_RETURN_IF_ERROR(Persist(*keyspace, keyspace->generation.load(), state, why));
  keyspace->state.store(state);
  MutexLock lock(&mutex_);
  reasons_[id] = why;
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> KeyspaceRegistry::RaiseGeneration(const KeyspaceId& id) {
  MutexLock changing(&changing_);
  const auto keyspace = Find(id);
  if (keyspace == nullptr) return absl::NotFoundError("unknown keyspace " + id.ToHex());
  const uint64_t raised = keyspace->generation.load() + 1;
  // The record first: a crash in between drops pages again, never serves dropped ones.
  CRUMB_RETURN_IF_ERROR(Persist(*keyspace, raised, keyspace->state.load(), ReasonOf(id)));
  keyspace->generation.store(raised);
  return raised;
}

std::vector<std::shared_ptr<Keyspace>> KeyspaceRegistry::List() const {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Keyspace>> list;
  for (const auto& [id, keyspace] : keyspaces_) list.push_back(keyspace);
  return list;
}

KeyspaceRegistry::StateReason KeyspaceRegistry::ReasonOf(const KeyspaceId& id) const {
  MutexLock lock(&mutex_);
  const auto found = reasons_.find(id);
  return found == reasons_.end() ? StateReason() : found->second;
}

absl::Status KeyspaceRegistry::Load(const std::string& name, const std::string& value) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId id,
                         KeyspaceId::FromHex(std::string_view(name).substr(kRecordPrefix.size())));
  v1::KeyspaceRecord record;
  if (!record.ParseFromString(value)) return absl::DataLossError("not a keyspace record");
  const Geometry geometry{record.layers(), record.kv_heads(), record.head_dim(),
                          record.group_size()};
  CRUMB_RETURN_IF_ERROR(geometry.Validate());
  if (record.generation() == 0) return absl::DataLossError("the record has no generation");
  const auto keyspace = Make(id, {record.fields().begin(), record.fields().end()}, geometry);
  keyspace->generation.store(record.generation());
  keyspace->state.store(record.state() == v1::KEYSPACE_STATE_BF16 ? ServingState::kBf16
                                                                  : ServingState::kActive);
  MutexLock lock(&mutex_);
  keyspaces_.emplace(id, keyspace);
  reasons_[id] = {record.state_who(), record.state_reason()};
  return absl::OkStatus();
}

absl::Status KeyspaceRegistry::Persist(const Keyspace& keyspace, uint64_t generation,
                                       ServingState state, const StateReason& why) {
  v1::KeyspaceRecord record;
  record.mutable_fields()->insert(keyspace.fields.begin(), keyspace.fields.end());
  record.set_layers(keyspace.geometry.layers);
  record.set_kv_heads(keyspace.geometry.kv_heads);
  record.set_head_dim(keyspace.geometry.head_dim);
  record.set_group_size(keyspace.geometry.group_size);
  record.set_generation(generation);
  record.set_state(ToProto(state));
  record.set_state_who(why.who);
  record.set_state_reason(why.reason);
  return store_.PutRecord(std::string(kRecordPrefix) + keyspace.id.ToHex(),
                          record.SerializeAsString());
}

std::shared_ptr<Keyspace> KeyspaceRegistry::Make(const KeyspaceId& id,
                                                 std::map<std::string, std::string> fields,
                                                 const Geometry& geometry) {
  auto keyspace = std::make_shared<Keyspace>();
  keyspace->id = id;
  keyspace->geometry = geometry;
  const auto model = fields.find("model");
  keyspace->model = model == fields.end() ? "unnamed" : model->second;
  const auto format = fields.find("format");
  keyspace->int2_history = format == fields.end() || format->second != "bf16";
  keyspace->fields = std::move(fields);
  keyspace->tokens = &tokens_.Of(keyspace->model);
  return keyspace;
}

}  // namespace crumb::server
