// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// One tenant takes all it can get of a resource, in every way of the table in docs/security.md,
// "Budgets". Meanwhile another tenant's lookups stay quick, and each of its Puts is stored.
#include <algorithm>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>

#include "common/hex.h"
#include "common/sha256.h"
#include "gtest/gtest.h"
#include "server/daemon.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/test_client.h"

namespace crumb::server {
namespace {

using Stub = v1::CacheService::Stub;

// Host memory has room for about 1,300 pages of the test's geometry (12 KiB each).
constexpr uint64_t kHostBytes = 16 << 20;
constexpr int kPages = 1'500;  // of the attacker: more than that
constexpr int kSamples = 300;  // of the other tenant's Acquire, with and without the attack each

// What an attack keeps open until the row is over.
struct Attack {
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::shared_ptr<void>> kept;

  ~Attack() {
    for (const auto& context : contexts) context->TryCancel();
  }
};

// Two tenants, a and b, on one crumbd. Sessions belong to both: shared memory is "all".
class Crumbd {
 public:
  Crumbd() {
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
    options_.limits.requests_max = 512;
    options_.limits.keyspaces_max = 64;
    options_.limits.watchers_max = 16;
    options_.log.severity = "off";
    options_.Complete();
    std::ofstream(options_.tenants.file)
        << "{\"tenants\": [" << Entry("a") << "," << Entry("b") << "]}";
    daemon_ = Daemon::Start(options_).value();
  }

  std::string Target() const { return "unix:" + options_.listen.unix_socket; }
  std::unique_ptr<TestClient> Open(const std::string& tenant) const {
    return std::make_unique<TestClient>(options_.listen.fd_socket, Target(), 1 << 20,
                                        "token of " + tenant);
  }
  // A connection of its own, so that tenants share nothing but crumbd.
  std::unique_ptr<Stub> NewStub() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::CacheService::NewStub(
        grpc::CreateCustomChannel(Target(), grpc::InsecureChannelCredentials(), arguments));
  }
  static std::unique_ptr<grpc::ClientContext> Context(const std::string& tenant) {
    auto context = std::make_unique<grpc::ClientContext>();
    context->AddMetadata("authorization", "Bearer token of " + tenant);
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
    return context;
  }
  const Options& options() const { return options_; }

 private:
  static std::string Entry(const std::string& name) {
    return "{\"name\": \"" + name + "\", \"token_sha256\": \"" +
           HexEncode(Sha256("token of " + name)) + "\"}";
  }

  TemporaryFolder folder_;
  Options options_;
  std::unique_ptr<Daemon> daemon_;
};

struct Attacker {
  const Crumbd& crumbd;
  TestClient& session;
  Stub& stub;
  Attack& attack;

  grpc::ClientContext* Context() const {
    attack.contexts.push_back(Crumbd::Context("a"));
    return attack.contexts.back().get();
  }
};

struct Row {
  std::string name;
  std::function<void(const Attacker&)> take;
};

void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

// A Put whose caller sends nothing: each stream holds a place.
void SilentPuts(const Attacker& a) {
  for (int i = 0; i < 2 * a.crumbd.options().limits.put_streams; ++i) {
    auto response = std::make_shared<v1::PutResponse>();
    auto stream = std::shared_ptr(a.stub.Put(a.Context(), response.get()));
    v1::PutRequest first;
    first.set_keyspace(a.session.keyspace().keyspace());
    stream->Write(first);
    a.attack.kept.insert(a.attack.kept.end(), {response, stream});
  }
}

// A Get whose caller does not read: each stream holds a place and leases on all its pages.
void UnreadGets(const Attacker& a) {
  for (int i = 0; i < 2 * a.crumbd.options().limits.get_streams; ++i) {
    auto request = std::make_shared<v1::GetRequest>();
    request->set_keyspace(a.session.keyspace().keyspace());
    request->set_keys(TestClient::Keys(0, kPages));
    a.attack.kept.push_back(std::shared_ptr(a.stub.Get(a.Context(), *request)));
  }
}

void PinEverything(const Attacker& a) {
  for (int first = 0; first < kPages; first += 100) {
    v1::PinRequest request;
    request.set_keyspace(a.session.keyspace().keyspace());
    request.set_keys(TestClient::Keys(first, 100));
    request.set_ttl_ms(24 * 3600 * 1000);
    v1::PinResponse response;
    a.stub.Pin(a.Context(), request, &response);
  }
}

void OpenKeyspaces(const Attacker& a) {
  for (int i = 0; i < 2 * a.crumbd.options().limits.keyspaces_max; ++i) {
    v1::OpenKeyspaceRequest request;
    (*request.mutable_fields())["model"] = "m" + std::to_string(i);
    request.set_layers(2);
    request.set_kv_heads(2);
    request.set_head_dim(64);
    request.set_group_size(32);
    v1::OpenKeyspaceResponse response;
    a.stub.OpenKeyspace(a.Context(), request, &response);
  }
}

void LeaseEverything(const Attacker& a) {
  for (int page = 0; page < kPages; ++page) {
    v1::AcquireResponse response;
    a.session.Acquire(TestClient::Keys(page, 1), &response);
  }
}

void OpenSessions(const Attacker& a) {
  for (int i = 0; i < 2 * a.crumbd.options().sessions.sessions_max; ++i) {
    a.attack.kept.push_back(a.crumbd.Open("a"));
  }
}

void Watch(const Attacker& a) {
  for (int i = 0; i < 2 * a.crumbd.options().limits.watchers_max; ++i) {
    auto request = std::make_shared<v1::WatchEventsRequest>();
    request->set_keyspace(a.session.keyspace().keyspace());
    request->set_snapshot(true);
    a.attack.kept.push_back(std::shared_ptr(a.stub.WatchEvents(a.Context(), *request)));
  }
}

// Calls without end from several threads, while the row lasts.
void Flood(const Attacker& a, const std::function<void(Stub&, grpc::ClientContext&)>& call) {
  struct Threads {
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    ~Threads() {
      stop.store(true);
      for (std::thread& thread : threads) thread.join();
    }
  };
  auto flood = std::make_shared<Threads>();
  for (int i = 0; i < 2; ++i) {
    flood->threads.emplace_back([&stop = flood->stop, call, stub = a.crumbd.NewStub()] {
      while (!stop.load()) call(*stub, *Crumbd::Context("a"));
    });
  }
  a.attack.kept.push_back(flood);
}

void FloodControl(const Attacker& a) {
  Flood(a, [keyspace = a.session.keyspace().keyspace()](Stub& stub, grpc::ClientContext& context) {
    v1::DeleteRequest request;
    request.set_keyspace(keyspace);
    request.set_keys(TestClient::Keys(1'000'000, 64));
    v1::DeleteResponse response;
    stub.Delete(&context, request, &response);
  });
}

const Row kRows[] = {
    {"put_streams", SilentPuts},  {"get_streams", UnreadGets},     {"pins", PinEverything},
    {"keyspaces", OpenKeyspaces}, {"leases", LeaseEverything},     {"sessions", OpenSessions},
    {"watchers", Watch},          {"control_queue", FloodControl},
};

class TenantStarvationTest : public testing::TestWithParam<Row> {
 protected:
  TenantStarvationTest() {
    EXPECT_TRUE(b_->OpenKeyspace("of b").ok());
    for (int page = 0; page < 8; ++page) EXPECT_TRUE(PutOne(page)) << "before the attack";
  }

  // One Put of b. Its outcome: whether the page is stored.
  bool PutOne(int page) {
    v1::PutResponse response;
    last_ = b_->Put({b_->Fragment(TestClient::Key(page), 3)}, &response);
    return last_.ok() && response.outcomes_size() == 1 &&
           (response.outcomes(0) == v1::COMMIT_OUTCOME_STORED ||
            response.outcomes(0) == v1::COMMIT_OUTCOME_DEDUPLICATED);
  }

  // Seconds of one Acquire of b, which is a hit.
  double TimeAcquire() {
    // Puts of the attacker evict; what is measured is the way through crumbd, not who is cached.
    const auto started = std::chrono::steady_clock::now();
    v1::AcquireResponse response;
    const grpc::Status status = b_->Acquire(TestClient::Keys(0, 1), &response);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
    EXPECT_TRUE(status.ok()) << status.error_message();
    if (response.lease() != 0) {
      EXPECT_TRUE(b_->Release(response.lease()).ok());
    }
    return took.count();
  }

  // Whether b can watch its keyspace.
  bool Watches() {
    const auto context = Crumbd::Context("b");
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

  static double P99(std::vector<double> seconds) {
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() * 99 / 100];
  }

  std::vector<double> Sample() {
    std::vector<double> seconds;
    for (int i = 0; i < kSamples / 3; ++i) seconds.push_back(TimeAcquire());
    return seconds;
  }

  Crumbd crumbd_;
  std::unique_ptr<TestClient> b_ = crumbd_.Open("b");
  std::unique_ptr<TestClient> a_ = crumbd_.Open("a");
  grpc::Status last_;
};

TEST_P(TenantStarvationTest, TheOtherTenantIsServed) {
  ASSERT_TRUE(a_->OpenKeyspace("of a").ok());
  for (int first = 0; first < kPages; first += 100) {
    std::vector<std::vector<std::byte>> fragments;
    for (int page = first; page < first + 100; ++page) {
      fragments.push_back(a_->Fragment(TestClient::Key(page), 1));
    }
    v1::PutResponse response;
    ASSERT_TRUE(a_->Put(fragments, &response).ok());
  }
  const auto stub = crumbd_.NewStub();
  // Times with and without the attack are taken in turns, in three rounds, so that the load of the
  // machine is in both. A bound of 3 times alone would fail by a few slow wake-ups where the p99 is
  // some hundred microseconds, because the attacker's own threads run on the same cores: 20 ms,
  // some slices of the scheduler, are allowed besides. A starved tenant waits for seconds or is
  // refused.
  std::vector<double> alone, attacked;
  for (int round = 0; round < 3; ++round) {
    for (const double seconds : Sample()) alone.push_back(seconds);
    Attack attack;
    GetParam().take({crumbd_, *a_, *stub, attack});
    for (const double seconds : Sample()) attacked.push_back(seconds);
    // More than the host tier would have free if the attacker kept all of its pages.
    for (int page = 8; page < 508; page += 4) {
      const int number = round * 1'000 + page;
      ASSERT_TRUE(PutOne(number)) << "Put " << page << ": " << last_.error_message();
    }
    EXPECT_TRUE(b_->OpenKeyspace("of b, " + std::to_string(round)).ok());
    ASSERT_TRUE(b_->OpenKeyspace("of b").ok());
    EXPECT_TRUE(Watches()) << "a watcher of b";
    std::vector<std::vector<std::byte>> got;
    v1::MissReason miss;
    EXPECT_TRUE(b_->Get(TestClient::Keys(0, 1), &got, &miss).ok());
    EXPECT_TRUE(crumbd_.Open("b")->welcome().error().empty()) << "a session of b";
  }
  EXPECT_LE(P99(attacked), 3 * P99(alone) + 0.02)
      << "p99 alone " << P99(alone) << " s, attacked " << P99(attacked) << " s";
}

INSTANTIATE_TEST_SUITE_P(Budgets, TenantStarvationTest, testing::ValuesIn(kRows),
                         [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace crumb::server
