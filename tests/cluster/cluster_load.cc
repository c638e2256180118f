// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A worker of one crumbd: writes or reads known sequences and prints one JSON line.
//   cluster_load SOCKET_FOLDER write|read FIRST SEQUENCES PAGES WAIT_MS
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "tests/server/cluster/test_nodes.h"

int main(int argc, char** argv) {
  using namespace crumb::server;
  using std::chrono::steady_clock;
  if (argc != 7) return 2;
  const std::string folder = argv[1];
  const bool write = std::string(argv[2]) == "write";
  const int first = std::atoi(argv[3]), sequences = std::atoi(argv[4]), pages = std::atoi(argv[5]);
  const auto wait_ms = static_cast<uint32_t>(std::atoi(argv[6]));
  TestClient client(folder + "/crumbd.fd.sock", "unix:" + folder + "/crumbd.sock");
  if (!client.OpenKeyspace().ok()) return 1;
  int done = 0, wrong = 0, remote = 0;
  double slowest_ms = 0;
  std::vector<double> all_ms;
  for (int i = first; i < first + sequences; ++i) {
    const TestSequence sequence(i, pages);
    const auto began = steady_clock::now();
    if (write) {
      done += sequence.Commit(client);
    } else {
      std::vector<crumb::v1::Tier> tiers;
      const int right = sequence.Read(client, &tiers, nullptr, wait_ms);
      if (right < 0) ++wrong;
      done += std::max(right, 0);
      remote += static_cast<int>(std::count(tiers.begin(), tiers.end(), crumb::v1::TIER_REMOTE));
    }
    const std::chrono::duration<double, std::milli> took = steady_clock::now() - began;
    slowest_ms = std::max(slowest_ms, took.count());
    all_ms.push_back(took.count());
  }
  std::sort(all_ms.begin(), all_ms.end());
  const double median_ms = all_ms.empty() ? 0 : all_ms[all_ms.size() / 2];
  std::cout << "{\"pages\": " << sequences * pages << ", \"right\": " << done
            << ", \"wrong\": " << wrong << ", \"remote\": " << remote
            << ", \"slowest_ms\": " << slowest_ms << ", \"median_ms\": " << median_ms << "}"
            << std::endl;
  return 0;
}
