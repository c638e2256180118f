// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tenants at crumbd's sockets.
#include <fstream>

#include "common/hex.h"
#include "common/sha256.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/daemon/daemon.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/series.h"
#include "tests/server/test_client.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

class TenantDaemonTest : public testing::Test {
 protected:
  TenantDaemonTest() {
    options_.listen.socket_dir = folder_.path();
    options_.listen.tcp = "127.0.0.1:0";
    options_.admin.listen = "127.0.0.1:0";
    options_.store.host.bytes_max = ByteSize{32 << 20};
    options_.store.host.slab_bytes = ByteSize{16 << 20};
    options_.store.ssd.path = folder_.path() + "/data";
    options_.store.ssd.bytes_max = ByteSize{64 << 20};
    options_.tenants.file = folder_.path() + "/tenants.json";
    options_.tenants.shared_memory = "all";
    options_.log.severity = "off";
    options_.Complete();
    Write("");
    Start();
  }

  void Write(const std::string& more) const {
    const auto entry = [](const std::string& name, const std::string& fields) {
      return "{\"name\": \"" + name + "\", \"token_sha256\": \"" +
             HexEncode(Sha256("token of " + name)) + "\"" + fields + "}";
    };
    std::ofstream(options_.tenants.file)
        << "{\"tenants\": [" << entry("a", more) << "," << entry("b", "") << ","
        << entry("past", ", \"expires\": \"2020-01-01T00:00:00Z\"") << "]}";
  }
  void Start() {
    daemon_.reset();
    daemon_ = Daemon::Start(options_).value();
    places_ = daemon_->endpoints();
    stub_ = v1::CacheService::NewStub(
        grpc::CreateChannel(places_.tcp, grpc::InsecureChannelCredentials()));
  }
  std::unique_ptr<TestClient> Open(const std::string& token) const {
    return std::make_unique<TestClient>(places_.fd_socket, "unix:" + places_.unix_socket, 1 << 20,
                                        token);
  }
  double Series(const std::string& name) const { return SeriesOf(places_.admin, name); }

  // Every unary call and stream over TCP, without a session and with this metadata; their codes.
  std::vector<grpc::Status> AllCalls(const std::string& authorization) const {
    std::vector<grpc::Status> ends;
    const auto unary =
        [&]<typename Request, typename Response>(grpc::Status (v1::CacheService::Stub::*method)(
            grpc::ClientContext*, const Request&, Response*)) {
          grpc::ClientContext context;
          Prepare(authorization, context);
          Response response;
          ends.push_back(((*stub_).*method)(&context, Request(), &response));
        };
    using Stub = v1::CacheService::Stub;
    unary(&Stub::OpenKeyspace);
    unary(&Stub::SetKeyspaceState);
    unary(&Stub::DropKeyspace);
    unary(&Stub::Acquire);
    unary(&Stub::Lookup);
    unary(&Stub::Release);
    unary(&Stub::Prefetch);
    unary(&Stub::Reserve);
    unary(&Stub::Commit);
    unary(&Stub::Abort);
    unary(&Stub::Flush);
    unary(&Stub::Pin);
    unary(&Stub::Unpin);
    unary(&Stub::Delete);
    unary(&Stub::Stats);
    unary(&Stub::ListNodes);
    unary(&Stub::LocatePage);
    unary(&Stub::DrainNode);
    unary(&Stub::ClaimSlots);
    unary(&Stub::ScrubSlots);
    grpc::ClientContext get, put, watch, session;
    for (grpc::ClientContext* context : {&get, &put, &watch, &session}) {
      Prepare(authorization, *context);
    }
    v1::GetResponse part;
    const auto getting = stub_->Get(&get, {});
    while (getting->Read(&part)) {
    }
    ends.push_back(getting->Finish());
    v1::PutResponse response;
    const auto putting = stub_->Put(&put, &response);
    putting->Write({});
    putting->WritesDone();
    ends.push_back(putting->Finish());
    v1::WatchEventsResponse event;
    const auto watching = stub_->WatchEvents(&watch, {});
    while (watching->Read(&event)) {
    }
    ends.push_back(watching->Finish());
    const auto stream = stub_->Session(&session);
    v1::SessionResponse notice;
    while (stream->Read(&notice)) {
    }
    ends.push_back(stream->Finish());
    return ends;
  }
  static void Prepare(const std::string& authorization, grpc::ClientContext& context) {
    if (!authorization.empty()) context.AddMetadata("authorization", authorization);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }

  TemporaryFolder folder_;
  Options options_;
  std::unique_ptr<Daemon> daemon_;
  Daemon::Endpoints places_;
  std::unique_ptr<v1::CacheService::Stub> stub_;
};

TEST_F(TenantDaemonTest, NoCallIsServedWithoutATokenThatCounts) {
  const auto all = [&](const std::string& authorization, const std::string& text) {
    const auto ends = AllCalls(authorization);
    EXPECT_EQ(ends.size(), 24u);
    for (const grpc::Status& end : ends) {
      EXPECT_EQ(end.error_code(), grpc::StatusCode::UNAUTHENTICATED) << end.error_message();
      EXPECT_THAT(end.error_message(), HasSubstr(text));
    }
  };
  all("", "needs a tenant's token");
  all("Bearer token of stranger", "the token is no tenant's");
  all("Bearer ", "the token is no tenant's");
  all("Basic token of a", "must be 'Bearer TOKEN'");
  all("Bearer token of past", "tenant 'past' has expired");
  EXPECT_EQ(Series("crumb_unauthenticated_total{reason=\"missing\"}"), 24);
  EXPECT_EQ(Series("crumb_unauthenticated_total{reason=\"unknown\"}"), 72);
  EXPECT_EQ(Series("crumb_unauthenticated_total{reason=\"expired\"}"), 24);
  // With a token, a call fails only because of its request.
  int served = 0;
  for (const grpc::Status& end : AllCalls("Bearer token of a")) {
    const bool session = end.error_message().find("crumb-session") != std::string::npos;
    EXPECT_TRUE(end.error_code() != grpc::StatusCode::UNAUTHENTICATED || session)
        << end.error_message();
    served += end.ok() ? 1 : 0;
  }
  EXPECT_GE(served, 3);  // Flush, Stats, ListNodes
}

TEST_F(TenantDaemonTest, TenantsDoNotMeet) {
  const auto a = Open("token of a"), b = Open("token of b");
  ASSERT_EQ(a->welcome().error(), "");
  ASSERT_TRUE(a->OpenKeyspace().ok());
  ASSERT_TRUE(b->OpenKeyspace().ok());
  EXPECT_NE(a->keyspace().keyspace(), b->keyspace().keyspace());
  v1::CommitResponse committed;
  ASSERT_TRUE(a->Commit(a->Fragment(TestClient::Key(1), 5), &committed).ok());
  ASSERT_EQ(committed.outcomes(0), v1::COMMIT_OUTCOME_STORED);
  v1::AcquireResponse found;
  ASSERT_TRUE(a->Acquire(TestClient::Keys(1, 1), &found).ok());
  EXPECT_EQ(found.hit_pages(), 1u);
  EXPECT_TRUE(a->Release(found.lease()).ok());
  ASSERT_TRUE(b->Acquire(TestClient::Keys(1, 1), &found).ok());
  EXPECT_EQ(found.hit_pages(), 0u);
  EXPECT_GT(Series("crumb_tenant_used_bytes{tenant=\"a\"}"), 0);
  EXPECT_EQ(Series("crumb_tenant_used_bytes{tenant=\"b\"}"), 0);

  // The amounts that a client reports count as those of its tenant.
  const auto reporting = a->Context();
  const auto stream = a->stub().Session(reporting.get());
  v1::SessionRequest report;
  report.mutable_counters()->set_used_tokens(640);
  ASSERT_TRUE(stream->Write(report));
  const std::string reported = "crumb_tenant_reported_total{tenant=\"";
  const std::string amount = "\",amount=\"used_tokens\"}";
  EXPECT_TRUE(Eventually([&] { return Series(reported + "a" + amount) == 640; }));
  EXPECT_EQ(Series(reported + "b" + amount), 0);
  EXPECT_EQ(Series("crumb_used_tokens_total"), 640);
  reporting->TryCancel();
  EXPECT_FALSE(stream->Finish().ok());

  // Another's keyspace, by its id.
  v1::LookupRequest lookup;
  lookup.set_keyspace(a->keyspace().keyspace());
  lookup.set_keys(TestClient::Keys(1, 1));
  v1::LookupResponse looked_up;
  EXPECT_EQ(b->stub().Lookup(b->Context().get(), lookup, &looked_up).error_code(),
            grpc::StatusCode::NOT_FOUND);
  v1::WatchEventsRequest watch;
  watch.set_keyspace(a->keyspace().keyspace());
  watch.set_snapshot(true);
  const auto context = b->Context();
  EXPECT_EQ(b->stub().WatchEvents(context.get(), watch)->Finish().error_code(),
            grpc::StatusCode::NOT_FOUND);
  v1::StatsResponse stats;
  ASSERT_TRUE(b->stub().Stats(b->Context().get(), {}, &stats).ok());
  ASSERT_EQ(stats.keyspaces_size(), 1);
  EXPECT_EQ(stats.keyspaces(0).keyspace(), b->keyspace().keyspace());

  // Another's session with the own token.
  auto mixed = std::make_unique<grpc::ClientContext>();
  mixed->AddMetadata(
      "crumb-session",
      HexEncode({reinterpret_cast<const uint8_t*>(a->welcome().token().data()), 16}));
  mixed->AddMetadata("authorization", "Bearer token of b");
  v1::ReleaseResponse released;
  const grpc::Status taken = b->stub().Release(mixed.get(), {}, &released);
  EXPECT_EQ(taken.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(taken.error_message(), HasSubstr("another tenant's"));
  EXPECT_EQ(Series("crumb_unauthenticated_total{reason=\"session\"}"), 1);
}

// Host memory for some 160 pages, of which one tenant may keep half.
TEST_F(TenantDaemonTest, LeasesReadsAndPinsKeepAPartOfHostMemoryAndNoMore) {
  options_.store.host.bytes_max = ByteSize{2 << 20};
  options_.store.host.slab_bytes = ByteSize{2 << 20};
  options_.store.ssd.path = "";
  Start();
  constexpr int kPages = 100;
  const auto a = Open("token of a");
  ASSERT_TRUE(a->OpenKeyspace("of a").ok());
  std::vector<std::vector<std::byte>> fragments;
  for (int page = 0; page < kPages; ++page) {
    fragments.push_back(a->Fragment(TestClient::Key(page), 1));
  }
  v1::PutResponse stored;
  ASSERT_TRUE(a->Put(fragments, &stored).ok());
  const std::string rejected = "crumb_tenant_rejected_total{reason=\"held_memory\"}";
  v1::AcquireResponse leased;
  ASSERT_TRUE(a->Acquire(TestClient::Keys(0, kPages), &leased).ok());
  EXPECT_GT(leased.hit_pages(), kPages / 2u);
  EXPECT_LT(leased.hit_pages(), static_cast<uint32_t>(kPages));
  EXPECT_EQ(leased.miss_reason(), v1::MISS_REASON_BUSY);
  EXPECT_EQ(Series(rejected), 1);
  const double held = Series("crumb_held_bytes");
  EXPECT_GE(held, static_cast<double>(leased.hit_pages() * a->fragment_bytes()));
  EXPECT_LE(held, 1 << 20);
  v1::AcquireResponse again;
  ASSERT_TRUE(a->Acquire(TestClient::Keys(0, 10), &again).ok());
  EXPECT_EQ(again.hit_pages(), 10u) << "the same pages cost nothing";
  // Reads and pins draw from the same part.
  std::vector<std::vector<std::byte>> got;
  v1::MissReason miss;
  ASSERT_TRUE(a->Get(TestClient::Keys(kPages - 5, 5), &got, &miss).ok());
  EXPECT_LT(got.size(), 5u);
  EXPECT_EQ(miss, v1::MISS_REASON_BUSY);
  v1::PinRequest pin;
  pin.set_keyspace(a->keyspace().keyspace());
  pin.set_keys(TestClient::Keys(static_cast<int>(leased.hit_pages()) - 2, 10));
  pin.set_ttl_ms(3'600'000);
  v1::PinResponse pinned;
  const grpc::Status refused = a->stub().Pin(a->Context().get(), pin, &pinned);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("2 of 10 pages are pinned"));
  EXPECT_EQ(Series(rejected), 3);
  // The tenant can keep other pages in place of those that it gives back.
  ASSERT_TRUE(a->Release(leased.lease()).ok());
  ASSERT_TRUE(a->Release(again.lease()).ok());
  EXPECT_EQ(Series("crumb_held_bytes"), held / leased.hit_pages() * 2) << "the pins";
  ASSERT_TRUE(a->stub().Pin(a->Context().get(), pin, &pinned).ok());
  EXPECT_EQ(pinned.pinned_pages(), 10u);
  v1::UnpinRequest unpin;
  unpin.set_keyspace(pin.keyspace());
  unpin.set_keys(pin.keys());
  v1::UnpinResponse unpinned;
  ASSERT_TRUE(a->stub().Unpin(a->Context().get(), unpin, &unpinned).ok());
  EXPECT_EQ(unpinned.unpinned_pages(), 10u);
  EXPECT_EQ(Series("crumb_held_bytes"), 0);
}

TEST_F(TenantDaemonTest, CrumbdsOwnUserAdministersOverTheUnixSocketOnly) {
  const auto administrator = Open("");
  ASSERT_EQ(administrator->welcome().error(), "");
  ASSERT_TRUE(administrator->OpenKeyspace().ok());
  ASSERT_TRUE(Open("token of a")->OpenKeyspace().ok());
  v1::StatsResponse stats;
  ASSERT_TRUE(administrator->stub().Stats(administrator->Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.keyspaces_size(), 2);
  EXPECT_EQ(stub_->Stats(administrator->Context().get(), {}, &stats).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  v1::DrainNodeRequest drain;
  v1::DrainNodeResponse drained;
  EXPECT_EQ(
      administrator->stub().DrainNode(administrator->Context().get(), drain, &drained).error_code(),
      grpc::StatusCode::FAILED_PRECONDITION);  // this node is in no cluster
}

// A token may be withdrawn, so every call carries it.
TEST_F(TenantDaemonTest, SessionsOfTenantsGetNoSocketsForCalls) {
  const auto session = Open("token of a");
  EXPECT_EQ(session->welcome().error(), "");
  EXPECT_GT(session->welcome().staging_bytes(), 0u);
  EXPECT_FALSE(session->welcome().staging_socket());
}

TEST_F(TenantDaemonTest, SessionsOfTenantsNeedATokenAndSharedMemory) {
  EXPECT_THAT(Open("token of stranger")->welcome().error(), HasSubstr("no tenant's"));
  EXPECT_THAT(Open("token of past")->welcome().error(), HasSubstr("has expired"));
  EXPECT_EQ(Series("crumb_hellos_refused_total"), 2);
  options_.tenants.shared_memory = "off";
  Start();
  const auto refused = Open("token of a");
  EXPECT_THAT(refused->welcome().error(), HasSubstr("tenants.shared_memory"));
  EXPECT_EQ(refused->welcome().slab_count(), 0u);
  // The token serves without a session.
  ASSERT_TRUE(refused->OpenKeyspace().ok());
  v1::PutResponse put;
  ASSERT_TRUE(refused->Put({refused->Fragment(TestClient::Key(1), 7)}, &put).ok());
  EXPECT_EQ(put.outcomes(0), v1::COMMIT_OUTCOME_STORED);
  std::vector<std::vector<std::byte>> got;
  v1::MissReason reason = v1::MISS_REASON_UNSPECIFIED;
  ASSERT_TRUE(refused->Get(TestClient::Keys(1, 1), &got, &reason).ok());
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(got[0], refused->Fragment(TestClient::Key(1), 7));
}

TEST_F(TenantDaemonTest, ANewFileBringsQuotasAndAKeyspaceKeepsItsTenant) {
  auto a = Open("token of a");
  ASSERT_TRUE(a->OpenKeyspace().ok());
  v1::PutResponse put;
  ASSERT_TRUE(a->Put({a->Fragment(TestClient::Key(1), 1)}, &put).ok());
  Write(", \"quota_bytes\": 1");
  daemon_->Reload(false);
  EXPECT_EQ(Series("crumb_tenant_quota_bytes{tenant=\"a\"}"), 1);
  ASSERT_TRUE(a->Put({a->Fragment(TestClient::Key(2), 1)}, &put).ok());
  EXPECT_EQ(put.outcomes(0), v1::COMMIT_OUTCOME_NO_ROOM);
  EXPECT_THAT(put.first_error(), HasSubstr("quota"));
  EXPECT_EQ(Series("crumb_pages_refused_total{reason=\"quota\"}"), 1);
  const auto b = Open("token of b");
  ASSERT_TRUE(b->OpenKeyspace().ok());
  ASSERT_TRUE(b->Put({b->Fragment(TestClient::Key(2), 1)}, &put).ok());
  EXPECT_EQ(put.outcomes(0), v1::COMMIT_OUTCOME_STORED);

  v1::FlushResponse flushed;
  ASSERT_TRUE(a->stub().Flush(a->Context().get(), {}, &flushed).ok());
  const std::string keyspace = a->keyspace().keyspace();
  Start();
  v1::LookupRequest lookup;
  lookup.set_keyspace(keyspace);
  lookup.set_keys(TestClient::Keys(1, 1));
  v1::LookupResponse found;
  a = Open("token of a");
  ASSERT_TRUE(a->stub().Lookup(a->Context().get(), lookup, &found).ok());
  EXPECT_EQ(found.hit_pages(), 1u);
  const auto other = Open("token of b");
  EXPECT_EQ(other->stub().Lookup(other->Context().get(), lookup, &found).error_code(),
            grpc::StatusCode::NOT_FOUND);
  EXPECT_GT(Series("crumb_tenant_used_bytes{tenant=\"a\"}"), 0);
}

}  // namespace
}  // namespace crumb::server
