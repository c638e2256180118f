// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/keyspaces/keyspace_registry.h"

#include <algorithm>
#include <charconv>

#include "common/hex.h"
#include "common/keyspace.h"
#include "common/limited_log.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "crumb/v1/record.pb.h"
#include "fmt/format.h"
#include "server/base/wire_enums.h"

namespace crumb::server {
namespace {

constexpr std::string_view kRecordPrefix = "keyspace/";
constexpr char kFloorRecord[] = "keyspace-generation-floor";  // a decimal number
// Times of last use are written when they are older than this part of limits.keyspace_idle_max.
constexpr int kUseWritesPerIdleTime = 16;
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

}  // namespace

absl::StatusOr<std::unique_ptr<KeyspaceRegistry>> KeyspaceRegistry::Open(
    storage::TieredStore& store, std::string secret, ModelTokens& tokens, size_t keyspaces_max,
    Slabs slabs, int64_t part_max_percent) {
  std::unique_ptr<KeyspaceRegistry> registry(new KeyspaceRegistry(
      store, std::move(secret), tokens, keyspaces_max, slabs, part_max_percent));
  CRUMB_ASSIGN_OR_RETURN(const auto records, store.Records());
  for (const auto& [name, value] : records) {
    if (name == kFloorRecord) CRUMB_RETURN_IF_ERROR(registry->LoadFloor(value));
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
  if (auto found = Find(id)) {
    if (found->tenant == description.tenant) return found;
    return Adopt(id, description.tenant);
  }
  const TenantBudget::Taken taken = budget_.Take(description.tenant);
  if (taken != TenantBudget::Taken::kYes) {
    return TenantBudget::Error(taken, "limits.keyspaces_max");
  }
  v1::KeyspaceRecord record;
  record.mutable_fields()->insert(description.fields.begin(), description.fields.end());
  record.set_layers(description.geometry.layers);
  record.set_kv_heads(description.geometry.kv_heads);
  record.set_head_dim(description.geometry.head_dim);
  record.set_group_size(description.geometry.group_size);
  record.set_generation(generation_floor_);
  record.set_state(v1::KEYSPACE_STATE_ACTIVE);
  record.set_tenant(description.tenant);
  absl::Status applied = RemoveLeftovers(id);
  if (applied.ok()) applied = Apply(id, record);
  if (!applied.ok()) {
    budget_.Give(description.tenant);
    return applied;
  }
  NotifyChange(id);
  return Find(id);
}

absl::StatusOr<std::shared_ptr<Keyspace>> KeyspaceRegistry::Adopt(const KeyspaceId& id,
                                                                  const std::string& tenant) {
  v1::KeyspaceRecord record = RecordOf(id);
  record.set_tenant(tenant);
  CRUMB_RETURN_IF_ERROR(Apply(id, record));
  NotifyChange(id);
  return Find(id);
}

absl::Status KeyspaceRegistry::RemoveLeftovers(const KeyspaceId& id) {
  // Device pools hold none: a process claims slots of a keyspace after it has opened it.
  if (store_.KeyspaceBytes(id) == 0) return absl::OkStatus();
  std::vector<PageKey> keys;
  store_.ForEachPage(id, [&keys](const PageKey& key, Tier) { keys.push_back(key); });
  LogWarning("keyspace {} has no record: its {} pages are removed before it is opened", id.ToHex(),
             keys.size());
  return store_.Delete(id, keys).status();
}

absl::Status KeyspaceRegistry::SetState(const KeyspaceId& id, KeyspaceState state,
                                        const StateReason& why) {
  if (why.who.size() > kReasonBytesMax || why.reason.size() > kReasonBytesMax) {
    return absl::InvalidArgumentError(
        fmt::format("who and reason may have {} bytes", kReasonBytesMax));
  }
  MutexLock changing(&changing_);
  if (Find(id) == nullptr) return absl::NotFoundError("unknown keyspace " + id.ToHex());
  v1::KeyspaceRecord record = RecordOf(id);
  record.set_state(ToProto(state));
  record.set_state_who(why.who);
  record.set_state_reason(why.reason);
  record.set_state_version(record.state_version() + 1);
  CRUMB_RETURN_IF_ERROR(Apply(id, record));
  NotifyChange(id);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> KeyspaceRegistry::RaiseGeneration(const KeyspaceId& id) {
  MutexLock changing(&changing_);
  if (Find(id) == nullptr) return absl::NotFoundError("unknown keyspace " + id.ToHex());
  v1::KeyspaceRecord record = RecordOf(id);
  record.set_generation(record.generation() + 1);
  CRUMB_RETURN_IF_ERROR(Apply(id, record));
  NotifyChange(id);
  return record.generation();
}

absl::Status KeyspaceRegistry::NoteDeletion(const KeyspaceId& id, const std::string& node,
                                            const std::vector<PageKey>& keys, size_t keys_max) {
  MutexLock changing(&changing_);
  if (Find(id) == nullptr) return absl::NotFoundError("unknown keyspace " + id.ToHex());
  v1::KeyspaceRecord record = RecordOf(id);
  AddDeletion(record, node, keys, keys_max);
  CRUMB_RETURN_IF_ERROR(Apply(id, record));
  NotifyChange(id);
  return absl::OkStatus();
}

absl::StatusOr<KeyspaceChanges> KeyspaceRegistry::PreviewMerge(
    const KeyspaceId& id, const v1::KeyspaceRecord& record) const {
  CRUMB_RETURN_IF_ERROR(CheckRecord(record));
  KeyspaceChanges changes;
  if (Find(id) == nullptr) {
    changes.any = true;
    return changes;
  }
  v1::KeyspaceRecord merged = RecordOf(id);
  return MergeKeyspace(merged, record);
}

absl::StatusOr<KeyspaceChanges> KeyspaceRegistry::Merge(const KeyspaceId& id,
                                                        const v1::KeyspaceRecord& record,
                                                        size_t keys_max) {
  CRUMB_RETURN_IF_ERROR(CheckRecord(record));
  MutexLock changing(&changing_);
  KeyspaceChanges changes;
  if (Find(id) == nullptr) {
    const TenantBudget::Taken taken = budget_.Take(record.tenant());
    if (taken != TenantBudget::Taken::kYes) {
      return TenantBudget::Error(taken, "limits.keyspaces_max");
    }
    v1::KeyspaceRecord fresh = record;
    ForgetDeletions(fresh, keys_max);
    absl::Status applied = RemoveLeftovers(id);
    if (applied.ok()) applied = Apply(id, fresh);
    if (!applied.ok()) {
      budget_.Give(record.tenant());
      return applied;
    }
    changes.any = true;
    return changes;
  }
  v1::KeyspaceRecord merged = RecordOf(id);
  changes = MergeKeyspace(merged, record);
  changes.any |= ForgetDeletions(merged, keys_max);
  if (changes.any) CRUMB_RETURN_IF_ERROR(Apply(id, merged));
  return changes;
}

size_t KeyspaceRegistry::EndUnused(const Unused& unused) {
  size_t ended = 0;
  for (std::shared_ptr<Keyspace>& listed : List()) {
    const std::shared_ptr<Keyspace> keyspace = std::move(listed);
    const absl::StatusOr<bool> done = EndIfUnused(keyspace, unused);
    if (done.ok() && *done) ++ended;
    if (!done.ok()) {
      LogWarning("keyspace {} cannot be looked after: {}", keyspace->id.ToHex(),
                 done.status().ToString());
    }
  }
  return ended;
}

absl::StatusOr<bool> KeyspaceRegistry::EndIfUnused(const std::shared_ptr<Keyspace>& keyspace,
                                                   const Unused& unused) {
  MutexLock changing(&changing_);
  const TimePoint used = keyspace->used.load();
  CRUMB_ASSIGN_OR_RETURN(const uint64_t last_used_s, NoteLastUse(*keyspace, unused));
  const std::chrono::system_clock::time_point last_used{
      std::chrono::seconds(static_cast<int64_t>(last_used_s))};
  if (unused.wall_now - last_used < unused.idle_max) return false;
  if (!MayEnd(keyspace, RecordOf(keyspace->id), unused.in_cluster)) return false;
  {
    MutexLock lock(&mutex_);
    if (keyspace.use_count() > 2 || keyspace->used.load() != used) return false;
    keyspaces_.erase(keyspace->id);
  }
  // No call finds it any more; one that opens it waits for changing_, and gets a new record.
  const absl::Status ended = EndOne(*keyspace);
  if (!ended.ok()) {
    MutexLock lock(&mutex_);
    keyspaces_.emplace(keyspace->id, keyspace);
    return ended;
  }
  return true;
}

absl::StatusOr<uint64_t> KeyspaceRegistry::NoteLastUse(const Keyspace& keyspace,
                                                       const Unused& unused) {
  using std::chrono::seconds;
  const auto unix_seconds = [](std::chrono::system_clock::time_point at) {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<seconds>(at.time_since_epoch()).count());
  };
  v1::KeyspaceRecord record = RecordOf(keyspace.id);
  const TimePoint used = keyspace.used.load();
  uint64_t last_used = record.last_used_unix_s();
  if (used != TimePoint()) {
    const auto ago = std::chrono::duration_cast<std::chrono::system_clock::duration>(
        std::max(unused.now - used, Duration::zero()));
    last_used = std::max(last_used, unix_seconds(unused.wall_now - ago));
  } else if (last_used == 0) {
    last_used = unix_seconds(unused.wall_now);  // a record that is new, or without the field
  }
  const auto step =
      std::chrono::duration_cast<seconds>(unused.idle_max).count() / kUseWritesPerIdleTime;
  if (last_used > record.last_used_unix_s() + static_cast<uint64_t>(step)) {
    record.set_last_used_unix_s(last_used);
    CRUMB_RETURN_IF_ERROR(Apply(keyspace.id, record));
  }
  return last_used;
}

bool KeyspaceRegistry::MayEnd(const std::shared_ptr<Keyspace>& keyspace,
                              const v1::KeyspaceRecord& record, bool in_cluster) const {
  if (keyspace.use_count() > 2) return false;  // a call has it
  if (record.state() != v1::KEYSPACE_STATE_ACTIVE) return false;
  const bool remembers = record.generation() > 1 || record.deletions_size() > 0 ||
                         !record.forgotten_deletions().empty();
  if (in_cluster && remembers) return false;
  bool has_pages = store_.KeyspaceBytes(keyspace->id) > 0;
  if (!has_pages) {  // only pages in device pools remain to be checked
    store_.ForEachPage(keyspace->id, [&](const PageKey&, Tier) { has_pages = true; });
  }
  return !has_pages;
}

absl::Status KeyspaceRegistry::EndOne(const Keyspace& keyspace) {
  const uint64_t generation = keyspace.generation.load();
  if (generation > generation_floor_) {
    CRUMB_RETURN_IF_ERROR(store_.PutRecord(kFloorRecord, std::to_string(generation)));
    generation_floor_ = generation;
  }
  CRUMB_RETURN_IF_ERROR(
      store_.PutRecord(std::string(kRecordPrefix) + keyspace.id.ToHex(), std::string()));
  LogInfoLimited("keyspace {} of model {} has ended: it was unused", keyspace.id.ToHex(),
                 keyspace.model);
  budget_.Give(keyspace.tenant);
  store_.ForgetOwner(keyspace.id);
  MutexLock lock(&mutex_);
  records_.erase(keyspace.id);
  ForgetChange(keyspace.id);
  return absl::OkStatus();
}

KeyspaceRegistry::RecordPage KeyspaceRegistry::RecordsAfter(uint64_t after,
                                                            size_t bytes_max) const {
  RecordPage page;
  size_t bytes = 0;
  MutexLock lock(&mutex_);
  page.next = version_.load();
  for (auto change = by_change_.upper_bound(after); change != by_change_.end(); ++change) {
    const auto found = records_.find(change->second);
    if (found == records_.end()) continue;
    bytes += found->second.ByteSizeLong() + sizeof(KeyspaceId);
    if (page.records.size() == kPageRecords || (!page.records.empty() && bytes > bytes_max)) {
      page.next = std::prev(change)->first;
      page.more = true;
      break;
    }
    page.records.emplace_back(found->first, found->second);
  }
  return page;
}

void KeyspaceRegistry::NoteChange(const KeyspaceId& id) {
  const uint64_t number = version_.fetch_add(1) + 1;
  uint64_t& changed_at = changed_at_[id];
  by_change_.erase(changed_at);
  changed_at = number;
  by_change_.emplace(number, id);
}

void KeyspaceRegistry::ForgetChange(const KeyspaceId& id) {
  version_.fetch_add(1);
  const auto found = changed_at_.find(id);
  if (found == changed_at_.end()) return;
  by_change_.erase(found->second);
  changed_at_.erase(found);
}

v1::KeyspaceRecord KeyspaceRegistry::HeadOf(const KeyspaceId& id) const {
  v1::KeyspaceRecord head;
  MutexLock lock(&mutex_);
  const auto found = records_.find(id);
  if (found == records_.end()) return head;
  const v1::KeyspaceRecord& record = found->second;
  *head.mutable_fields() = record.fields();
  head.set_layers(record.layers());
  head.set_kv_heads(record.kv_heads());
  head.set_head_dim(record.head_dim());
  head.set_group_size(record.group_size());
  head.set_generation(record.generation());
  head.set_state(record.state());
  head.set_state_who(record.state_who());
  head.set_state_reason(record.state_reason());
  head.set_state_version(record.state_version());
  head.set_tenant(record.tenant());
  return head;
}

v1::KeyspaceRecord KeyspaceRegistry::RecordOf(const KeyspaceId& id) const {
  MutexLock lock(&mutex_);
  const auto found = records_.find(id);
  return found == records_.end() ? v1::KeyspaceRecord() : found->second;
}

std::vector<std::shared_ptr<Keyspace>> KeyspaceRegistry::List() const {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Keyspace>> list;
  for (const auto& [id, keyspace] : keyspaces_) list.push_back(keyspace);
  return list;
}

std::vector<std::shared_ptr<Keyspace>> KeyspaceRegistry::ListOf(const std::string& tenant) const {
  MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<Keyspace>> list;
  for (const auto& [id, keyspace] : keyspaces_) {
    if (keyspace->tenant == tenant) list.push_back(keyspace);
  }
  return list;
}

size_t KeyspaceRegistry::withheld_keyspaces() const {
  MutexLock lock(&mutex_);
  return static_cast<size_t>(std::count_if(keyspaces_.begin(), keyspaces_.end(),
                                           [](const auto& one) { return one.second->unsynced(); }));
}

KeyspaceRegistry::StateReason KeyspaceRegistry::ReasonOf(const KeyspaceId& id) const {
  MutexLock lock(&mutex_);
  const auto found = records_.find(id);
  if (found == records_.end()) return {};
  return {found->second.state_who(), found->second.state_reason()};
}

absl::Status KeyspaceRegistry::LoadFloor(const std::string& value) {
  uint64_t floor = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), floor);
  // A lower floor could serve pages that were dropped.
  if (error != std::errc() || end != value.data() + value.size() || floor == 0) {
    return absl::DataLossError(std::string("record ") + kFloorRecord + " is not a number");
  }
  MutexLock changing(&changing_);
  generation_floor_ = floor;
  return absl::OkStatus();
}

absl::Status KeyspaceRegistry::Load(const std::string& name, const std::string& value) {
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId id,
                         KeyspaceId::FromHex(std::string_view(name).substr(kRecordPrefix.size())));
  v1::KeyspaceRecord record;
  if (!record.ParseFromString(value)) return absl::DataLossError("not a keyspace record");
  CRUMB_ASSIGN_OR_RETURN(const auto keyspace, MakeFrom(id, record));
  keyspace->recovered.store(true);
  CRUMB_RETURN_IF_ERROR(KeepApart(*keyspace));
  budget_.Add(keyspace->tenant, 1);
  MutexLock lock(&mutex_);
  keyspaces_.emplace(id, keyspace);
  records_[id] = record;
  NoteChange(id);
  return absl::OkStatus();
}

// The record first: a crash in between drops pages again, never serves dropped ones.
absl::Status KeyspaceRegistry::Apply(const KeyspaceId& id, const v1::KeyspaceRecord& record) {
  CRUMB_ASSIGN_OR_RETURN(auto keyspace, MakeFrom(id, record));
  CRUMB_RETURN_IF_ERROR(
      store_.PutRecord(std::string(kRecordPrefix) + id.ToHex(), record.SerializeAsString()));
  CRUMB_RETURN_IF_ERROR(KeepApart(*keyspace));
  MutexLock lock(&mutex_);
  const auto [known, added] = keyspaces_.emplace(id, keyspace);
  if (!added && known->second->tenant != keyspace->tenant) {
    budget_.Give(known->second->tenant);
    budget_.Add(keyspace->tenant, 1);
    keyspace->used.store(known->second->used.load());
    keyspace->recovered.store(known->second->recovered.load());
    known->second = keyspace;  // calls in progress end with the former one
  } else if (!added) {
    known->second->generation.store(keyspace->generation.load());
    known->second->state.store(keyspace->state.load());
  }
  records_[id] = record;
  NoteChange(id);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Keyspace>> KeyspaceRegistry::MakeFrom(
    const KeyspaceId& id, const v1::KeyspaceRecord& record) {
  auto keyspace = std::make_shared<Keyspace>();
  keyspace->id = id;
  keyspace->geometry = {record.layers(), record.kv_heads(), record.head_dim(), record.group_size()};
  CRUMB_RETURN_IF_ERROR(keyspace->geometry.Validate());
  if (record.generation() == 0) return absl::DataLossError("the record has no generation");
  keyspace->fields = {record.fields().begin(), record.fields().end()};
  const auto model = keyspace->fields.find("model");
  keyspace->model = model == keyspace->fields.end() ? "unnamed" : model->second;
  const auto format = keyspace->fields.find("format");
  keyspace->int2_history = format == keyspace->fields.end() || format->second != "bf16";
  keyspace->tenant = record.tenant();
  keyspace->tokens = &tokens_.Of(keyspace->model, keyspace->tenant);
  keyspace->withholding = withheld_;
  keyspace->generation.store(record.generation());
  keyspace->state.store(record.state() == v1::KEYSPACE_STATE_BF16 ? KeyspaceState::kBf16
                                                                  : KeyspaceState::kActive);
  return keyspace;
}

}  // namespace crumb::server
