// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "gmock/gmock.h"
#include "httplib.h"
#include "server/admin/admin_server.h"
#include "server/admin/status_json.h"
#include "server/metrics/exporter.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {
namespace {

using testing::HasSubstr;

class AdminTest : public CallFixture {
 protected:
  std::string Export() const {
    return ExportText(
        {metrics_, store_.Stats(), sessions_.totals(), 0, 0, events_.watchers(), "1.2.3"});
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
        "crumb_lookup_tokens_total{model=\"tiny\",tier=\"window\"} 0",
        "crumb_fetched_tokens_total{tier=\"remote\"} 0", "crumb_used_tokens_total 0",
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
  const auto server =
      AdminServer::Start(options, {[&] { return ready.load(); },
                                   [&] { return ready ? std::string("metrics\n") : std::string(); },
                                   [&] { return ready ? std::string("{}") : std::string(); }});
  ASSERT_TRUE(server.ok()) << server.status();
  httplib::Client client("http://" + (*server)->address());
  EXPECT_EQ(client.Get("/healthz")->status, 200);
  for (const char* path : {"/readyz", "/metrics", "/status.json"}) {
    EXPECT_EQ(client.Get(path)->status, 503) << path;
  }
  ready = true;
  for (const char* path : {"/readyz", "/metrics", "/status.json"}) {
    EXPECT_EQ(client.Get(path)->status, 200) << path;
  }
  EXPECT_EQ(client.Post("/metrics", std::string(100'000, 'x'), "text/plain")->status, 413);
  options.listen = (*server)->address();
  EXPECT_EQ(AdminServer::Start(options, {}).status().code(), absl::StatusCode::kAlreadyExists);
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

}  // namespace
}  // namespace crumb::server
