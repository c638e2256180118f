// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/record_merger.h"

#include <set>

#include "gtest/gtest.h"
#include "tests/server/memory_store.h"

namespace crumb::server {
namespace {

using RecordMap = MemoryStore::RecordMap;

// The contents of a disk: records and the keys of pages.
struct DiskState {
  RecordMap records;
  std::set<PageKey> pages;
};

// A store whose pages and records are on a disk. It keeps a copy of the disk after each write,
// which is the state after a crash at that point.
class DiskStore final : public MemoryStore {
 public:
  explicit DiskStore(const DiskState& disk)
      : DiskStore(disk, std::make_shared<RecordMap>(disk.records)) {}

  absl::Status PutRecord(const std::string& name, const std::string& value) override {
    const absl::Status put = MemoryStore::PutRecord(name, value);
    Note();
    return put;
  }
  absl::StatusOr<uint32_t> Delete(const KeyspaceId&, std::span<const PageKey> keys) override {
    if (fails) return absl::UnavailableError("no space left on device");
    uint32_t deleted = 0;
    for (const PageKey& key : keys) deleted += static_cast<uint32_t>(pages_.erase(key));
    Note();
    return deleted;
  }
  uint64_t KeyspaceBytes(const KeyspaceId&) const override { return pages_.size(); }
  void ForEachPage(const KeyspaceId&,
                   const std::function<void(const PageKey&, Tier)>& visit) override {
    const std::set<PageKey> pages = pages_;
    for (const PageKey& key : pages) visit(key, Tier::kSsd);
  }

  DiskState disk() const { return {*records_, pages_}; }

  bool fails = false;  // Delete
  std::vector<DiskState> crashes;

 private:
  DiskStore(const DiskState& disk, const std::shared_ptr<RecordMap>& records)
      : MemoryStore(1, 4096, {}, records), records_(records), pages_(disk.pages) {}
  void Note() { crashes.push_back(disk()); }

  const std::shared_ptr<RecordMap> records_;
  std::set<PageKey> pages_;
};

// One run of a node on a disk.
struct Node {
  explicit Node(const DiskState& disk) : store(disk) {}

  absl::Status Merge(const KeyspaceId& id, const v1::KeyspaceRecord& record) {
    v1::KeyspaceEntry entry;
    entry.set_keyspace(std::string(id.view()));
    *entry.mutable_record() = record;
    return merger.Merge({entry});
  }

  DiskStore store;
  ModelTokens tokens{2};
  ClusterMetrics metrics;
  std::unique_ptr<KeyspaceRegistry> keyspaces =
      KeyspaceRegistry::Open(store, "secret of sixteen", tokens, 8).value();
  RecordMerger merger{{store, *keyspaces, metrics, kDeletionKeysMax, [](const KeyspaceId&) {}}};
};

PageKey Key(uint8_t number) {
  PageKey key;
  key.bytes.fill(number);
  return key;
}

class RecordMergerTest : public testing::Test {
 protected:
  RecordMergerTest() {
    Node node({});
    id_ = node.keyspaces->OpenKeyspace({{{"model", "a"}}, {4, 2, 128, 128}, ""}).value()->id;
    disk_ = node.store.disk();
    disk_.pages = {Key(1), Key(2), Key(3)};
    theirs_ = node.keyspaces->RecordOf(id_);
  }

  // Merges `theirs_`, and again in every state in which a crash could have left the disk. The pages
  // of `gone` are on the disk no more in the end, and the others are.
  void ExpectGoneWhereverItCrashes(const std::set<PageKey>& gone) {
    Node whole(disk_);
    ASSERT_TRUE(whole.Merge(id_, theirs_).ok());
    whole.store.crashes.push_back(disk_);
    EXPECT_GE(whole.store.crashes.size(), 3u);
    for (const DiskState& crash : whole.store.crashes) {
      Node next(crash);
      EXPECT_TRUE(next.Merge(id_, theirs_).ok());
      for (const PageKey& key : disk_.pages) {
        EXPECT_NE(next.store.disk().pages.contains(key), gone.contains(key));
      }
    }
  }

  KeyspaceId id_;
  DiskState disk_;
  v1::KeyspaceRecord theirs_;
};

TEST_F(RecordMergerTest, ADeletionSurvivesACrashAtAnyPoint) {
  AddDeletion(theirs_, "other", {Key(2)}, kDeletionKeysMax);
  ExpectGoneWhereverItCrashes({Key(2)});
}

TEST_F(RecordMergerTest, AForgottenDeletionSurvivesACrashAtAnyPoint) {
  AddDeletion(theirs_, "other", {Key(2)}, 0);
  ExpectGoneWhereverItCrashes({Key(1), Key(2), Key(3)});
}

TEST_F(RecordMergerTest, ADeletionThatIsNotDurableIsNotTakenOver) {
  AddDeletion(theirs_, "other", {Key(2)}, kDeletionKeysMax);
  Node node(disk_);
  node.store.fails = true;
  EXPECT_TRUE(absl::IsUnavailable(node.Merge(id_, theirs_)));
  EXPECT_EQ(node.keyspaces->RecordOf(id_).deletions_size(), 0);
  EXPECT_EQ(node.metrics.records_refused.value(), 1u);
  node.store.fails = false;
  EXPECT_TRUE(node.Merge(id_, theirs_).ok());
  EXPECT_EQ(node.keyspaces->RecordOf(id_).deletions_size(), 1);
  EXPECT_FALSE(node.store.disk().pages.contains(Key(2)));
}

TEST_F(RecordMergerTest, PagesWithoutARecordGoBeforeTheirKeyspaceIsOpened) {
  disk_.records.clear();  // simulates damage
  Node node(disk_);
  ASSERT_TRUE(node.Merge(id_, theirs_).ok());
  EXPECT_TRUE(node.store.disk().pages.empty());
}

}  // namespace
}  // namespace crumb::server
