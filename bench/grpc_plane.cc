// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/grpc_plane.h"

#include <chrono>
#include <thread>

#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

constexpr Duration kCallTimeout = std::chrono::seconds(30);
constexpr int kAttempts = 1000;
constexpr auto kBackOff = std::chrono::milliseconds(1);

// crumbd counts a stream until it has noticed its end, which may be after the client has: at its
// bound it asks to try again. The waits are part of what is timed.
template <typename Call>
auto WithRetries(const Call& call) {
  auto result = call();
  for (int i = 1; i < kAttempts && absl::IsResourceExhausted(result.status()); ++i) {
    std::this_thread::sleep_for(kBackOff);
    result = call();
  }
  return result;
}

}  // namespace

absl::Status GrpcPlane::Put(size_t first, size_t count) {
  put_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const std::span<const std::byte> tiles = fragments_.Tiles(first + i);
    put_[i].header = fragments_.Header(first + i);
    put_[i].tiles.assign(reinterpret_cast<const char*>(tiles.data()), tiles.size());
  }
  CRUMB_ASSIGN_OR_RETURN(const auto outcomes, WithRetries([&] {
                           return client_.Put(fragments_.keyspace(), put_, kCallTimeout);
                         }));
  for (const client::CommitOutcome outcome : outcomes) {
    if (outcome != client::CommitOutcome::kStored &&
        outcome != client::CommitOutcome::kDeduplicated) {
      return absl::ResourceExhaustedError(
          fmt::format("a page was not stored: outcome {}", static_cast<int>(outcome)));
    }
  }
  return absl::OkStatus();
}

absl::Status GrpcPlane::Get(size_t first, size_t count) {
  std::vector<PageKey> keys;
  for (size_t page = first; page < first + count; ++page) keys.push_back(fragments_.Key(page));
  size_t complete = 0;
  CRUMB_ASSIGN_OR_RETURN(
      const client::MissReason reason,
      client_.Get(fragments_.keyspace(), keys, kCallTimeout, [&complete](client::FragmentBytes) {
        ++complete;
        return absl::OkStatus();
      }));
  if (complete == count) return absl::OkStatus();
  return absl::NotFoundError(
      fmt::format("{} of {} pages came: {}", complete, count, client::MissReasonName(reason)));
}

}  // namespace crumb::bench
