// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The calls by which a tenant could reach another's keyspace are refused; quotas hold.
#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <memory>

#include "common/hex.h"
#include "gmock/gmock.h"
#include "server/calls/get_reader.h"
#include "server/calls/keyspace_calls.h"
#include "server/calls/lease_calls.h"
#include "server/calls/page_calls.h"
#include "server/calls/put_assembler.h"
#include "server/calls/staging_calls.h"
#include "server/calls/status_calls.h"
#include "tests/common/fake_clock.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class TenantCallsTest : public CallFixture {
 protected:
  // The fixture's keyspace, and its pages, are tenant "a"'s from here on.
  TenantCallsTest() {
    keyspace_ = keyspaces_->OpenKeyspace({{{"model", "tiny"}}, kGeometry, "a"}).value();
    Store(Key(1));
  }

  CallContext As(const std::string& tenant) const {
    CallContext context = context_;
    auto caller = std::make_shared<Tenant>();
    caller->name = tenant;
    context.caller.tenant = caller;
    return context;
  }
  std::string id() const { return std::string(keyspace_->id.view()); }

  // How a call that goes through an executor ends.
  absl::Status Wait(const std::function<void(Done)>& call) {
    auto result = std::make_shared<std::promise<absl::Status>>();
    std::future<absl::Status> completed = result->get_future();
    call([result](absl::Status status) { result->set_value(std::move(status)); });
    if (completed.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      return absl::UnknownError("no response");
    }
    return completed.get();
  }
  template <typename Request>
  Request Named(bool keys = true) const {
    Request request;
    request.set_keyspace(id());
    if constexpr (requires { request.set_keys(""); }) {
      if (keys) request.set_keys(Keys(1, 1));
    }
    return request;
  }

  // Every call that names a keyspace, as `tenant`; "NAME: code" of each.
  std::vector<std::string> AllCalls(const std::string& tenant) {
    const CallContext context = As(tenant);
    std::vector<std::string> ends;
    const auto note = [&](const char* name, const absl::Status& status) {
      ends.push_back(std::string(name) + ": " + absl::StatusCodeToString(status.code()));
    };
    const auto session = OpenSession();
    v1::AcquireResponse acquired;
    note("Acquire", Wait([&](Done done) {
           Acquire(context, session, TimePoint::max(), Named<v1::AcquireRequest>(), &acquired,
                   std::move(done));
         }));
    v1::LookupResponse found;
    note("Lookup", Wait([&](Done done) {
           Lookup(context, TimePoint::max(), Named<v1::LookupRequest>(), &found, std::move(done));
         }));
    v1::PrefetchResponse prefetched;
    note("Prefetch", Prefetch(context, Named<v1::PrefetchRequest>(), &prefetched));
    auto pin = Named<v1::PinRequest>();
    pin.set_ttl_ms(1000);
    v1::PinResponse pinned;
    note("Pin",
         Wait([&](Done done) { Pin(context, TimePoint::max(), pin, &pinned, std::move(done)); }));
    v1::UnpinResponse unpinned;
    note("Unpin", Unpin(context, Named<v1::UnpinRequest>(), &unpinned));
    GetReader::Open(context, Named<v1::GetRequest>(), TimePoint::max(),
                    [&](const auto& reader) { note("Get", reader.status()); });
    PutAssembler put(context);
    v1::PutRequest part;
    part.set_keyspace(id());
    note("Put", put.Add(part).status());
    auto reserve = Named<v1::ReserveRequest>();
    reserve.set_count(1);
    reserve.set_fragment_bytes(fragment_bytes());
    v1::ReserveResponse reserved;
    note("Reserve", Reserve(context, *session, reserve, &reserved));
    uint64_t offset = 0;
    EXPECT_TRUE(session->staging()->Reserve(fragment_bytes(), offset));
    v1::CommitRequest commit;
    commit.set_keyspace(id());
    commit.add_offsets(offset);
    commit.add_header_offsets(tiles_bytes());
    v1::CommitResponse committed;
    note("Commit",
         Wait([&](Done done) { Commit(context, *session, commit, &committed, std::move(done)); }));
    auto state = Named<v1::SetKeyspaceStateRequest>();
    state.set_state(v1::KEYSPACE_STATE_ACTIVE);
    note("SetKeyspaceState",
         Wait([&](Done done) { SetKeyspaceState(context, state, std::move(done)); }));
    v1::DeleteResponse deleted;
    const auto remove = Named<v1::DeleteRequest>();
    note("Delete", Wait([&](Done done) { Delete(context, remove, &deleted, std::move(done)); }));
    v1::DropKeyspaceResponse dropped;
    const auto drop = Named<v1::DropKeyspaceRequest>();
    note("DropKeyspace",
         Wait([&](Done done) { DropKeyspace(context, drop, &dropped, std::move(done)); }));
    // WatchEvents and LocatePage begin with this.
    note("FindKeyspace", FindKeyspace(context, id()).status());
    return ends;
  }
};

TEST_F(TenantCallsTest, FlushReportsOnTheCallersPages) {
  const auto flush = [&](const CallContext& context) {
    v1::FlushResponse response;
    EXPECT_TRUE(Wait([&](Done done) { Flush(context, {}, &response, std::move(done)); }).ok());
    return store_.flush_scope();
  };
  EXPECT_EQ(flush(As("b")), "b");
  EXPECT_EQ(flush(context_), std::nullopt) << "an administrator sees all";
}

TEST_F(TenantCallsTest, AnothersKeyspaceIsNotThereForAnyCall) {
  for (const std::string& end : AllCalls("b")) EXPECT_THAT(end, HasSubstr(": NOT_FOUND"));
  // And nothing happened to it.
  EXPECT_EQ(keyspace_->generation.load(), 1u);
  EXPECT_EQ(store_.KeyspaceBytes(keyspace_->id), fragment_bytes());
  for (const std::string& end : AllCalls("a")) EXPECT_THAT(end, HasSubstr(": OK"));
  EXPECT_EQ(keyspace_->generation.load(), 2u);
}

TEST_F(TenantCallsTest, AnUnknownKeyspaceIsReportedInTheSameWords) {
  const absl::Status theirs = FindKeyspace(As("b"), id()).status();
  std::string unknown = id();
  unknown.back() = static_cast<char>(unknown.back() ^ 1);
  std::string text(FindKeyspace(As("b"), unknown).status().message());
  const std::string hex = KeyspaceId::FromBytes(unknown)->ToHex();
  text.replace(text.find(hex), hex.size(), keyspace_->id.ToHex());
  EXPECT_EQ(text, theirs.message());
}

TEST_F(TenantCallsTest, TheTokenSaysWhoseKeyspaceIsOpened) {
  v1::OpenKeyspaceRequest request;
  (*request.mutable_fields())["model"] = "tiny";
  request.set_layers(kGeometry.layers);
  request.set_kv_heads(kGeometry.kv_heads);
  request.set_head_dim(kGeometry.head_dim);
  request.set_group_size(kGeometry.group_size);
  const auto open = [&](const CallContext& context, const std::string& tenant,
                        v1::OpenKeyspaceResponse* response) {
    request.set_tenant(tenant);
    return Wait([&](Done done) { OpenKeyspace(context, request, response, std::move(done)); });
  };
  v1::OpenKeyspaceResponse a, a_named, b, anonymous;
  EXPECT_TRUE(open(As("a"), "", &a).ok());
  EXPECT_TRUE(open(As("a"), "a", &a_named).ok());
  EXPECT_TRUE(open(As("b"), "", &b).ok());
  EXPECT_TRUE(open(context_, "", &anonymous).ok());
  EXPECT_EQ(a.keyspace(), id());
  EXPECT_EQ(a_named.keyspace(), id());
  EXPECT_NE(b.keyspace(), id());
  EXPECT_NE(anonymous.keyspace(), id());
  EXPECT_NE(anonymous.keyspace(), b.keyspace());
  v1::OpenKeyspaceResponse refused;
  const absl::Status other = open(As("b"), "a", &refused);
  EXPECT_EQ(other.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(other.message()), HasSubstr("'b'"));
  EXPECT_EQ(refused.keyspace(), "");
  // A caller of no tenant sees all, a tenant its own.
  const auto listed = [&](const CallContext& context) {
    v1::StatsResponse stats;
    FillStats(context, {}, &stats);
    return stats.keyspaces_size();
  };
  EXPECT_EQ(listed(context_), 3);
  EXPECT_EQ(listed(As("a")), 1);
  EXPECT_EQ(listed(As("b")), 1);
  EXPECT_EQ(listed(As("c")), 0);
}

TEST_F(TenantCallsTest, StatesAreReportedToTheirTenantOnly) {
  const auto open = [&](const std::string& tenant) {
    SessionTable::OpenRequest request;
    request.process_name = "test";
    request.tenant = tenant;
    auto session = sessions_.Open(request).value();
    EXPECT_TRUE(session->OpenNotices(std::make_shared<NoticeQueue>(4, [] {})));
    return session;
  };
  const auto a = open("a"), b = open("b"), anonymous = open("");
  NotifySessions(context_, {keyspace_->id, KeyspaceState::kBf16, "why"});
  EXPECT_TRUE(a->notices()->Take().has_value());
  EXPECT_FALSE(b->notices()->Take().has_value());
  EXPECT_TRUE(anonymous->notices()->Take().has_value());
}

TEST_F(TenantCallsTest, AnEngineIsJoinedByItsTenantOnly) {
  SessionTable::OpenRequest request;
  request.process_name = "test";
  request.tenant = "a";
  const auto first = sessions_.Open(request).value();
  request.engine = std::string(first->engine().id().view());
  EXPECT_TRUE(sessions_.Open(request).ok());
  for (const char* other : {"b", ""}) {
    request.tenant = other;
    EXPECT_EQ(sessions_.Open(request).status().code(), absl::StatusCode::kNotFound);
  }
}

TEST_F(TenantCallsTest, ACommitOverQuotaIsRefusedAndTheRestUnharmed) {
  TemporaryFolder folder;
  TenantOptions options;
  options.file = folder.path() + "/tenants.json";
  const auto quota = [&](size_t bytes) {
    std::ofstream(options.file) << "{\"tenants\": [{\"name\": \"a\", \"token_sha256\": \""
                                << std::string(64, '0') << "\", \"quota_bytes\": " << bytes
                                << "}]}";
  };
  quota(3 * fragment_bytes() - 1);
  const auto table = TenantTable::Open(options, [] { return Tenant::Instant(); }).value();
  CallContext context = As("a");
  context.tenants = table.get();
  FakeClock clock;
  int sums = 0;
  TenantQuotas quotas(clock, [&](const std::string& tenant) {
    ++sums;
    return BytesOfTenant(*keyspaces_, store_, tenant);
  });
  context.quotas = &quotas;
  std::string why;
  const auto commit = [&](int key) {
    why.clear();
    return CommitFragment(context, *keyspace_, Fragment(Key(key)), tiles_bytes(), nullptr, &why);
  };
  EXPECT_EQ(commit(2), v1::COMMIT_OUTCOME_STORED);
  EXPECT_EQ(BytesOfTenant(*keyspaces_, store_, "a"), 2 * fragment_bytes());
  EXPECT_EQ(commit(3), v1::COMMIT_OUTCOME_NO_ROOM);
  EXPECT_THAT(why, HasSubstr("quota: tenant 'a' has"));
  EXPECT_EQ(metrics_.refused_pages[static_cast<size_t>(Refusal::kQuota)].value(), 1u);
  EXPECT_EQ(BytesOfTenant(*keyspaces_, store_, "a"), 2 * fragment_bytes());
  v1::LookupResponse found;
  auto lookup = Named<v1::LookupRequest>();
  lookup.set_keys(Keys(1, 3));
  ASSERT_TRUE(Wait([&](Done done) {
                Lookup(context, TimePoint::max(), lookup, &found, std::move(done));
              }).ok());
  EXPECT_EQ(found.hit_pages(), 2u);
  // Another tenant, and a node's own keyspaces, have no part in it.
  EXPECT_EQ(BytesOfTenant(*keyspaces_, store_, "b"), 0u);
  auto other = keyspaces_->OpenKeyspace({{{"model", "other"}}, kGeometry, "b"}).value();
  std::swap(keyspace_, other);
  EXPECT_EQ(commit(30), v1::COMMIT_OUTCOME_STORED);
  std::swap(keyspace_, other);
  // There is room again: deleted pages do not count, and neither does an old quota.
  EXPECT_EQ(store_.Delete(keyspace_->id, std::vector{Key(1)}).value(), 1u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(commit(4), v1::COMMIT_OUTCOME_NO_ROOM) << "not yet";
  EXPECT_EQ(sums, 1) << "a tenant's pages are not summed for each fragment";
  clock.Advance(TenantQuotas::kSumAge);
  EXPECT_EQ(commit(4), v1::COMMIT_OUTCOME_STORED);
  EXPECT_EQ(commit(5), v1::COMMIT_OUTCOME_NO_ROOM);
  quota(3 * fragment_bytes());
  ASSERT_TRUE(table->Reload(true).ok());
  EXPECT_EQ(commit(5), v1::COMMIT_OUTCOME_STORED);
}

}  // namespace
}  // namespace crumb::server
