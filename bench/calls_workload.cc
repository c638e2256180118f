// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/calls_workload.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>

#include "bench/fragment_set.h"
#include "bench/measure.h"
#include "bench/store_planes.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

// Bytes of a fragment: one tile, because acquired pages are not read.
constexpr size_t kFragmentBytes = 4608;
constexpr size_t kCallsBodiesBytes = 1 << 20;
constexpr size_t kPutPages = 256;  // pages of one Put
// Calls of each client before the measurement begins.
constexpr int kWarmCalls = 20;
// Staging memory of a client, the least possible, because clients commit nothing.
constexpr uint64_t kCallerStagingBytes = 1 << 20;

using Clients = std::vector<std::unique_ptr<client::Client>>;

// Leases are released asynchronously, so that a fast client may have too many for a moment. It
// pauses for kBusyPause then, kBusyMax times in a row at most.
constexpr Duration kBusyPause = std::chrono::milliseconds(1);
constexpr int kBusyMax = 10'000;

// The calls of one client.
struct Caller {
  Latencies latencies;
  size_t busy = 0;
  absl::Status status;
};

void CallUntil(client::Client& client, const FragmentSet& fragments, std::span<const PageKey> keys,
               const std::atomic<bool>& started, const std::atomic<bool>& stop, Caller* caller) {
  ShmPlane plane(client, fragments);
  int busy = 0;
  for (int i = 0; i < kWarmCalls || !stop.load();) {
    if (i == kWarmCalls) {
      while (!started.load()) std::this_thread::yield();
    }
    const auto took = plane.Acquire(0, keys, Duration::zero());
    if (absl::IsNotFound(took.status()) && ++busy < kBusyMax) {
      ++caller->busy;
      std::this_thread::sleep_for(kBusyPause);
      continue;
    }
    caller->status = took.status();
    if (!took.ok()) return;
    busy = 0;
    if (i++ >= kWarmCalls) caller->latencies.Add(*took);
  }
}

absl::StatusOr<CallsRow> Measure(const CallsWorkload& workload, const FragmentSet& fragments,
                                 const Clients& clients, std::span<const PageKey> keys) {
  std::atomic<bool> started{false}, stop{false};
  std::vector<Caller> callers(clients.size());
  std::vector<std::thread> threads;
  const size_t beside = workload.beside_pages > 0 ? 1 : 0;
  for (size_t i = 0; i < clients.size(); ++i) {
    const bool large = i + beside == clients.size() && beside > 0;
    const auto own =
        keys.first(static_cast<size_t>(large ? workload.beside_pages : workload.pages));
    threads.emplace_back(
        [&, i, own] { CallUntil(*clients[i], fragments, own, started, stop, &callers[i]); });
  }
  const TimePoint begin = Clock::Real().Now();
  started = true;
  std::this_thread::sleep_for(workload.duration);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const double seconds = ToSeconds(Clock::Real().Now() - begin);
  Latencies all;
  size_t busy = 0;
  for (size_t i = 0; i + beside < callers.size(); ++i) {
    CRUMB_RETURN_IF_ERROR(callers[i].status);
    all.Add(callers[i].latencies);
    busy += callers[i].busy;
  }
  const size_t calls = all.count();
  return CallsRow{.clients = static_cast<int>(clients.size() - beside),
                  .pages = workload.pages,
                  .beside_pages = workload.beside_pages,
                  .calls = calls,
                  .busy = busy,
                  .calls_per_second = static_cast<double>(calls) / seconds,
                  .p50_us = all.Percentile(0.5),
                  .p99_us = all.Percentile(0.99),
                  .max_us = all.Percentile(1.0)};
}

absl::Status PutAll(client::Client& client, const FragmentSet& fragments, size_t pages) {
  ShmPlane plane(client, fragments);
  for (size_t first = 0; first < pages; first += kPutPages) {
    CRUMB_RETURN_IF_ERROR(plane.Put(first, std::min(kPutPages, pages - first)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<CallsRow>> RunCallsWorkload(const CallsWorkload& workload) {
  const auto pages = static_cast<size_t>(std::max(workload.pages, workload.beside_pages));
  FragmentSet fragments("calls", kFragmentBytes, kCallsBodiesBytes, pages);
  CRUMB_ASSIGN_OR_RETURN(const auto writer, ConnectTo(workload.socket_dir));
  CRUMB_RETURN_IF_ERROR(BindKeyspace(*writer, fragments));
  CRUMB_RETURN_IF_ERROR(PutAll(*writer, fragments, pages));
  std::vector<PageKey> keys;
  for (size_t page = 0; page < pages; ++page) keys.push_back(fragments.Key(page));
  std::vector<CallsRow> rows;
  for (const int count : workload.clients) {
    Clients clients;
    for (int i = 0; i < count + (workload.beside_pages > 0 ? 1 : 0); ++i) {
      CRUMB_ASSIGN_OR_RETURN(auto client, ConnectTo(workload.socket_dir, kCallerStagingBytes));
      clients.push_back(std::move(client));
    }
    CRUMB_ASSIGN_OR_RETURN(rows.emplace_back(), Measure(workload, fragments, clients, keys));
  }
  return rows;
}

std::string CallsText(const std::vector<CallsRow>& rows) {
  std::string text = "clients  pages  beside    calls/s   p50 us   p99 us   max us     busy\n";
  for (const CallsRow& row : rows) {
    text += fmt::format("{:7} {:6} {:7} {:10.0f} {:8.0f} {:8.0f} {:8.0f} {:8}\n", row.clients,
                        row.pages, row.beside_pages, row.calls_per_second, row.p50_us, row.p99_us,
                        row.max_us, row.busy);
  }
  return text;
}

std::string CallsJson(const std::vector<CallsRow>& rows) {
  std::string text;
  for (const CallsRow& row : rows) {
    text += fmt::format(
        R"({}{{"clients": {}, "pages": {}, "beside_pages": {}, "calls": {}, "busy": {}, )"
        R"("calls_per_second": {:.0f}, "p50_us": {:.1f}, "p99_us": {:.1f}, "max_us": {:.1f}}})",
        text.empty() ? "" : ",\n ", row.clients, row.pages, row.beside_pages, row.calls, row.busy,
        row.calls_per_second, row.p50_us, row.p99_us, row.max_us);
  }
  return "[" + text + "]\n";
}

}  // namespace crumb::bench
