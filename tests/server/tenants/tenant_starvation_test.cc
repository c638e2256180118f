// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// One tenant, or a caller without a token, takes all it can get of a resource, in every way of the
// table in docs/security.md, "Budgets", until it is refused. Meanwhile another tenant's lookups
// stay quick, and each of its Puts is stored.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "common/hex.h"
#include "common/sha256.h"
#include "gtest/gtest.h"
#include "tests/common/eventually.h"
#include "tests/server/latency.h"
#include "tests/server/series.h"
#include "tests/server/two_tenants.h"

namespace crumb::server {
namespace {

// Host memory has room for about 1,300 pages of the test's geometry (12 KiB each).
constexpr uint64_t kHostBytes = 16 << 20;
constexpr int kRounds = 3;
constexpr int kRoundsMax = 4 * kRounds;
// One round has so many Acquires of the other tenant without the attack, and as many with it. The
// first milliseconds of an attack, when its calls start all at once, are less than a hundredth.
constexpr int kSamples = 500;
// Puts between two Flushes of the other tenant: they fit into its part of the write queue, which is
// a sixteenth of host memory, whatever the attacker has queued.
constexpr int kPutsMax = 50;

std::string Entry(const std::string& name) {
  return "{\"name\": \"" + name + "\", \"token_sha256\": \"" +
         HexEncode(Sha256(TwoTenants::Token(name))) + "\"}";
}

}  // namespace

TwoTenants::TwoTenants(const std::function<void(Options&)>& change) {
  options_.listen.socket_dir = folder_.path();
  options_.admin.listen = "127.0.0.1:0";
  options_.store.host.bytes_max = ByteSize{kHostBytes};
  options_.store.host.slab_bytes = ByteSize{kHostBytes};
  options_.store.ssd.path = "";
  options_.tenants.file = folder_.path() + "/tenants.json";
  options_.tenants.shared_memory = "all";
  options_.sessions.sessions_max = 32;
  options_.sessions.engines_max = 32;
  options_.limits.control_queue = 32;
  options_.limits.commit_queue = 32;
  options_.limits.keyspaces_max = 64;
  options_.limits.watchers_max = 16;
  options_.log.severity = "off";
  change(options_);
  options_.Complete();
  if (!options_.store.ssd.path.empty()) {
    std::filesystem::create_directory(options_.store.ssd.path);
  }
  std::ofstream(options_.tenants.file)
      << "{\"tenants\": [" << Entry("a") << "," << Entry("b") << "]}";
  daemon_ = Daemon::Start(options_).value();
}

std::unique_ptr<TestClient> TwoTenants::Open(const std::string& tenant,
                                             uint64_t staging_bytes) const {
  return std::make_unique<TestClient>(options_.listen.fd_socket, Target(), staging_bytes,
                                      Token(tenant));
}

std::unique_ptr<TwoTenants::Stub> TwoTenants::NewStub() const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Its windows do not grow, so that responses that are not read wait in crumbd, not in this
  // process.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  return v1::CacheService::NewStub(
      grpc::CreateCustomChannel(Target(), grpc::InsecureChannelCredentials(), arguments));
}

std::unique_ptr<grpc::ClientContext> TwoTenants::Context(const std::string& tenant) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->AddMetadata("authorization", "Bearer " + Token(tenant));
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
  return context;
}

namespace {

class TenantStarvationTest : public testing::TestWithParam<BudgetRow> {
 protected:
  TenantStarvationTest() {
    EXPECT_TRUE(b_->OpenKeyspace("of b").ok());
    for (int page = 0; page < pages_; ++page) {
      EXPECT_TRUE(PutOne(page)) << "before the attack";
      if (page % kPutsMax == 0) ExpectKept();
    }
  }

  // One Put of b. Its outcome: whether the page is stored.
  bool PutOne(int page) {
    v1::PutResponse response;
    last_ = b_->Put({b_->Fragment(TestClient::Key(page), 3)}, &response);
    return last_.ok() && response.outcomes_size() == 1 &&
           (response.outcomes(0) == v1::COMMIT_OUTCOME_STORED ||
            response.outcomes(0) == v1::COMMIT_OUTCOME_DEDUPLICATED);
  }

  // Seconds of one Acquire of b.
  double TimeAcquire() {
    // The attacker's Puts evict pages; the test measures the way through crumbd, not which pages
    // are cached.
    v1::AcquireResponse response;
    grpc::Status status;
    const std::string key = TestClient::Keys(GetParam().keeps_pages ? next_++ % pages_ : 0, 1);
    const double took = SecondsOf([&] { status = b_->Acquire(key, &response); });
    EXPECT_TRUE(status.ok()) << status.error_message();
    if (GetParam().keeps_pages) {
      EXPECT_EQ(response.hit_pages(), 1u) << "miss reason " << response.miss_reason();
    }
    if (response.lease() != 0) {
      EXPECT_TRUE(b_->Release(response.lease()).ok());
    }
    return took;
  }

  // Whether b can watch its keyspace.
  bool Watches() {
    const auto context = TwoTenants::Context("b");
    v1::WatchEventsRequest request;
    request.set_keyspace(b_->keyspace().keyspace());
    request.set_snapshot(true);
    const auto stream = b_->stub().WatchEvents(context.get(), request);
    v1::WatchEventsResponse event;
    const bool read = stream->Read(&event);
    context->TryCancel();
    stream->Finish().error_code();
    return read;
  }

  void Sample(std::vector<double>& seconds) {
    for (int i = 0; i < kSamples; ++i) seconds.push_back(TimeAcquire());
  }

  // How often the attack was refused; counted by crumbd. Zero where the limit shows elsewhere.
  double Refused() const {
    const std::string& series = GetParam().limit_reached;
    return series.empty() ? 0 : SeriesOf(crumbd_.Admin(), series);
  }

  void StorePagesOfAttacker() {
    ASSERT_TRUE(a_->OpenKeyspace("of a").ok());
    for (int first = 0; first < kAttackerPages; first += 100) {
      std::vector<std::vector<std::byte>> fragments;
      for (int page = first; page < first + 100; ++page) {
        fragments.push_back(a_->Fragment(TestClient::Key(page), 1));
      }
      v1::PutResponse response;
      ASSERT_TRUE(a_->Put(fragments, &response).ok());
    }
  }

  // No page of b is lost, if the SSD has room for all of them.
  void ExpectKept() {
    if (!GetParam().keeps_pages) return;
    v1::FlushResponse response;
    const auto context = b_->Context();
    const grpc::Status flushed = b_->stub().Flush(context.get(), v1::FlushRequest(), &response);
    EXPECT_TRUE(flushed.ok()) << flushed.error_message();
  }

  // Everything else that b does must work, too.
  void ExpectServed(int round) {
    // More than the host tier would have free if the attacker kept all of its pages.
    const int step = GetParam().keeps_pages ? 500 / kPutsMax : 4;
    for (int page = 8; page < 508; page += step) {
      ASSERT_TRUE(PutOne((round + 1) * 1'000 + page))
          << "Put " << page << ": " << last_.error_message();
    }
    ExpectKept();
    EXPECT_TRUE(b_->OpenKeyspace("of b, " + std::to_string(round)).ok());
    ASSERT_TRUE(b_->OpenKeyspace("of b").ok());
    EXPECT_TRUE(Watches()) << "a watcher of b";
    std::vector<std::vector<std::byte>> got;
    v1::MissReason miss;
    EXPECT_TRUE(b_->Get(TestClient::Keys(0, 1), &got, &miss).ok());
    EXPECT_EQ(crumbd_.Open("b")->welcome().error(), "") << "a session of b";
  }

  TwoTenants crumbd_{GetParam().change};
  std::unique_ptr<TestClient> b_ = crumbd_.Open("b");
  std::unique_ptr<TestClient> a_ = crumbd_.Open("a");
  grpc::Status last_;
  // Pages of b before the attack; with keeps_pages so many that most have left host memory when
  // they are read again.
  const int pages_ = GetParam().keeps_pages ? 400 : 8;
  int next_ = 0;
};

TEST_P(TenantStarvationTest, TheOtherTenantIsServed) {
  StorePagesOfAttacker();
  const auto stub = crumbd_.NewStub();
  // Times with and without the attack are taken in turns, so that the load of the machine is in
  // both. A bound of 3 times alone would fail by a few slow wake-ups where the p99 is some hundred
  // microseconds, because the attacker's own threads run on the same cores: 20 ms, some slices of
  // the scheduler, are allowed besides, and other rounds are tried where other programs of the
  // machine took more. A starved tenant waits for seconds or is refused, in each of them.
  std::vector<double> alone, attacked;
  const auto is_served = [&] { return P99(attacked) <= 3 * P99(alone) + 0.02; };
  for (int round = 0; round < kRounds || (round < kRoundsMax && !is_served()); ++round) {
    if (round % kRounds == 0) {
      alone.clear();
      attacked.clear();
    }
    Sample(alone);
    const double refused = Refused();
    Attack attack;
    GetParam().take({crumbd_, *a_, *stub, attack});
    Sample(attacked);
    ExpectServed(round);
    if (!GetParam().limit_reached.empty()) {
      EXPECT_TRUE(Eventually([&] { return Refused() > refused; }, std::chrono::seconds(10)))
          << "the attack did not reach its limit";
    }
  }
  std::printf("p99 of an Acquire alone %.2f ms, attacked %.2f ms\n", 1e3 * P99(alone),
              1e3 * P99(attacked));
  EXPECT_TRUE(is_served()) << "p99 alone " << P99(alone) << " s, attacked " << P99(attacked)
                           << " s";
}

INSTANTIATE_TEST_SUITE_P(Budgets, TenantStarvationTest, testing::ValuesIn(BudgetRows()),
                         [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace crumb::server
