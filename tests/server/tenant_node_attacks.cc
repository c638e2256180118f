// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// How one tenant takes all it can get of a node's log, of its metrics, and of the index of its SSD.
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/server/flood.h"
#include "tests/server/two_tenants.h"

namespace crumb::server {
namespace {

// Changes of a keyspace's state, each of which is a line.
void FloodLog(const Attacker& a) {
  v1::SetKeyspaceStateRequest request;
  request.set_keyspace(a.session.keyspace().keyspace());
  request.set_state(v1::KEYSPACE_STATE_ACTIVE);
  request.set_who(std::string(512, 'w'));
  request.set_reason(std::string(512, 'r'));
  a.attack.kept.push_back(
      std::make_shared<Flood>(kFloodThreads, [request, stub = std::shared_ptr(a.crumbd.NewStub())] {
        v1::SetKeyspaceStateResponse response;
        stub->SetKeyspaceState(TwoTenants::Context("a").get(), request, &response);
      }));
}

// Reports, without end, amounts that no engine reaches.
void ReportNonsense(const Attacker& a) {
  const auto session = std::shared_ptr(a.crumbd.Open("a"));
  ASSERT_TRUE(session->welcome().error().empty()) << session->welcome().error();
  a.attack.contexts.push_back(session->Context());
  const auto stream = std::shared_ptr(session->stub().Session(a.attack.contexts.back().get()));
  v1::SessionRequest report;
  report.mutable_counters()->set_used_tokens(std::numeric_limits<uint64_t>::max());
  report.mutable_counters()->set_verify_failures(std::numeric_limits<uint64_t>::max());
  constexpr int kSamples = 4'096;  // the number that a client sends at a time
  for (int i = 0; i < kSamples; ++i) report.add_quality()->set_layer(static_cast<uint32_t>(i));
  a.attack.kept.push_back(session);
  a.attack.kept.push_back(std::make_shared<Flood>(1, [stream, report] { stream->Write(report); }));
}

// Stores pages of one tile, more than the index has room for.
void FillIndex(const Attacker& a) {
  constexpr int kFirst = 11'000'000;
  constexpr int kPages = 8'192;
  constexpr int kPart = 512;
  for (int first = kFirst; first < kFirst + kPages; first += kPart) {
    std::vector<std::vector<std::byte>> fragments;
    for (int page = first; page < first + kPart; ++page) {
      fragments.push_back(a.session.Fragment(TestClient::Key(page), 1, {{0, 1}, {0, 1}}));
    }
    v1::PutResponse response;
    ASSERT_TRUE(a.session.Put(fragments, &response).ok());
  }
}

}  // namespace

std::vector<BudgetRow> NodeBudgetRows() {
  return {
      {"log_lines", "crumb_log_lines_left_out_total", FloodLog},
      {"reported_amounts", "crumb_reports_cut_total", ReportNonsense},
      {"ssd_index", "crumb_evicted_pages_total{tier=\"ssd\",reason=\"capacity\"}", FillIndex,
       [](Options& options) {
         options.store.ssd.path = options.listen.socket_dir + "/data";
         options.store.ssd.bytes_max = ByteSize{uint64_t{256} << 20};
         options.store.ssd.fragments_max = 4'096;
       }},
  };
}

}  // namespace crumb::server
