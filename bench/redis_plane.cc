// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/redis_plane.h"

#include <utility>
#include <vector>

#include "bench/resp_client.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::bench {
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
  // Redis's memory has no bound here: writing goes round a fixed number of keys.
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
