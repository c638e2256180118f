// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A worker of one crumbd: writes or reads known sequences, checks every byte, prints JSON lines.
//   cluster_load SOCKET_FOLDER write|read FIRST SEQUENCES PAGES WAIT_MS
// does it once for each sequence and prints one line;
//   cluster_load SOCKET_FOLDER write|read FIRST SEQUENCES PAGES WAIT_MS PROGRESS_FILE
// goes on until its input ends: the writer with ever new sequences, whose number it keeps in
// PROGRESS_FILE, the reader with the newest SEQUENCES of those. For each line of input it prints
// the counts since the line before.
//   cluster_load SOCKET_FOLDER watch 0 0 0 0
// follows the node's events, from a snapshot on, until its input ends. For each line of input it
// prints the number of pages that it knows and the errors of the stream.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "nlohmann/json.hpp"
#include "tests/server/cluster/test_nodes.h"

namespace crumb::server {
namespace {

using std::chrono::steady_clock;

struct Work {
  bool write = false;
  int first = 0;
  int sequences = 0;
  int pages = 0;
  uint32_t wait_ms = 0;
  std::string progress;
};

struct Totals {
  int requested = 0;             // pages
  int right = 0;                 // pages, stored or hit with the right bytes
  int wrong = 0;                 // requests with a wrong byte
  int remote = 0;                // pages
  int errors = 0;                // calls
  std::vector<int> hits;         // pages, of each sequence
  std::vector<double> calls_ms;  // duration of each Acquire, or Reserve and Commit of a page

  nlohmann::json ToJson() const {
    std::vector<double> sorted = calls_ms;
    std::sort(sorted.begin(), sorted.end());
    return {{"pages", requested},
            {"right", right},
            {"wrong", wrong},
            {"remote", remote},
            {"errors", errors},
            {"requests", sorted.size()},
            {"hits", hits},
            {"slowest_ms", sorted.empty() ? 0 : sorted.back()},
            {"median_ms", sorted.empty() ? 0 : sorted[sorted.size() / 2]}};
  }
};

template <typename Call>
grpc::Status Timed(Totals& totals, Call call) {
  const auto began = steady_clock::now();
  const grpc::Status status = call();
  const std::chrono::duration<double, std::milli> took = steady_clock::now() - began;
  totals.calls_ms.push_back(took.count());
  if (!status.ok()) {
    ++totals.errors;
    std::cerr << status.error_message() << std::endl;
  }
  return status;
}

void Write(TestClient& client, const TestSequence& sequence, Totals& totals) {
  int stored = 0;
  for (int page = 0; page < sequence.pages(); ++page) {
    const std::vector<std::byte> fragment = sequence.Fragment(client, page);
    v1::CommitResponse response;
    Timed(totals, [&] { return client.Commit(fragment, &response); });
    if (response.outcomes_size() == 1 && response.outcomes(0) == v1::COMMIT_OUTCOME_STORED) {
      ++stored;
    }
  }
  totals.requested += sequence.pages();
  totals.right += stored;
  totals.hits.push_back(stored);
}

void Read(TestClient& client, const TestSequence& sequence, uint32_t wait_ms, Totals& totals) {
  v1::AcquireRequest request;
  request.set_keyspace(client.keyspace().keyspace());
  request.set_keys(sequence.Keys());
  request.set_wait_ms(wait_ms);
  v1::AcquireResponse response;
  Timed(totals, [&] { return client.stub().Acquire(client.Context().get(), request, &response); });
  int right = 0;
  for (int i = 0; i < response.fragments().pages_size(); ++i) {
    const auto expected =
        sequence.Fragment(client, static_cast<int>(response.fragments().pages(i)));
    const auto bytes = client.Mapped(response.fragments(), i);
    right += std::equal(expected.begin(), expected.end(), bytes.begin(), bytes.end()) ? 1 : 0;
  }
  if (response.lease() != 0 && !client.Release(response.lease()).ok()) ++totals.errors;
  totals.requested += sequence.pages();
  totals.right += right;
  totals.hits.push_back(right);
  if (right != static_cast<int>(response.hit_pages())) ++totals.wrong;
  const auto& tiers = response.page_tiers();
  totals.remote += static_cast<int>(std::count(tiers.begin(), tiers.end(), v1::Tier::TIER_REMOTE));
}

void Once(TestClient& client, const Work& work) {
  Totals totals;
  for (int i = work.first; i < work.first + work.sequences; ++i) {
    const TestSequence sequence(i, work.pages);
    work.write ? Write(client, sequence, totals) : Read(client, sequence, work.wait_ms, totals);
  }
  std::cout << totals.ToJson().dump() << std::endl;
}

int WrittenIn(const std::string& file) {
  int written = 0;
  std::ifstream(file) >> written;
  return written;
}

void NoteWritten(const std::string& file, int written) {
  std::ofstream(file + ".new") << written;
  std::rename((file + ".new").c_str(), file.c_str());
}

// Goes on, at a pace that leaves the machine to others, until it is stopped.
class Loop {
 public:
  Loop(TestClient& client, const Work& work)
      : client_(client), work_(work), thread_([this] { Run(); }) {}

  ~Loop() {
    stopping_ = true;
    thread_.join();
  }

  Totals Take() {
    MutexLock lock(&mutex_);
    return std::exchange(totals_, Totals());
  }

 private:
  void Run() {
    for (int turn = 0; !stopping_; ++turn) {
      Totals totals;
      if (work_.write) {
        Write(client_, TestSequence(work_.first + turn, work_.pages), totals);
        NoteWritten(work_.progress, turn + 1);
      } else if (const int written = WrittenIn(work_.progress); written > 0) {
        const int back = 1 + turn % std::min(work_.sequences, written);
        Read(client_, TestSequence(work_.first + written - back, work_.pages), work_.wait_ms,
             totals);
      }
      Merge(totals);
      std::this_thread::sleep_for(std::chrono::milliseconds(work_.write ? 250 : 20));
    }
  }

  void Merge(const Totals& totals) {
    MutexLock lock(&mutex_);
    totals_.requested += totals.requested;
    totals_.right += totals.right;
    totals_.wrong += totals.wrong;
    totals_.remote += totals.remote;
    totals_.errors += totals.errors;
    totals_.hits.insert(totals_.hits.end(), totals.hits.begin(), totals.hits.end());
    totals_.calls_ms.insert(totals_.calls_ms.end(), totals.calls_ms.begin(), totals.calls_ms.end());
  }

  TestClient& client_;
  const Work work_;
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  Totals totals_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// A router's index of pages, by WatchEvents.
class Watch {
 public:
  explicit Watch(TestClient& client) {
    v1::WatchEventsRequest request;
    request.set_keyspace(client.keyspace().keyspace());
    request.set_snapshot(true);
    stream_ = client.stub().WatchEvents(&context_, request);
    thread_ = std::thread([this] { Run(); });
  }

  ~Watch() {
    context_.TryCancel();
    thread_.join();
  }

  nlohmann::json ToJson() const {
    MutexLock lock(&mutex_);
    return {{"snapshot", whole_},
            {"pages", pages_.size()},
            {"disorder", disorder_},
            {"lost", lost_},
            {"ended", ended_}};
  }

 private:
  void Run() {
    v1::WatchEventsResponse event;
    while (stream_->Read(&event)) Take(event);
    MutexLock lock(&mutex_);
    ended_ = true;
  }

  void Take(const v1::WatchEventsResponse& event) {
    MutexLock lock(&mutex_);
    if (whole_ && event.sequence() <= last_) ++disorder_;
    last_ = event.sequence();
    switch (event.kind()) {
      case v1::WatchEventsResponse::KIND_ADDED:
        pages_.insert(event.key());
        break;
      case v1::WatchEventsResponse::KIND_REMOVED:
        pages_.erase(event.key());
        break;
      case v1::WatchEventsResponse::KIND_SNAPSHOT_END:
        whole_ = true;
        break;
      default:
        ++lost_;
    }
  }

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::WatchEventsResponse>> stream_;
  mutable Mutex mutex_;
  std::set<std::string> pages_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  int disorder_ ABSL_GUARDED_BY(mutex_) = 0;
  int lost_ ABSL_GUARDED_BY(mutex_) = 0;
  bool whole_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

void FollowEvents(TestClient& client) {
  const Watch watch(client);
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << watch.ToJson().dump() << std::endl;
  }
}

int Main(int argc, char** argv) {
  if (argc != 7 && argc != 8) return 2;
  const std::string folder = argv[1];
  Work work;
  work.write = std::string(argv[2]) == "write";
  work.first = std::atoi(argv[3]);
  work.sequences = std::atoi(argv[4]);
  work.pages = std::atoi(argv[5]);
  work.wait_ms = static_cast<uint32_t>(std::atoi(argv[6]));
  TestClient client(folder + "/crumbd.fd.sock", "unix:" + folder + "/crumbd.sock");
  if (!client.OpenKeyspace().ok()) return 1;
  if (argc == 7) {
    std::string(argv[2]) == "watch" ? FollowEvents(client) : Once(client, work);
    return 0;
  }
  work.progress = argv[7];
  Loop loop(client, work);
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << loop.Take().ToJson().dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace crumb::server

int main(int argc, char** argv) { return crumb::server::Main(argc, argv); }
