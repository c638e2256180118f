// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/transport/fetch_calls.h"

namespace crumb::transport {
namespace {

constexpr std::byte kUntouched{0xA5};
constexpr auto kPatience = std::chrono::seconds(30);

}  // namespace

void Destination::Want(int page, const TileRange& range, uint32_t tile_bytes, size_t gap) {
  memory_->push_back({page, range, tile_bytes, gap,
                      std::vector<std::byte>((tile_bytes + gap) * range.tiles(), kUntouched)});
}

FetchRequest Destination::Request() const {
  FetchRequest request;
  request.session = kSampleSession;
  request.keyspace = SampleKeyspace();
  request.generation = kSampleGeneration;
  request.memory = memory_;
  for (Want_& want : *memory_) {
    RequestedPage wish;
    wish.key = SampleKey(want.page);
    wish.range = want.range;
    wish.tile_bytes = want.tile_bytes;
    wish.places.first = want.bytes.data();
    wish.places.head_stride = want.gap == 0 ? 0 : want.tile_bytes + want.gap;
    request.pages.push_back(wish);
  }
  return request;
}

int Destination::FirstWrong(const std::vector<PageResponse>& responses) const {
  for (size_t i = 0; i < memory_->size(); ++i) {
    const Want_& want = (*memory_)[i];
    const bool hit = i < responses.size() && responses[i].status == PageStatus::kHit;
    size_t at = 0;
    for (int layer = want.range.layers.begin; layer < want.range.layers.end; ++layer) {
      for (int head = want.range.heads.begin; head < want.range.heads.end; ++head) {
        for (size_t byte = 0; byte < want.tile_bytes; ++byte, ++at) {
          // Places of a page that is not a hit may have been written.
          if (hit && want.bytes[at] != SampleByte(want.page, layer, head, byte)) {
            return static_cast<int>(i);
          }
        }
        for (size_t byte = 0; byte < want.gap; ++byte, ++at) {
          if (want.bytes[at] != kUntouched) return static_cast<int>(i);
        }
      }
    }
  }
  return -1;
}

PendingFetch::PendingFetch(Transport& transport, const std::string& address, FetchRequest request) {
  const auto started =
      transport.Fetch(address, std::move(request), [state = state_](FetchResponse response) {
        const std::lock_guard lock(state->mutex);
        state->response = std::move(response);
        state->changed.notify_all();
      });
  status_ = started.status();
  if (started.ok()) id_ = *started;
}

bool PendingFetch::done() const {
  const std::lock_guard lock(state_->mutex);
  return state_->response.has_value();
}

FetchResponse PendingFetch::Wait() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, kPatience, [&] { return state_->response.has_value(); });
  return state_->response.value_or(FetchResponse{});
}

std::vector<PageStatus> StatusesOf(const FetchResponse& response) {
  std::vector<PageStatus> statuses;
  for (const PageResponse& page : response.pages) statuses.push_back(page.status);
  return statuses;
}

}  // namespace crumb::transport
