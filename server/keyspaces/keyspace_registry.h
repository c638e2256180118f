// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "common/tenant_budget.h"
#include "crumb/v1/record.pb.h"
#include "server/keyspaces/keyspace.h"
#include "server/keyspaces/keyspace_merge.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// The keyspaces that this node knows, with generation and state, kept as records of the store. A
// record is written to disk before its change takes effect, so a change that was acknowledged
// survives a crash. The daemon owns it. Thread-safe.
//
// Locks: changing_ is held over a whole change, the write to disk included, so changes of records
// come one after the other and functions that make them block. mutex_ guards the maps and is held
// for moments, also by readers; it is taken behind changing_.
class KeyspaceRegistry {
 public:
  // A keyspace as a client describes it. The id is a hash of these fields, the geometry and a salt
  // of the tenant.
  struct Description {
    std::map<std::string, std::string> fields;
    Geometry geometry;
    std::string tenant;
  };
  // The person or program that set a keyspace's state, and why.
  struct StateReason {
    std::string who;
    std::string reason;
  };

  // Whether the store keeps pages of each tenant apart in host memory.
  enum class Slabs { kOfAll, kOfEachTenant };

  // Reads the records. `secret` makes the tenants' salts. `store` and `tokens` must outlive this. A
  // record that cannot be read is logged and left out: its keyspace's pages are removed when it is
  // opened again.
  static absl::StatusOr<std::unique_ptr<KeyspaceRegistry>> Open(
      storage::TieredStore& store, std::string secret, ModelTokens& tokens, size_t keyspaces_max,
      Slabs slabs = Slabs::kOfAll, int64_t part_max_percent = 100);

  // The id that a description gives. kInvalidArgument: a field or the geometry.
  absl::StatusOr<KeyspaceId> IdOf(const Description& description) const;

  // Returns the keyspace; null when it is not known. Does not block on the disk.
  std::shared_ptr<Keyspace> Find(const KeyspaceId& id) const;

  // Opens a keyspace, for the first time or again. Writes a record the first time: blocks.
  // kResourceExhausted: too many keyspaces, or too many of the tenant.
  absl::StatusOr<std::shared_ptr<Keyspace>> OpenKeyspace(const Description& description);

  // Sets and persists the state. Blocks. kNotFound.
  absl::Status SetState(const KeyspaceId& id, KeyspaceState state, const StateReason& why);

  // Raises and persists the generation; returns the new one. Blocks. kNotFound.
  absl::StatusOr<uint64_t> RaiseGeneration(const KeyspaceId& id);

  // Notes that node `node` deletes pages, for nodes that are away. Blocks. kNotFound.
  absl::Status NoteDeletion(const KeyspaceId& id, const std::string& node,
                            const std::vector<PageKey>& keys, size_t keys_max);

  // Returns the changes that Merge would make, and makes none. Does not block.
  absl::StatusOr<KeyspaceChanges> PreviewMerge(const KeyspaceId& id,
                                               const v1::KeyspaceRecord& record) const;

  // Takes over another node's record: opens the keyspace if it is not known here. `keys_max`
  // bounds the deletions that the merged record lists. Blocks. kInvalidArgument: not a keyspace, or
  // a record beyond CheckRecord's bounds; kResourceExhausted: too many keyspaces, and this one is
  // not known here.
  // REQUIRES: the pages that PreviewMerge of the same arguments named as deleted are durably
  // removed from the store. Once the merged record is durable, a deletion is never named again, so
  // a crash in between would bring the pages back. The caller raises the store's generation
  // afterwards if the result says so; a crash before that is harmless, because the record's
  // generation alone makes older pages misses.
  absl::StatusOr<KeyspaceChanges> Merge(const KeyspaceId& id, const v1::KeyspaceRecord& record,
                                        size_t keys_max = kDeletionKeysMax);

  // The rules of EndUnused.
  struct Unused {
    Duration idle_max{};  // a keyspace that no call has named for so long is unused
    TimePoint now;
    std::chrono::system_clock::time_point wall_now;
    // Other nodes may still hold pages that were dropped or deleted here: a record that remembers
    // such a thing stays.
    bool in_cluster = false;
  };
  // Ends the keyspaces that are unused and that nothing needs: without pages in any tier, without
  // calls in progress, in state active, and not remembered for the sake of other nodes. Their
  // records are removed durably, and a tenant may open others in their place. Opening such a
  // keyspace again makes a new one. Also notes durably when the others were last used. Returns how
  // many have ended. Blocks.
  //
  // Pages of a dropped generation do not come back: before a record goes, the node's generation
  // floor is raised to the record's generation, durably, and keyspaces that are opened for the
  // first time begin at the floor. One number stands for all keyspaces that have ended.
  size_t EndUnused(const Unused& unused);

  // Records of a page; a node that takes them over writes each to disk within one call's deadline.
  static constexpr size_t kPageRecords = 64;

  // Records in the order of their latest changes.
  struct RecordPage {
    std::vector<std::pair<KeyspaceId, v1::KeyspaceRecord>> records;
    uint64_t next = 0;  // RecordsAfter(next) continues behind this page
    bool more = false;  // there are records behind this page
  };
  // The records that changed after change number `after` (0: all of them), the earliest change
  // first: at most kPageRecords, as many as `bytes_max` bytes hold but at least one. A record that
  // changes while a caller goes through the pages comes again, behind them. Does not block.
  RecordPage RecordsAfter(uint64_t after, size_t bytes_max) const;

  // Sets which keyspaces' pages are withheld. Thread-safe.
  void Withhold(Withholding withheld) { withheld_->store(withheld); }
  Withholding withheld() const { return withheld_->load(); }
  // Number of keyspaces whose pages are withheld.
  size_t withheld_keyspaces() const;

  // Returns a keyspace's record without its deletions: 70 KiB at most. Empty when it is not known.
  v1::KeyspaceRecord HeadOf(const KeyspaceId& id) const;
  // Returns a keyspace's record; empty when it is not known.
  v1::KeyspaceRecord RecordOf(const KeyspaceId& id) const;

  // The number of the latest change; grows with every change of a record.
  uint64_t version() const { return version_.load(); }
  // Called after changes that began here, on the thread that made them. Set before use.
  void OnChange(std::function<void(const KeyspaceId&)> changed) { changed_ = std::move(changed); }

  // Returns all keyspaces, or those of a tenant, in no order.
  std::vector<std::shared_ptr<Keyspace>> List() const;
  std::vector<std::shared_ptr<Keyspace>> ListOf(const std::string& tenant) const;
  // Returns who set the keyspace's state and why; empty if no process did.
  StateReason ReasonOf(const KeyspaceId& id) const;

 private:
  KeyspaceRegistry(storage::TieredStore& store, std::string secret, ModelTokens& tokens,
                   size_t keyspaces_max, Slabs slabs, int64_t part_max_percent)
      : store_(store),
        secret_(std::move(secret)),
        tokens_(tokens),
        slabs_(slabs),
        budget_(keyspaces_max, part_max_percent) {}

  // Before the keyspace can be found with this tenant.
  absl::Status KeepApart(const Keyspace& keyspace) const {
    store_.SetOwner(keyspace.id, keyspace.tenant);
    if (slabs_ == Slabs::kOfAll) return absl::OkStatus();
    return store_.SetTenant(keyspace.id, keyspace.tenant);
  }

  // Notes the tenant that the id was made for, in a record of before tenants were noted.
  absl::StatusOr<std::shared_ptr<Keyspace>> Adopt(const KeyspaceId& id, const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(changing_);
  // Removes pages of a keyspace that has no record, as after its record was damaged: no generation
  // says which of them were dropped. REQUIRES: the keyspace is not open.
  absl::Status RemoveLeftovers(const KeyspaceId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(changing_);
  // Reads a keyspace's record, and the generation floor, at the start.
  absl::Status Load(const std::string& name, const std::string& value);
  absl::Status LoadFloor(const std::string& value);
  // Applies EndUnused to one keyspace. Returns whether it has ended.
  absl::StatusOr<bool> EndIfUnused(const std::shared_ptr<Keyspace>& keyspace, const Unused& unused);
  // Whether nothing but time keeps an unused keyspace; `keyspace` is the only reference beside the
  // registry's own.
  bool MayEnd(const std::shared_ptr<Keyspace>& keyspace, const v1::KeyspaceRecord& record,
              bool in_cluster) const;
  // Persists when a keyspace was last used, if that is news worth a write.
  absl::StatusOr<uint64_t> NoteLastUse(const Keyspace& keyspace, const Unused& unused)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(changing_);
  // Removes record and keyspace.
  absl::Status EndOne(const Keyspace& keyspace) ABSL_EXCLUSIVE_LOCKS_REQUIRED(changing_);
  // Gives the record of `id` the next change number.
  void NoteChange(const KeyspaceId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The record of `id` is gone: no page of records names it any more.
  void ForgetChange(const KeyspaceId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Persists and applies a record.
  absl::Status Apply(const KeyspaceId& id, const v1::KeyspaceRecord& record)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(changing_);
  // Makes the object of a record. kInvalidArgument: the record's fields do not give `id`.
  absl::StatusOr<std::shared_ptr<Keyspace>> MakeFrom(const KeyspaceId& id,
                                                     const v1::KeyspaceRecord& record);
  // Calls the function of OnChange. changing_ is held.
  void NotifyChange(const KeyspaceId& id) const {
    if (changed_) changed_(id);
  }

  storage::TieredStore& store_;
  const std::string secret_;
  ModelTokens& tokens_;
  const Slabs slabs_;
  TenantBudget budget_;  // keyspaces by the tenant in their records
  std::function<void(const KeyspaceId&)> changed_;
  std::atomic<uint64_t> version_{1};
  const std::shared_ptr<std::atomic<Withholding>> withheld_ =
      std::make_shared<std::atomic<Withholding>>(Withholding::kNothing);

  Mutex changing_;  // held over reading, persisting and applying a change
  // Generation that new keyspaces begin with; no keyspace that has ended had a higher one.
  uint64_t generation_floor_ ABSL_GUARDED_BY(changing_) = 1;
  mutable Mutex mutex_;
  std::unordered_map<KeyspaceId, std::shared_ptr<Keyspace>> keyspaces_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<KeyspaceId, v1::KeyspaceRecord> records_ ABSL_GUARDED_BY(mutex_);
  // Records by the number of their latest change, and the number by keyspace.
  std::map<uint64_t, KeyspaceId> by_change_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<KeyspaceId, uint64_t> changed_at_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
