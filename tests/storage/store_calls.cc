// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/store_calls.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <future>

#include "gtest/gtest.h"

namespace crumb::storage {

absl::StatusOr<CommitOutcome> Commit(TieredStore& store, const SampleFragment& sample) {
  const std::vector<std::byte> bytes = BytesOf(sample);
  return store.Commit(CommitOf(sample, bytes));
}

AcquireRequest RequestOf(uint64_t sequence, uint64_t pages) {
  AcquireRequest request;
  request.keyspace = SampleKeyspace(0);
  request.generation = 1;
  for (uint64_t i = 0; i < pages; ++i) request.keys.push_back(SampleKey(sequence, i));
  request.range = {{0, 2}, {0, 2}};
  request.deadline = TimePoint::max();
  return request;
}

absl::StatusOr<AcquireResult> Acquire(TieredStore& store, AcquireRequest request) {
  auto response = std::make_shared<std::promise<absl::StatusOr<AcquireResult>>>();
  auto future = response->get_future();
  store.Acquire(std::move(request), [response](absl::StatusOr<AcquireResult> result) {
    response->set_value(std::move(result));
  });
  return future.get();
}

FlushReport FlushPages(TieredStore& store, std::optional<uint64_t> since, const FlushScope& scope) {
  auto response = std::make_shared<std::promise<FlushReport>>();
  auto future = response->get_future();
  store.Flush(scope, since, [response](const FlushReport& report) { response->set_value(report); });
  return future.get();
}

absl::StatusOr<uint64_t> Flush(TieredStore& store) {
  const FlushReport report = FlushPages(store);
  if (absl::Status status = report.ToStatus(); !status.ok()) return status;
  return report.durable_pages;
}

bool AllRight(TieredStore& store, const AcquireRequest& request, const AcquireResult& result) {
  for (const FragmentRef& fragment : result.fragments) {
    if (!IsRight(store.Bytes(fragment), request.keyspace, request.keys[fragment.page],
                 fragment.tiles_bytes)) {
      return false;
    }
  }
  return true;
}

uint64_t DiskBytesOf(const std::string& folder) {
  uint64_t total = 0;
  const auto add = [&](const std::filesystem::path& path) {
    struct stat found;
    if (::lstat(path.c_str(), &found) == 0) total += static_cast<uint64_t>(found.st_blocks) * 512;
  };
  add(folder);
  // Files come and go while this walks.
  std::error_code error;
  std::filesystem::recursive_directory_iterator entry(folder, error);
  while (!error && entry != std::filesystem::recursive_directory_iterator()) {
    add(entry->path());
    entry.increment(error);
  }
  return total;
}

StoreOptions SmallStore(const std::string& folder) {
  StoreOptions options;
  options.host.bytes_max = ByteSize{uint64_t{16} << 20};
  options.host.policy = "lru";
  options.ssd.path = folder;
  options.ssd.bytes_max = ByteSize{uint64_t{64} << 20};
  options.ssd.policy = "lru";
  return options;
}

}  // namespace crumb::storage
