// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
//
// A worker of the soak test: publishes pages at a pace, reads pages that it and the workers of its
// tenant on other nodes published, and checks every byte of every hit.
//   crumb-soak-worker SOCKET_DIR TOKEN_FILE TENANT NODE NODES FOLDER MIB_PER_SECOND
// TENANT, NODE and NODES are numbers; FOLDER is common to all workers. How many pages a worker has
// published stands in FOLDER/published-TENANT-NODE, so that it goes on after it was killed. Prints
// a line of JSON each second. A line "drop" on its input drops the tenant's keyspace on this node;
// "end" or the end of input ends the worker.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "crumb/client.h"
#include "tests/fault/known_pages.h"

namespace crumb::soak {
namespace {

using std::chrono::steady_clock;

constexpr int kBatchPages = 8;
// Pages behind the newest that are read again.
constexpr uint64_t kReadWindow = 2000;
constexpr auto kReadTimeout = std::chrono::milliseconds(500);
constexpr auto kPrintInterval = std::chrono::seconds(1);
// Pages of before a drop that are requested after it.
constexpr uint64_t kDroppedChecks = 64;

struct Arguments {
  std::string socket_dir;
  std::string token;
  uint64_t tenant = 0;
  uint64_t node = 0;
  uint64_t nodes = 1;
  std::string folder;
  double mib_per_second = 1;
};

struct Totals {
  uint64_t published = 0;
  uint64_t refused = 0;  // commits that stored nothing, for want of room or after a drop
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t wrong = 0;    // pages with a wrong byte
  uint64_t dropped = 0;  // pages that were served after their drop was acknowledged
  uint64_t drops = 0;
  uint64_t errors = 0;  // calls
};

class Worker {
 public:
  explicit Worker(Arguments arguments)
      : arguments_(std::move(arguments)), random_(arguments_.tenant * 16 + arguments_.node) {
    published_ = ReadPublished(arguments_.node);
  }

  int Run() {
    client::ClientOptions options;
    options.socket_dir = arguments_.socket_dir;
    options.process_name = "soak";
    options.token = arguments_.token;
    auto client = client::Client::Open(options);
    if (!client.ok()) {
      std::cerr << client.status() << "\n";
      return 2;
    }
    client_ = *std::move(client);
    steady_clock::time_point next_print = steady_clock::now() + kPrintInterval;
    steady_clock::time_point next_batch = steady_clock::now();
    while (!ended_) {
      if (!ReadInput()) break;
      if (!HasKeyspace()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      } else {
        if (totals_.drops < drops_wanted_) Drop();  // again until crumbd responds
        Publish();
        ReadBatch();
        const std::chrono::duration<double> pace(
            static_cast<double>(kBatchPages * pages_->fragment_bytes()) /
            (arguments_.mib_per_second * 1048576));
        next_batch += std::chrono::duration_cast<steady_clock::duration>(pace);
        // Batches that could not be done in time are not made up for.
        next_batch = std::max(next_batch, steady_clock::now() - std::chrono::seconds(1));
        std::this_thread::sleep_until(std::min(next_batch, next_print));
      }
      if (steady_clock::now() < next_print) continue;
      Print();
      next_print += kPrintInterval;
    }
    Print();
    return 0;
  }

 private:
  std::string PathOf(uint64_t node) const {
    return arguments_.folder + "/published-" + std::to_string(arguments_.tenant) + "-" +
           std::to_string(node);
  }
  uint64_t ReadPublished(uint64_t node) const {
    uint64_t count = 0;
    std::ifstream(PathOf(node)) >> count;
    return count;
  }
  // In one step, since this process may be killed at any moment.
  void WritePublished() const {
    const std::string path = PathOf(arguments_.node);
    std::ofstream(path + ".new") << published_ << "\n";
    std::rename((path + ".new").c_str(), path.c_str());
  }

  // The number of the i-th page of this tenant's worker on a node: bytes follow from it, so those
  // of two tenants are never alike.
  uint64_t NumberOf(uint64_t node, uint64_t i) const {
    return (arguments_.tenant << 56) + (node << 48) + i;
  }

  bool HasKeyspace() {
    if (pages_ != nullptr && steady_clock::now() < reopen_) return true;
    auto pages = fault::KnownPages::Open(*client_);
    if (!pages.ok()) {
      ++totals_.errors;
      return pages_ != nullptr;
    }
    pages_ = std::make_unique<fault::KnownPages>(*std::move(pages));
    reopen_ = steady_clock::now() + std::chrono::seconds(1);  // it may be dropped elsewhere
    return true;
  }

  void Publish() {
    const auto outcomes =
        pages_->Publish(*client_, NumberOf(arguments_.node, published_), kBatchPages);
    if (!outcomes.ok()) {
      ++totals_.errors;
      return;
    }
    for (const client::CommitOutcome outcome : *outcomes) {
      const bool there = outcome == client::CommitOutcome::kStored ||
                         outcome == client::CommitOutcome::kDeduplicated;
      ++(there ? totals_.published : totals_.refused);
    }
    published_ += outcomes->size();
    WritePublished();
  }

  void ReadBatch() {
    for (int i = 0; i < kBatchPages; ++i) {
      const uint64_t node = random_() % arguments_.nodes;
      const uint64_t count = node == arguments_.node ? published_ : ReadPublished(node);
      if (count == 0) continue;
      const uint64_t back = 1 + random_() % std::min(count, kReadWindow);
      Count(pages_->ReadBack(*client_, NumberOf(node, count - back), kReadTimeout));
    }
  }

  void Count(const absl::StatusOr<bool>& read) {
    if (read.ok()) {
      ++(*read ? totals_.hits : totals_.misses);
    } else if (absl::IsDataLoss(read.status())) {
      ++totals_.wrong;
      std::cerr << read.status() << "\n";
    } else {
      ++totals_.errors;
    }
  }

  // False: the input has ended.
  bool ReadInput() {
    pollfd input = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (::poll(&input, 1, 0) != 1) return true;
    std::string line;
    if (!std::getline(std::cin, line)) return false;
    ended_ = line == "end";
    if (line == "drop") ++drops_wanted_;
    return true;
  }

  void Drop() {
    const uint64_t before = published_;
    const auto dropped = client_->DropKeyspace(pages_->keyspace().id);
    if (!dropped.ok()) {
      ++totals_.errors;
      return;
    }
    ++totals_.drops;
    reopen_ = steady_clock::now();
    if (!HasKeyspace()) return;
    for (uint64_t i = 1; i <= std::min(before, kDroppedChecks); ++i) {
      const auto read =
          pages_->ReadBack(*client_, NumberOf(arguments_.node, before - i), kReadTimeout);
      if (read.ok() && *read) ++totals_.dropped;
      if (absl::IsDataLoss(read.status())) ++totals_.wrong;
    }
  }

  void Print() const {
    std::printf(
        "{\"published\": %llu, \"refused\": %llu, \"hits\": %llu, \"misses\": %llu, \"wrong\": "
        "%llu, \"dropped\": %llu, \"drops\": %llu, \"errors\": %llu, \"bytes\": %llu}\n",
        static_cast<unsigned long long>(totals_.published),
        static_cast<unsigned long long>(totals_.refused),
        static_cast<unsigned long long>(totals_.hits),
        static_cast<unsigned long long>(totals_.misses),
        static_cast<unsigned long long>(totals_.wrong),
        static_cast<unsigned long long>(totals_.dropped),
        static_cast<unsigned long long>(totals_.drops),
        static_cast<unsigned long long>(totals_.errors),
        static_cast<unsigned long long>(
            pages_ == nullptr ? 0 : totals_.published * pages_->fragment_bytes()));
    std::fflush(stdout);
  }

  const Arguments arguments_;
  std::mt19937_64 random_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<fault::KnownPages> pages_;
  steady_clock::time_point reopen_;
  uint64_t published_ = 0;
  uint64_t drops_wanted_ = 0;
  bool ended_ = false;
  Totals totals_;
};

std::string TokenIn(const std::string& path) {
  std::string token;
  std::getline(std::ifstream(path), token);
  return token;
}

}  // namespace
}  // namespace crumb::soak

int main(int argc, char** argv) {
  if (argc != 8) {
    std::cerr << "usage: crumb-soak-worker SOCKET_DIR TOKEN_FILE TENANT NODE NODES FOLDER "
                 "MIB_PER_SECOND\n";
    return 2;
  }
  const auto number = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  return crumb::soak::Worker({.socket_dir = argv[1],
                              .token = crumb::soak::TokenIn(argv[2]),
                              .tenant = number(3),
                              .node = number(4),
                              .nodes = std::max<uint64_t>(number(5), 1),
                              .folder = argv[6],
                              .mib_per_second = std::strtod(argv[7], nullptr)})
      .Run();
}
