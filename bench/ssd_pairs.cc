// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/store_workload.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "bench/fragment_set.h"
#include "bench/measure.h"
#include "bench/raw_limits.h"
#include "bench/servers_under_test.h"
#include "bench/store_planes.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "tools/text_table.h"

namespace crumb::bench {
namespace {

constexpr int kPairs = 15;
constexpr int kDepth = 8;
constexpr size_t kPairsBodiesBytes = 64 << 20;
// Pages of one Acquire: enough reads to keep kDepth in flight, but only a part of host memory.
constexpr size_t kCallBytes = 16 << 20;
constexpr uint64_t kHostBytes = 256 << 20;
constexpr Duration kWait = std::chrono::seconds(20);
constexpr size_t kReadAlignment = 4096;

// The bytes and wall time of reads, and their source.
class SsdPairs {
 public:
  // Reads `pages` pages, `pages_per_call` at a time.
  SsdPairs(const CrumbdUnderTest& crumbd, const FragmentSet& fragments, ShmPlane& shm, size_t pages,
           size_t pages_per_call)
      : crumbd_(crumbd),
        fragments_(fragments),
        shm_(shm),
        pages_(pages),
        pages_per_call_(pages_per_call) {
    for (size_t page = 0; page < pages; ++page) keys_.push_back(fragments.Key(page));
  }

  absl::Status Run(StoreResult& result);

 private:
  absl::StatusOr<double> ReadRaw() const;
  absl::StatusOr<TimedCalls> ReadPages();
  StoreRow Row(const char* operation, size_t pages_per_call) const;

  const CrumbdUnderTest& crumbd_;
  const FragmentSet& fragments_;
  ShmPlane& shm_;
  const size_t pages_;
  const size_t pages_per_call_;
  std::vector<PageKey> keys_;
};

absl::StatusOr<double> SsdPairs::ReadRaw() const {
  DirectReadOptions raw;
  raw.folder = crumbd_.ssd_path();
  raw.piece_bytes =
      (fragments_.fragment_bytes() + kReadAlignment - 1) / kReadAlignment * kReadAlignment;
  raw.bytes_max = pages_ * raw.piece_bytes;
  raw.depth = kDepth;
  return DirectReadGbPerS(raw);
}

absl::StatusOr<TimedCalls> SsdPairs::ReadPages() {
  const size_t step = pages_per_call_;
  TimedCallsOptions timed;
  timed.seconds = 3600;  // the number of calls ends the measurement
  timed.rounds = 1;
  timed.calls_max = pages_ / step;
  timed.bytes_per_call = step * fragments_.tiles_bytes();
  timed.other_pids = {crumbd_.pid()};
  return RunTimedCalls(timed, [&](size_t index) {
    return shm_.Acquire(index * step, std::span(keys_).subspan(index * step, step), kWait);
  });
}

StoreRow SsdPairs::Row(const char* operation, size_t pages_per_call) const {
  StoreRow row;
  row.plane = "ssd";
  row.operation = operation;
  row.fragment_bytes = fragments_.tiles_bytes();
  row.pages_per_call = pages_per_call;
  return row;
}

absl::Status SsdPairs::Run(StoreResult& result) {
  std::vector<double> raw_rates, rates, ratios;
  StoreRow get = Row("get", pages_per_call_);
  for (int pair = 0; pair < kPairs && !Interrupted(); ++pair) {
    CRUMB_ASSIGN_OR_RETURN(const double raw, ReadRaw());
    CRUMB_ASSIGN_OR_RETURN(get.timed, ReadPages());
    raw_rates.push_back(raw);
    rates.push_back(get.timed.gb_per_s);
    ratios.push_back(get.timed.gb_per_s / raw);
  }
  if (ratios.empty()) return absl::OkStatus();
  StoreRow read = Row("raw-read", 1);
  read.timed.gb_per_s = Median(raw_rates);
  get.timed.gb_per_s = Median(rates);
  get.limit = "raw O_DIRECT";
  get.limit_gb_per_s = read.timed.gb_per_s;
  get.ratio_to_raw = Median(ratios);
  result.rows.push_back(std::move(read));
  result.rows.push_back(std::move(get));
  return absl::OkStatus();
}

absl::Status RunOneSize(const StoreWorkloadOptions& options, size_t bytes, StoreResult& result) {
  CrumbdSettings settings;
  settings.program = options.crumbd;
  settings.host_bytes.value = kHostBytes;
  settings.slab_bytes.value = kHostBytes / 4;
  settings.ssd_bytes.value = 3 * options.ssd_set_bytes.value;
  settings.ssd_threads = kDepth;
  settings.host_policy = "lru";  // a cyclic walk over a larger set then never hits in memory
  CRUMB_ASSIGN_OR_RETURN(const auto crumbd, CrumbdUnderTest::Start(settings));
  // One call reads one sequence, because a longer one could not leave host memory while its end is
  // leased.
  const size_t pages_per_call = std::max<size_t>(1, kCallBytes / bytes);
  FragmentSet fragments(fmt::format("ssd-{}-{}", bytes, ::getpid()), bytes, kPairsBodiesBytes,
                        pages_per_call);
  CRUMB_ASSIGN_OR_RETURN(const auto client, ConnectTo(crumbd->socket_dir()));
  CRUMB_RETURN_IF_ERROR(BindKeyspace(*client, fragments));
  ShmPlane shm(*client, fragments);
  const size_t pages = options.ssd_set_bytes.value / fragments.fragment_bytes();
  fmt::print(stderr, "store: ssd {}, writing {} pages\n", tools::FormatBytes(bytes), pages);
  const size_t step = std::max<size_t>(1, (8 << 20) / fragments.fragment_bytes());
  for (size_t page = 0; page < pages && !Interrupted(); page += step) {
    CRUMB_RETURN_IF_ERROR(shm.Put(page, std::min(step, pages - page)));
    // Write-through drops pages if the disk is too slow, so it gets time.
    CRUMB_RETURN_IF_ERROR(client->Flush(kWait).status());
  }
  return SsdPairs(*crumbd, fragments, shm, pages, pages_per_call).Run(result);
}

}  // namespace

absl::Status RunSsdPairs(const StoreWorkloadOptions& options, StoreResult& result) {
  for (const size_t bytes : options.fragment_bytes) {
    if (!Interrupted()) CRUMB_RETURN_IF_ERROR(RunOneSize(options, bytes, result));
  }
  return absl::OkStatus();
}

}  // namespace crumb::bench
