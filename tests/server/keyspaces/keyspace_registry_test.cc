// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/keyspaces/keyspace_registry.h"

#include <functional>

#include "common/status_macros.h"
#include "gtest/gtest.h"
#include "server/daemon/node_records.h"
#include "tests/server/memory_store.h"

namespace crumb::server {
namespace {

class KeyspaceRegistryTest : public testing::Test {
 protected:
  // Another start of crumbd over the same records.
  std::unique_ptr<KeyspaceRegistry> Open(const std::string& secret = "secret of sixteen") {
    return KeyspaceRegistry::Open(store_, secret, tokens_, 3).value();
  }
  static KeyspaceRegistry::Description Description(const std::string& model,
                                                   const std::string& tenant = "") {
    return {{{"model", model}, {"format", "int2"}}, {4, 2, 128, 128}, tenant};
  }

  std::shared_ptr<MemoryStore::RecordMap> records_ = std::make_shared<MemoryStore::RecordMap>();
  MemoryStore store_{1, 4096, {}, records_};
  ModelTokens tokens_{2};
};

TEST_F(KeyspaceRegistryTest, TheIdDependsOnFieldsGeometryTenantAndSecretOnly) {
  const auto registry = Open();
  const KeyspaceId id = registry->IdOf(Description("a")).value();
  EXPECT_EQ(Open()->IdOf(Description("a")).value(), id);
  EXPECT_NE(registry->IdOf(Description("b")).value(), id);
  EXPECT_NE(registry->IdOf(Description("a", "tenant")).value(), id);
  EXPECT_NE(Open("another secret..")->IdOf(Description("a")).value(), id);
  KeyspaceRegistry::Description other = Description("a");
  other.geometry.layers = 5;
  EXPECT_NE(registry->IdOf(other).value(), id);
}

TEST_F(KeyspaceRegistryTest, GenerationAndStateOutliveARestart) {
  KeyspaceId id;
  {
    const auto registry = Open();
    id = registry->OpenKeyspace(Description("a")).value()->id;
    EXPECT_EQ(registry->RaiseGeneration(id).value(), 2u);
    EXPECT_TRUE(registry->SetState(id, KeyspaceState::kBf16, {"me", "why"}).ok());
    EXPECT_EQ(registry->RaiseGeneration(id).value(), 3u);
  }
  const auto registry = Open();
  const auto keyspace = registry->Find(id);
  ASSERT_NE(keyspace, nullptr);
  EXPECT_EQ(keyspace->generation.load(), 3u);
  EXPECT_EQ(keyspace->state.load(), KeyspaceState::kBf16);
  EXPECT_TRUE(keyspace->quality_off());
  EXPECT_EQ(registry->ReasonOf(id).reason, "why");
  EXPECT_EQ(registry->OpenKeyspace(Description("a")).value(), keyspace);
}

TEST_F(KeyspaceRegistryTest, DamagedRecordsLoseOnlyThemselves) {
  const KeyspaceId id = Open()->OpenKeyspace(Description("a")).value()->id;
  (*records_)["keyspace/zz"] = "x";
  (*records_)["keyspace/" + std::string(64, 'a')] = "\xff\xff garbage";
  (*records_)["keyspace/" + std::string(64, 'b')] = "";
  (*records_)["unrelated"] = "x";
  const auto registry = Open();
  EXPECT_EQ(registry->List().size(), 1u);
  EXPECT_NE(registry->Find(id), nullptr);
}

TEST_F(KeyspaceRegistryTest, TheNumberOfKeyspacesIsBounded) {
  const auto registry = Open();
  for (const char* model : {"a", "b", "c"}) {
    EXPECT_TRUE(registry->OpenKeyspace(Description(model)).ok());
  }
  EXPECT_EQ(registry->OpenKeyspace(Description("d")).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(registry->OpenKeyspace(Description("a")).ok());
}

TEST_F(KeyspaceRegistryTest, Bf16KeyspacesKnowNoQuality) {
  const auto registry = Open();
  KeyspaceRegistry::Description description = Description("a");
  description.fields["format"] = "bf16";
  const auto keyspace = registry->OpenKeyspace(description).value();
  EXPECT_TRUE(registry->SetState(keyspace->id, KeyspaceState::kBf16, {}).ok());
  EXPECT_FALSE(keyspace->quality_off());
}

TEST_F(KeyspaceRegistryTest, UnknownKeyspaces) {
  const auto registry = Open();
  EXPECT_EQ(registry->Find(KeyspaceId()), nullptr);
  EXPECT_EQ(registry->RaiseGeneration(KeyspaceId()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(registry->SetState(KeyspaceId(), KeyspaceState::kBf16, {}).code(),
            absl::StatusCode::kNotFound);
}

TEST_F(KeyspaceRegistryTest, ModelsOverTheBoundShareALabel) {
  TokenCounters& a = tokens_.Of("a");
  TokenCounters& b = tokens_.Of("b");
  EXPECT_NE(&a, &b);
  EXPECT_EQ(&tokens_.Of("c"), &tokens_.Of(ModelTokens::kOther));
  EXPECT_EQ(&tokens_.Of("d"), &tokens_.Of(ModelTokens::kOther));
  EXPECT_EQ(&tokens_.Of("a"), &a);
}

TEST_F(KeyspaceRegistryTest, OneTenantLeavesLabelsForTheModelsOfAnother) {
  ModelTokens tokens(4, /*part_max_percent=*/50);
  TokenCounters& other = tokens.Of(ModelTokens::kOther, "a");
  EXPECT_NE(&tokens.Of("a1", "a"), &other);
  EXPECT_NE(&tokens.Of("a2", "a"), &other);
  EXPECT_EQ(&tokens.Of("a3", "a"), &other);
  EXPECT_NE(&tokens.Of("b1", "b"), &other);
  EXPECT_EQ(&tokens.Of("b1", "a"), &tokens.Of("b1", "b"));
}

TEST_F(KeyspaceRegistryTest, NodeIdAndSecretAreMadeOnce) {
  const std::string id = NodeId(store_).value();
  EXPECT_EQ(id.size(), 36u);
  EXPECT_EQ(id[14], '4');
  EXPECT_EQ(NodeId(store_).value(), id);
  const std::string secret = TenantSecret(store_, "").value();
  EXPECT_EQ(secret.size(), 32u);
  EXPECT_EQ(TenantSecret(store_, "").value(), secret);
  EXPECT_EQ(TenantSecret(store_, "/nonexistent").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(TenantSecret(store_, "/dev/null").status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(GeometryTest, TileBytes) {
  EXPECT_EQ((Geometry{1, 1, 128, 128}).int2_tile_bytes(), 4608u);
  EXPECT_EQ((Geometry{1, 1, 128, 128}).bf16_tile_bytes(), 32'768u);
  EXPECT_EQ((Geometry{1, 1, 64, 32}).int2_tile_bytes(), 64u * 32 + 8 * 64 * 2);
  EXPECT_EQ((Geometry{1, 1, 256, 64}).int2_tile_bytes(), 64u * 128 + 8 * 64 * 4);
}

TEST_F(KeyspaceRegistryTest, TheTenantIsKeptAndFoundByName) {
  KeyspaceId id;
  {
    const auto registry = Open();
    id = registry->OpenKeyspace(Description("a", "x")).value()->id;
    EXPECT_EQ(registry->Find(id)->tenant, "x");
    registry->OpenKeyspace(Description("a")).value();
  }
  const auto registry = Open();
  EXPECT_EQ(registry->Find(id)->tenant, "x");
  ASSERT_EQ(registry->ListOf("x").size(), 1u);
  EXPECT_EQ(registry->ListOf("x").front()->id, id);
  EXPECT_EQ(registry->ListOf("").size(), 1u);
  EXPECT_TRUE(registry->ListOf("y").empty());
}

// Records of earlier versions do not name the tenant.
TEST_F(KeyspaceRegistryTest, ARecordWithoutTenantBecomesThatOfWhoOpensIt) {
  const KeyspaceId id = Open()->OpenKeyspace(Description("a", "x")).value()->id;
  for (auto& [name, value] : *records_) {
    v1::KeyspaceRecord record;
    if (!name.starts_with("keyspace/") || !record.ParseFromString(value)) continue;
    record.clear_tenant();
    record.set_generation(7);
    value = record.SerializeAsString();
  }
  {
    const auto registry = Open();
    EXPECT_EQ(registry->Find(id)->tenant, "");
    EXPECT_EQ(registry->OpenKeyspace(Description("a", "x")).value()->tenant, "x");
    EXPECT_EQ(registry->Find(id)->generation.load(), 7u);
  }
  EXPECT_EQ(Open()->Find(id)->tenant, "x");

  // A node that knows the records sends them to one that does not, and not the other way round.
  v1::KeyspaceRecord known = Open()->RecordOf(id);
  v1::KeyspaceRecord unknown = known;
  unknown.clear_tenant();
  EXPECT_FALSE(MergeKeyspace(known, unknown).any);
  EXPECT_EQ(known.tenant(), "x");
  EXPECT_TRUE(MergeKeyspace(unknown, known).any);
  EXPECT_EQ(unknown.tenant(), "x");
}

class UnusedKeyspacesTest : public KeyspaceRegistryTest {
 protected:
  static constexpr Duration kIdle = std::chrono::hours(24 * 30);

  // Looks after the keyspaces once, so many hours after the start.
  size_t Look(KeyspaceRegistry& registry, int hours, bool in_cluster = false) {
    const TimePoint now = TimePoint() + std::chrono::hours(1'000 + hours);
    const std::chrono::system_clock::time_point wall{std::chrono::hours(500'000 + hours)};
    return registry.EndUnused({kIdle, now, wall, in_cluster});
  }
  static TimePoint At(int hours) { return TimePoint() + std::chrono::hours(1'000 + hours); }
};

TEST_F(UnusedKeyspacesTest, EndAndMakeRoom) {
  const auto registry = Open();
  const KeyspaceId used = registry->OpenKeyspace(Description("used")).value()->id;
  for (const char* model : {"a", "b"}) ASSERT_TRUE(registry->OpenKeyspace(Description(model)).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(registry->OpenKeyspace(Description("c")).status()));
  EXPECT_EQ(Look(*registry, 0), 0u);
  registry->Find(used)->NoteUse(At(700));
  EXPECT_EQ(Look(*registry, 719), 0u);
  EXPECT_EQ(Look(*registry, 721), 2u);
  EXPECT_NE(registry->Find(used), nullptr);
  EXPECT_TRUE(registry->OpenKeyspace(Description("c")).ok());
  EXPECT_EQ(Open()->List().size(), 2u) << "the records have gone, too";
}

// Calls back from where a keyspace is looked after.
class MeanwhileStore : public MemoryStore {
 public:
  using MemoryStore::MemoryStore;
  void ForEachPage(const KeyspaceId& keyspace,
                   const std::function<void(const PageKey&, Tier)>& visit) override {
    if (on_look) on_look();
    MemoryStore::ForEachPage(keyspace, visit);
  }
  absl::Status PutRecord(const std::string& name, const std::string& value) override {
    if (value.empty() && on_removal) CRUMB_RETURN_IF_ERROR(on_removal());
    return MemoryStore::PutRecord(name, value);
  }
  std::function<void()> on_look;
  std::function<absl::Status()> on_removal;
};

TEST_F(UnusedKeyspacesTest, AKeyspaceThatIsUsedMeanwhileStays) {
  MeanwhileStore store(1, 4096, {});
  const auto registry = KeyspaceRegistry::Open(store, "secret of sixteen", tokens_, 3).value();
  const KeyspaceId id = registry->OpenKeyspace(Description("a")).value()->id;
  EXPECT_EQ(Look(*registry, 0), 0u);
  store.on_look = [&] { registry->Find(id)->NoteUse(At(721)); };
  EXPECT_EQ(Look(*registry, 721), 0u);
  EXPECT_NE(registry->Find(id), nullptr);
  store.on_look = nullptr;
  EXPECT_EQ(Look(*registry, 2'000), 1u);
}

TEST_F(UnusedKeyspacesTest, AKeyspaceThatEndsIsNotFoundBeforeItsRecordIsRemoved) {
  MeanwhileStore store(1, 4096, {});
  const auto registry = KeyspaceRegistry::Open(store, "secret of sixteen", tokens_, 3).value();
  const KeyspaceId id = registry->OpenKeyspace(Description("a")).value()->id;
  EXPECT_EQ(Look(*registry, 0), 0u);
  int removals = 0;
  store.on_removal = [&] {
    ++removals;
    EXPECT_EQ(registry->Find(id), nullptr);
    return absl::UnavailableError("the disk is full");
  };
  EXPECT_EQ(Look(*registry, 721), 0u);
  EXPECT_EQ(removals, 1);
  EXPECT_NE(registry->Find(id), nullptr) << "its record is there still";
  store.on_removal = nullptr;
  EXPECT_EQ(Look(*registry, 721), 1u);
}

TEST_F(UnusedKeyspacesTest, TimeGoesOnOverRestarts) {
  ASSERT_TRUE(Open()->OpenKeyspace(Description("a")).ok());
  EXPECT_EQ(Look(*Open(), 0), 0u);
  EXPECT_EQ(Look(*Open(), 400), 0u);
  EXPECT_EQ(Look(*Open(), 721), 1u);
}

TEST_F(UnusedKeyspacesTest, StayWhileSomethingNeedsThem) {
  const auto registry = Open();
  auto held = registry->OpenKeyspace(Description("in a call")).value();
  const KeyspaceId decided = registry->OpenKeyspace(Description("decided")).value()->id;
  ASSERT_TRUE(registry->SetState(decided, KeyspaceState::kBf16, {"me", "worse"}).ok());
  const KeyspaceId dropped = registry->OpenKeyspace(Description("dropped")).value()->id;
  ASSERT_TRUE(registry->RaiseGeneration(dropped).ok());
  EXPECT_EQ(Look(*registry, 0), 0u);
  EXPECT_EQ(Look(*registry, 1'000, /*in_cluster=*/true), 0u);
  held.reset();
  EXPECT_EQ(Look(*registry, 1'000, /*in_cluster=*/true), 1u);
  EXPECT_EQ(Look(*registry, 1'000), 1u) << "the dropped one: no other node has its pages";
  EXPECT_NE(registry->Find(decided), nullptr);
}

TEST_F(UnusedKeyspacesTest, WhatWasDroppedDoesNotComeBack) {
  {
    const auto registry = Open();
    const KeyspaceId id = registry->OpenKeyspace(Description("a")).value()->id;
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(registry->RaiseGeneration(id).ok());
    Look(*registry, 0);
    ASSERT_EQ(Look(*registry, 721), 1u);
    EXPECT_EQ(registry->OpenKeyspace(Description("a")).value()->generation.load(), 5u);
  }
  records_->erase("keyspace/" + Open()->IdOf(Description("a")).value().ToHex());
  EXPECT_EQ(Open()->OpenKeyspace(Description("a")).value()->generation.load(), 5u);
  (*records_)["keyspace-generation-floor"] = "five";
  EXPECT_TRUE(
      absl::IsDataLoss(KeyspaceRegistry::Open(store_, "secret of sixteen", tokens_, 3).status()));
}

TEST_F(KeyspaceRegistryTest, OneTenantDoesNotTakeAllKeyspaces) {
  const auto registry = KeyspaceRegistry::Open(store_, "secret of sixteen", tokens_, 4,
                                               KeyspaceRegistry::Slabs::kOfAll, 50)
                            .value();
  EXPECT_TRUE(registry->OpenKeyspace(Description("1", "a")).ok());
  EXPECT_TRUE(registry->OpenKeyspace(Description("2", "a")).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(registry->OpenKeyspace(Description("3", "a")).status()));
  EXPECT_TRUE(registry->OpenKeyspace(Description("1", "b")).ok());
}

}  // namespace
}  // namespace crumb::server
