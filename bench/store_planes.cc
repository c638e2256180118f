// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/store_planes.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "bench/measure.h"
#include "bench/resp_client.h"
#include "common/crc32c.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

// Time in which crumbd must accept a connection.
constexpr Duration kConnectWait = std::chrono::seconds(5);

}  // namespace

absl::StatusOr<std::unique_ptr<client::Client>> ConnectTo(const std::string& socket_dir,
                                                          uint64_t staging_bytes) {
  client::ClientOptions options;
  options.socket_dir = socket_dir;
  options.process_name = "crumb-bench";
  options.staging_bytes = staging_bytes;
  CRUMB_ASSIGN_OR_RETURN(auto client, client::Client::Open(options));
  if (client->WaitConnected(kConnectWait)) return client;
  return absl::UnavailableError("no crumbd answers in " + socket_dir);
}

absl::Status BindKeyspace(client::Client& client, FragmentSet& fragments) {
  CRUMB_ASSIGN_OR_RETURN(const client::KeyspaceInfo info,
                         client.OpenKeyspace(fragments.Spec(), kConnectWait));
  fragments.BindKeyspace(info.id, info.generation);
  return absl::OkStatus();
}

namespace {

// Timeout of a call over shared memory.
constexpr Duration kCallTimeout = std::chrono::seconds(10);
constexpr Duration kHostTimeout = std::chrono::seconds(1);
// Bytes in one Commit of a Put of several pages.
constexpr size_t kCommitBytes = size_t{1} << 20;

// kResourceExhausted: the store refused some of the pages.
absl::Status CheckStored(std::span<const client::CommitOutcome> outcomes) {
  for (const client::CommitOutcome outcome : outcomes) {
    if (outcome != client::CommitOutcome::kStored &&
        outcome != client::CommitOutcome::kDeduplicated) {
      return absl::ResourceExhaustedError(
          fmt::format("a page was not stored: outcome {}", static_cast<int>(outcome)));
    }
  }
  return absl::OkStatus();
}

// Ends a Commit.
absl::Status FinishPut(client::PendingCommit& pending) {
  CRUMB_ASSIGN_OR_RETURN(const auto outcomes, pending.Finish());
  return CheckStored(outcomes);
}

}  // namespace

ShmPlane::ShmPlane(client::Client& client, const FragmentSet& fragments)
    : client_(client), fragments_(fragments), copy_(fragments.tiles_bytes()) {}

std::vector<PageKey> ShmPlane::Keys(size_t first, size_t count) const {
  std::vector<PageKey> keys;
  for (size_t page = first; page < first + count; ++page) keys.push_back(fragments_.Key(page));
  return keys;
}

absl::Status ShmPlane::Put(size_t first, size_t count) {
  CRUMB_ASSIGN_OR_RETURN(auto slots, client_.Reserve(static_cast<int>(count),
                                                     fragments_.fragment_bytes(), kCallTimeout));
  if (slots.size() != count) return absl::ResourceExhaustedError("staging memory is full");
  // Like client/worker/publisher: crumbd copies a part while the next one is written.
  const size_t part = std::max<size_t>(1, kCommitBytes / fragments_.fragment_bytes());
  std::unique_ptr<client::PendingCommit> pending;
  for (size_t next = 0; next < count; next += part) {
    std::vector<client::StagingSlot> written;
    for (size_t i = next; i < std::min(next + part, count); ++i) {
      const std::span<const std::byte> tiles = fragments_.Tiles(first + i);
      std::memcpy(slots[i].bytes().data(), tiles.data(), tiles.size());
      EncodeFragmentHeader(fragments_.Header(first + i), slots[i].bytes().subspan(tiles.size()));
      written.push_back(std::move(slots[i]));
    }
    if (pending != nullptr) CRUMB_RETURN_IF_ERROR(FinishPut(*pending));
    pending = client_.StartCommit(fragments_.keyspace(), std::move(written),
                                  fragments_.tiles_bytes(), kCallTimeout);
  }
  return FinishPut(*pending);
}

absl::StatusOr<std::shared_ptr<const client::Lease>> ShmPlane::LeasePages(
    size_t first, std::span<const PageKey> keys, Duration wait) {
  client::AcquireRequest request;
  request.keyspace = fragments_.keyspace();
  request.generation = fragments_.generation();
  request.keys = keys;
  request.wait_for_lower_tiers = wait > Duration::zero();
  request.timeout = wait > Duration::zero() ? wait : kHostTimeout;
  CRUMB_ASSIGN_OR_RETURN(const client::AcquireResult result, client_.Acquire(request));
  if (static_cast<size_t>(result.hit_pages) == keys.size()) return result.lease;
  return absl::NotFoundError(fmt::format("{} of {} pages from number {} are hits: {}",
                                         result.hit_pages, keys.size(), first,
                                         client::MissReasonName(result.miss_reason)));
}

absl::StatusOr<Duration> ShmPlane::Acquire(size_t first, std::span<const PageKey> keys,
                                           Duration wait) {
  const TimePoint begin = Clock::Real().Now();
  CRUMB_ASSIGN_OR_RETURN(const auto lease, LeasePages(first, keys, wait));
  KeepResult(static_cast<uint64_t>(lease->fragments().back().tiles.front()));
  return Clock::Real().Now() - begin;
}

absl::Status ShmPlane::Get(size_t first, size_t count) {
  CRUMB_ASSIGN_OR_RETURN(const auto lease, LeasePages(first, Keys(first, count), Duration::zero()));
  uint64_t sum = 0;
  for (const client::LeasedFragment& fragment : lease->fragments())
    sum += TouchBytes(fragment.tiles);
  KeepResult(sum);
  return absl::OkStatus();
}

absl::Status ShmPlane::GetCopy(size_t first, size_t count) {
  CRUMB_ASSIGN_OR_RETURN(const auto lease, LeasePages(first, Keys(first, count), Duration::zero()));
  for (const client::LeasedFragment& fragment : lease->fragments()) {
    const size_t tile_bytes = fragment.header.tile_bytes;
    for (size_t i = 0; i < fragment.tile_sums.size(); ++i) {
      const std::span<const std::byte> tile = fragment.tiles.subspan(i * tile_bytes, tile_bytes);
      if (CopyCrc32c(copy_.data() + i * tile_bytes, tile) != fragment.tile_sums[i]) {
        return absl::DataLossError("a copied tile's checksum differs");
      }
    }
  }
  return absl::OkStatus();
}

namespace {

// Timeout of a gRPC stream.
constexpr Duration kStreamTimeout = std::chrono::seconds(30);
constexpr int kAttempts = 1000;
constexpr auto kBackOff = std::chrono::milliseconds(1);

// crumbd may notice the end of a stream later than the client. At its bound on streams it then
// refuses the next one, which is repeated. The waits are part of the measured time.
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
                           return client_.Put(fragments_.keyspace(), put_, kStreamTimeout);
                         }));
  return CheckStored(outcomes);
}

absl::Status GrpcPlane::Get(size_t first, size_t count) {
  std::vector<PageKey> keys;
  keys.reserve(count);
  for (size_t page = first; page < first + count; ++page) keys.push_back(fragments_.Key(page));
  size_t complete = 0;
  CRUMB_ASSIGN_OR_RETURN(const client::MissReason reason,
                         client_.Get(fragments_.keyspace(), keys, kStreamTimeout,
                                     [&complete](const client::FragmentBytes&) {
                                       ++complete;
                                       return absl::OkStatus();
                                     }));
  if (complete == count) return absl::OkStatus();
  return absl::NotFoundError(
      fmt::format("{} of {} pages came: {}", complete, count, client::MissReasonName(reason)));
}

namespace {

class RedisPlane : public StorePlane {
 public:
  RedisPlane(std::unique_ptr<RespClient> client, const FragmentSet& fragments)
      : client_(std::move(client)), fragments_(fragments), value_(fragments.tiles_bytes()) {}

  absl::Status Put(size_t first, size_t count) override {
    for (size_t page = first; page < first + count; ++page) {
      CRUMB_RETURN_IF_ERROR(client_->Set(Name(page), fragments_.Tiles(page)));
    }
    return absl::OkStatus();
  }

  absl::Status Get(size_t first, size_t count) override {
    for (size_t page = first; page < first + count; ++page) {
      CRUMB_ASSIGN_OR_RETURN(const size_t size, client_->Get(Name(page), value_));
      if (size != value_.size()) return absl::DataLossError("the value has another size");
    }
    return absl::OkStatus();
  }

 private:
  // The memory of Redis is not bounded here, so that writes reuse a fixed number of keys.
  static constexpr size_t kKeys = 512;

  static std::string Name(size_t page) { return fmt::format("crumb-bench/{}", page % kKeys); }

  std::unique_ptr<RespClient> client_;
  const FragmentSet& fragments_;
  std::vector<std::byte> value_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StorePlane>> OpenRedisPlane(const std::string& host, int port,
                                                           const FragmentSet& fragments) {
  CRUMB_ASSIGN_OR_RETURN(auto client, RespClient::Connect(host, port));
  CRUMB_RETURN_IF_ERROR(client->Ping());
  return std::make_unique<RedisPlane>(std::move(client), fragments);
}

}  // namespace crumb::bench
