// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/self_test.h"

#include <cstring>
#include <future>
#include <utility>
#include <vector>

#include "common/crc32c.h"
#include "common/status_macros.h"
#include "transport/ucx_transport.h"

namespace crumb::transport {
namespace {

constexpr uint32_t kTileBytes = 4608;
constexpr TileRange kRange = {{0, 32}, {0, 8}};
constexpr size_t kPages = 4;
constexpr int kRounds = 4;
constexpr Duration kPatience = std::chrono::seconds(10);

// One fragment, whoever asks.
class OneFragment final : public FragmentSource {
 public:
  OneFragment() : bytes_(FragmentBytes(kRange.tiles(), kTileBytes)) {
    FragmentHeader header;
    header.tile_bytes = kTileBytes;
    header.range = kRange;
    const auto tiles = std::span(bytes_).first(FragmentTilesBytes(kRange.tiles(), kTileBytes));
    for (size_t i = 0; i < tiles.size(); ++i)
      tiles[i] = static_cast<std::byte>(i * 2654435761u >> 24);
    for (size_t at = 0; at < tiles.size(); at += kTileBytes) {
      header.tile_sums.push_back(Crc32c(tiles.subspan(at, kTileBytes)));
    }
    EncodeFragmentHeader(header, std::span(bytes_).subspan(tiles.size()));
  }
  void Acquire(SourceRequest request, Reply reply) override {
    const SourceFragment fragment = {bytes_, kRange, kTileBytes};
    SourceAnswer answer;
    answer.pages.resize(request.pages.size(), {PageStatus::kHit, {fragment}});
    reply(std::move(answer));
  }

 private:
  std::vector<std::byte> bytes_;
};

absl::Status FetchOnce(Transport& from, const std::string& address,
                       const std::shared_ptr<std::vector<std::byte>>& room) {
  FetchRequest request;
  const size_t page_bytes = room->size() / kPages;
  for (size_t page = 0; page < kPages; ++page) {
    request.pages.push_back({{}, kRange, kTileBytes, {room->data() + page * page_bytes, 0, 0}});
  }
  request.memory = room;
  request.deadline = Clock::Real().Now() + kPatience;
  const auto ended = std::make_shared<std::promise<FetchAnswer>>();
  CRUMB_RETURN_IF_ERROR(
      from.Fetch(address, std::move(request),
                 [ended](FetchAnswer answer) { ended->set_value(std::move(answer)); })
          .status());
  const FetchAnswer answer = ended->get_future().get();
  for (const PageAnswer& page : answer.pages) {
    if (page.status == PageStatus::kHit) continue;
    return absl::UnavailableError(std::string("self-test of the transport: page ") +
                                  PageStatusName(page.status) + ", " +
                                  std::string(answer.detail.message()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SelfTest> RunSelfTest(const TransportOptions& options) {
  TransportOptions own = options;
  own.listen = options.listen.substr(0, options.listen.rfind(':')) + ":0";
  OneFragment source;
  CRUMB_ASSIGN_OR_RETURN(const auto server, OpenUcxTransport(own, &source));
  CRUMB_ASSIGN_OR_RETURN(const auto client, OpenUcxTransport(own, nullptr));
  const auto room = std::make_shared<std::vector<std::byte>>(
      kPages * FragmentTilesBytes(kRange.tiles(), kTileBytes));
  CRUMB_RETURN_IF_ERROR(FetchOnce(*client, server->address(), room));  // connects
  const TimePoint begin = Clock::Real().Now();
  for (int round = 0; round < kRounds; ++round) {
    CRUMB_RETURN_IF_ERROR(FetchOnce(*client, server->address(), room));
  }
  const std::chrono::duration<double> took = Clock::Real().Now() - begin;
  return SelfTest{client->Describe(),
                  static_cast<double>(kRounds * room->size()) / took.count() * 1e-9};
}

}  // namespace crumb::transport
