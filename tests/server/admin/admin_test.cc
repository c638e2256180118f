// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "gmock/gmock.h"
#include "httplib.h"
#include "server/admin/admin_server.h"
#include "server/admin/exporter.h"
#include "server/admin/history.h"
#include "server/admin/status_json.h"
#include "server/admin/status_page.h"
#include "tests/common/eventually.h"
#include "tests/server/call_fixture.h"
#include "tests/server/raw_connections.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

class AdminTest : public CallFixture {
 protected:
  std::string Export() const {
    ClusterScrape cluster;
    cluster.gauges.nodes.push_back({.id = "another"});
    TenantScrape tenants;
    tenants.uses = {{"a", 1, 2}};
    return ExportText({.metrics = metrics_,
                       .store = store_.Stats(),
                       .sessions = sessions_.totals(),
                       .requested_pages = metrics_.requested_pages.Read(context_.clock.Now()),
                       .active_keyspaces = 2,
                       .bf16_keyspaces = 1,
                       .watchers = events_.watchers(),
                       .version = "1.2.3",
                       .cluster = cluster,
                       .tenants = tenants,
                       .certificates = {{"listen.tls.cert_file",
                                         CertificateWatch::Instant(std::chrono::hours(2))},
                                        {"listen.tls.client_ca_file", std::nullopt}}});
  }
};

// Names of the families in a text: "# TYPE name type".
std::set<std::string> FamiliesOf(const std::string& text) {
  std::set<std::string> names;
  const std::regex line("# TYPE (\\S+) \\S+");
  for (std::sregex_iterator match(text.begin(), text.end(), line), end; match != end; ++match) {
    EXPECT_TRUE(names.insert((*match)[1]).second) << "twice: " << (*match)[1];
  }
  return names;
}

TEST_F(AdminTest, EverySeriesIsThereFromTheStart) {
  const std::string text = Export();
  for (const char* series :
       {"crumb_lookup_tokens_total{model=\"other\",tier=\"device\"} 0",
        "crumb_certificate_expiry_timestamp_seconds{setting=\"listen.tls.cert_file\"} 7200",
        "crumb_certificate_expiry_timestamp_seconds{setting=\"listen.tls.client_ca_file\"} 0",
        "crumb_lookup_tokens_total{model=\"tiny\",tier=\"window\"} 0",
        "crumb_fetched_tokens_total{tier=\"remote\"} 0",
        "crumb_used_tokens_total 0",
        "crumb_requested_pages_window{window=\"15m\"} 0",
        "crumb_unique_pages_estimate{window=\"24h\"} 0",
        "crumb_requests_in_flight 0",
        "crumb_tier_state{tier=\"host\",state=\"active\"} 1",
        "crumb_tier_state{tier=\"host\",state=\"read-only\"} 0",
        "crumb_keyspaces{state=\"active\"} 2",
        "crumb_keyspaces{state=\"bf16\"} 1",
        "crumb_log_messages_total{severity=\"error\"} 0",
        "crumb_evicted_pages_total{tier=\"ssd\",reason=\"corrupt\"} 0",
        "crumb_request_seconds_count{rpc=\"Acquire\",outcome=\"deadline\"} 0",
        "crumb_stage_seconds_count{stage=\"commit_store\"} 0",
        "crumb_rejected_total{reason=\"lease_budget\"} 0",
        "crumb_pages_refused_total{reason=\"non_finite\"} 0",
        "crumb_page_lifetime_seconds_bucket{tier=\"ssd\",le=\"+Inf\"} 0",
        "crumb_build_info{version=\"1.2.3\",ucx=\"none\",cuda=\"none\"} 1"}) {
    EXPECT_THAT(text, HasSubstr(series));
  }
}

TEST_F(AdminTest, NamesFollowPrometheusConventions) {
  const std::string text = Export();
  const std::regex counter("# TYPE (\\S+) counter");
  for (std::sregex_iterator match(text.begin(), text.end(), counter), end; match != end; ++match) {
    EXPECT_TRUE(std::string((*match)[1]).ends_with("_total")) << (*match)[1];
  }
  for (const std::string& name : FamiliesOf(text)) {
    EXPECT_TRUE(name.starts_with("crumb_")) << name;
  }
}

TEST_F(AdminTest, TheDocumentNamesEveryMetricAndNoOther) {
  std::ifstream file("docs/metrics.md");
  ASSERT_TRUE(file.good());
  std::stringstream stream;
  stream << file.rdbuf();
  const std::string text = stream.str();
  std::set<std::string> documented;
  const std::regex name("\\| `(crumb_[a-z0-9_]+)");
  for (std::sregex_iterator match(text.begin(), text.end(), name), end; match != end; ++match) {
    documented.insert((*match)[1]);
  }
  EXPECT_EQ(documented, FamiliesOf(Export()));
}

TEST_F(AdminTest, HistogramsAreCumulative) {
  for (const double seconds : {10e-6, 80e-6, 80e-6, 100.0}) {
    metrics_.requests.Observe(Rpc::kAcquire, absl::StatusCode::kOk, seconds);
  }
  const std::string text = Export();
  const std::string series = "crumb_request_seconds_bucket{rpc=\"Acquire\",outcome=\"ok\",le=";
  EXPECT_THAT(text, HasSubstr(series + "\"5e-05\"} 1\n"));
  EXPECT_THAT(text, HasSubstr(series + "\"0.0001\"} 3\n"));
  EXPECT_THAT(text, HasSubstr(series + "\"30\"} 3\n"));
  EXPECT_THAT(text, HasSubstr(series + "\"+Inf\"} 4\n"));
}

TEST(OutcomeTest, EveryCodeIsOneOfFew) {
  EXPECT_EQ(OutcomeOf(absl::StatusCode::kOk), Outcome::kOk);
  EXPECT_EQ(OutcomeOf(absl::StatusCode::kInvalidArgument), Outcome::kCallerError);
  EXPECT_EQ(OutcomeOf(absl::StatusCode::kResourceExhausted), Outcome::kRejected);
  EXPECT_EQ(OutcomeOf(absl::StatusCode::kDeadlineExceeded), Outcome::kDeadline);
  EXPECT_EQ(OutcomeOf(absl::StatusCode::kInternal), Outcome::kError);
}

TEST(AdminServerTest, NotReadyUntilItIs) {
  std::atomic<bool> ready{false};
  AdminOptions options;
  options.listen = "127.0.0.1:0";
  Counter closed;
  const auto server =
      AdminServer::Start(options,
                         {[&] { return ready.load(); },
                          [&] { return ready ? std::string("metrics\n") : std::string(); },
                          [&] { return ready ? std::string("{}") : std::string(); },
                          [&] { return ready ? std::string("<p>") : std::string(); }},
                         closed);
  ASSERT_TRUE(server.ok()) << server.status();
  httplib::Client client("http://" + (*server)->address());
  EXPECT_EQ(client.Get("/healthz")->status, 200);
  for (const char* path : {"/", "/readyz", "/metrics", "/status.json"}) {
    EXPECT_EQ(client.Get(path)->status, 503) << path;
  }
  ready = true;
  for (const char* path : {"/", "/readyz", "/metrics", "/status.json"}) {
    EXPECT_EQ(client.Get(path)->status, 200) << path;
  }
  EXPECT_THAT(client.Get("/")->get_header_value("Content-Security-Policy"),
              HasSubstr("default-src 'none'"));
  EXPECT_EQ(client.Post("/metrics", std::string(100'000, 'x'), "text/plain")->status, 413);
  options.listen = (*server)->address();
  EXPECT_EQ(AdminServer::Start(options, {}, closed).status().code(),
            absl::StatusCode::kAlreadyExists);
}

// Callers who send a byte now and then, or nothing.
class SlowCallersTest : public testing::Test {
 protected:
  SlowCallersTest() {
    options_.listen = "127.0.0.1:0";
    options_.threads = 1;
    options_.read_timeout = std::chrono::minutes(1);
  }
  void Start() {
    server_ = AdminServer::Start(
                  options_,
                  {[] { return true; }, [] { return std::string("metrics\n"); },
                   [] { return std::string("{}"); }, [] { return std::string(1 << 20, 'p'); }},
                  closed_)
                  .value();
    port_ = PortOfAddress(server_->address());
  }
  bool Served() const {
    httplib::Client client("http://" + server_->address());
    client.set_read_timeout(std::chrono::seconds(20));
    const auto result = client.Get("/metrics");
    return result && result->status == 200 && result->body == "metrics\n";
  }

  AdminOptions options_;
  Counter closed_;
  std::unique_ptr<AdminServer> server_;
  int port_ = 0;
};

TEST_F(SlowCallersTest, HoldNoThread) {
  Start();
  RawConnections slow;
  for (size_t i = 0; i < 8; ++i) {
    ASSERT_TRUE(slow.OpenTcp("127.0.0.1", port_));
    ASSERT_TRUE(slow.Send(i, "GET /metrics HTTP/1.1\r\nX-Slow: "));
  }
  EXPECT_TRUE(Served());
  // A caller that reads nothing of a response that is larger than the socket's buffers.
  ASSERT_TRUE(slow.OpenTcp("127.0.0.1", port_));
  ASSERT_TRUE(slow.Send(8, "GET / HTTP/1.1\r\n\r\n"));
  EXPECT_TRUE(Served());
  EXPECT_EQ(closed_.value(), 0u) << "there was time and room for all";
}

TEST_F(SlowCallersTest, HaveOneDeadlineHoweverOftenTheySendSomething) {
  options_.read_timeout = std::chrono::milliseconds(300);
  Start();
  RawConnections slow;
  ASSERT_TRUE(slow.OpenTcp("127.0.0.1", port_));
  ASSERT_TRUE(slow.Send(0, "GET /metrics HTTP/1.1\r\nX-Slow: "));
  EXPECT_TRUE(Eventually([&] { return !slow.Send(0, "x"); }, std::chrono::seconds(5)));
  EXPECT_EQ(closed_.value(), 1u);
}

TEST_F(SlowCallersTest, ManyGiveTheirPlacesToOthers) {
  options_.connections_max = 8;
  Start();
  RawConnections slow;
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(slow.OpenTcp("127.0.0.2", port_));
  EXPECT_TRUE(Served());
  EXPECT_GT(closed_.value(), 0u);
}

TEST_F(SlowCallersTest, AHeadHasABound) {
  Start();
  RawConnections large;
  ASSERT_TRUE(large.OpenTcp("127.0.0.1", port_));
  ASSERT_TRUE(large.Send(0, "GET / HTTP/1.1\r\nX: " + std::string(20'000, 'x')));
  EXPECT_TRUE(Eventually([&] { return large.Open() == 0; }));
  EXPECT_EQ(closed_.value(), 1u);
}

TEST(StatusJsonTest, EscapesWhatPeopleWrote) {
  v1::StatsResponse stats;
  auto* keyspace = stats.add_keyspaces();
  keyspace->set_keyspace("\x01\xff");
  keyspace->set_model("a\"b\\c\nd");
  (*stats.mutable_counters())["crumb_x_total"] = 18'446'744'073'709'551'615U;
  const std::string json = StatusJson(stats, "{}");
  EXPECT_THAT(json, HasSubstr("\"keyspace\":\"01ff\""));
  EXPECT_THAT(json, HasSubstr("\"model\":\"a\\\"b\\\\c\\u000ad\""));
  EXPECT_THAT(json, HasSubstr("\"crumb_x_total\":18446744073709551615"));
}

constexpr char kHostile[] = "</code><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>\x01";

StatusView HostileView() {
  StatusView view;
  view.stats.set_node_id(kHostile);
  view.stats.set_version(kHostile);
  auto* tier = view.stats.add_tiers();
  tier->set_tier(v1::TIER_SSD);
  tier->set_state(kHostile);
  auto* keyspace = view.stats.add_keyspaces();
  keyspace->set_keyspace(kHostile);
  keyspace->set_model(kHostile);
  keyspace->set_state_reason(kHostile);
  auto* node = view.nodes.add_nodes();
  node->set_id(kHostile);
  node->set_address(kHostile);
  node->set_version(kHostile);
  view.nodes.add_refused(kHostile);
  view.nodes.set_trouble(kHostile);
  view.problems.push_back({{}, Severity::kError, kHostile});
  return view;
}

size_t CountOf(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(StatusPageTest, EscapesEverythingFromOutside) {
  const std::string page = StatusPage(HostileView());
  EXPECT_EQ(CountOf(page, "<script"), 0u);
  EXPECT_EQ(CountOf(page, "<img"), 0u);
  EXPECT_EQ(page.find('\x01'), std::string::npos);
  // Version, node id, tier state, model, state reason, three of the node and two below, a problem.
  EXPECT_EQ(CountOf(page, "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#39;&amp;"), 11u);
}

HistorySample SampleOf(int seconds, uint64_t host, uint64_t miss, uint64_t saved) {
  HistorySample sample;
  sample.when = TimePoint() + std::chrono::seconds(seconds);
  sample.lookup_tokens[static_cast<size_t>(TokenTier::kHost)] = host;
  sample.lookup_tokens[static_cast<size_t>(TokenTier::kMiss)] = miss;
  sample.saved_bytes = saved;
  return sample;
}

TEST(StatusPageTest, ChartsHoldOneBarPerIntervalWithSomethingInIt) {
  StatusView view;
  view.history = {SampleOf(0, 100, 100, 0), SampleOf(10, 175, 125, 1 << 20),
                  SampleOf(20, 175, 125, 1 << 20)};
  const std::string page = StatusPage(view);
  EXPECT_THAT(page, HasSubstr("id=\"hit-rate\">75.0 %</span> of 100 tokens, last 20 s"));
  EXPECT_THAT(page, HasSubstr("id=\"saved\">1.0 MiB</span>"));
  // Three quarters of the chart's height in the first interval, nothing in the second.
  EXPECT_THAT(page, HasSubstr("<path class=\"host\" d=\"M0.0 120.0h405.0v-90.0h-405.0z\"/>"));
  EXPECT_THAT(page, HasSubstr("<path class=\"ssd\" d=\"\"/>"));
}

TEST(StatusPageTest, StaysSmallWhateverThereIs) {
  StatusView view;
  for (int i = 0; i < 2'000; ++i) {
    view.stats.add_keyspaces()->set_model("model " + std::to_string(i));
    view.nodes.add_refused("node " + std::to_string(i) + " has another layout");
    view.history.push_back(SampleOf(i, static_cast<uint64_t>(i), static_cast<uint64_t>(i), 7));
  }
  const std::string page = StatusPage(view);
  EXPECT_LT(page.size(), 64u << 10);
  EXPECT_THAT(page, HasSubstr("1900 more in"));
  EXPECT_THAT(page, HasSubstr("1980 more are refused"));
  view.history.resize(1);
  EXPECT_THAT(StatusPage(view), HasSubstr("id=\"hit-rate\">-</span>"));
  view.history.clear();
  EXPECT_THAT(StatusPage(view), HasSubstr("<h2>Tiers</h2>"));
}

TEST(HistoryTest, TakesSamplesAndKeepsTheNewest) {
  std::atomic<uint64_t> taken{0};
  History history({std::chrono::milliseconds(10), 4}, [&] {
    HistorySample sample;
    sample.saved_bytes = taken.fetch_add(1);
    return sample;
  });
  ASSERT_GE(history.Samples().size(), 1u);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (taken.load() < 10 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  ASSERT_GE(taken.load(), 10u);
  const auto samples = history.Samples();
  ASSERT_EQ(samples.size(), 4u);
  for (size_t i = 1; i < samples.size(); ++i) {
    EXPECT_EQ(samples[i].saved_bytes, samples[i - 1].saved_bytes + 1);
  }
}

}  // namespace
}  // namespace crumb::server
