// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/grpc_fetch.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/crc32c.h"

namespace crumb::server {
namespace {

using transport::PageStatus;

// Puts the messages of one PeerRead where the request wants the tiles, and checks all of it.
class FetchAssembler {
 public:
  explicit FetchAssembler(const transport::FetchRequest& request) : request_(request) {
    response_.pages.resize(request.pages.size());
  }

  // Adds a message. Returns false if the peer violates the protocol; pages received before stay.
  bool Add(const v1::PeerReadResponse& message) {
    if (message.page() >= request_.pages.size()) return false;
    if (message.status() != static_cast<uint32_t>(PageStatus::kHit)) {
      const bool known = message.status() < transport::kPageStatusCount;
      Miss(message.page(),
           known ? static_cast<PageStatus>(message.status()) : PageStatus::kCorrupt);
      return true;
    }
    if (!message.header().empty() && !Begin(message)) return true;
    if (!open_ || message.page() != page_) return true;  // its page is lost already
    return Fill(message.data());
  }

  // Ends the fetch; pages that did not arrive get `status`.
  transport::FetchResponse Finish(PageStatus status, absl::Status detail) {
    for (size_t i = 0; i < response_.pages.size(); ++i) {
      transport::PageResponse& page = response_.pages[i];
      if (page.status == PageStatus::kHit &&
          CoveredTiles(page) == request_.pages[i].range.tiles()) {
        continue;
      }
      if (page.status == PageStatus::kHit || page.status == PageStatus::kUnavailable) {
        page.status = status;
      }
      page.fragments.clear();
    }
    response_.detail = std::move(detail);
    return std::move(response_);
  }

 private:
  static int CoveredTiles(const transport::PageResponse& page) {
    int tiles = 0;
    for (const auto& fragment : page.fragments) tiles += fragment.delivered.tiles();
    return tiles;
  }

  void Miss(size_t page, PageStatus status) {
    response_.pages[page].status = status;
    if (page == page_) open_ = false;
  }

  bool Begin(const v1::PeerReadResponse& message) {
    page_ = message.page();
    open_ = false;
    transport::PageResponse& page = response_.pages[page_];
    if (page.status != PageStatus::kUnavailable && page.status != PageStatus::kHit) return false;
    const transport::RequestedPage& wish = request_.pages[page_];
    auto header = DecodeFragmentHeader(std::as_bytes(std::span(message.header())));
    const bool right =
        header.ok() && header->key == wish.key && header->keyspace == request_.keyspace &&
        header->generation == request_.generation && header->tile_bytes == wish.tile_bytes;
    if (!right) {
      Miss(page_, PageStatus::kCorrupt);
      return false;
    }
    delivered_ = Intersect(header->range, wish.range);
    for (const auto& other : page.fragments) {
      if (Intersect(other.delivered, delivered_).tiles() == 0) continue;
      Miss(page_, PageStatus::kCorrupt);
      return false;
    }
    header_ = *std::move(header);
    open_ = true;
    tile_ = 0;
    within_ = 0;
    return true;
  }

  // Returns the destination and the sum of tile number `tile` of the delivered range.
  std::pair<std::byte*, uint32_t> PlaceOf(int tile) const {
    const transport::RequestedPage& wish = request_.pages[page_];
    const int layer = delivered_.layers.begin + tile / delivered_.heads.size();
    const int head = delivered_.heads.begin + tile % delivered_.heads.size();
    const size_t head_stride =
        wish.places.head_stride == 0 ? wish.tile_bytes : wish.places.head_stride;
    const size_t layer_stride = wish.places.layer_stride == 0
                                    ? head_stride * static_cast<size_t>(wish.range.heads.size())
                                    : wish.places.layer_stride;
    const size_t index = static_cast<size_t>(layer - header_.range.layers.begin) *
                             static_cast<size_t>(header_.range.heads.size()) +
                         static_cast<size_t>(head - header_.range.heads.begin);
    return {wish.places.first +
                static_cast<size_t>(layer - wish.range.layers.begin) * layer_stride +
                static_cast<size_t>(head - wish.range.heads.begin) * head_stride,
            header_.tile_sums[index]};
  }

  bool Fill(const std::string& data) {
    auto rest = std::as_bytes(std::span(data));
    while (!rest.empty()) {
      if (tile_ >= delivered_.tiles()) return false;
      const auto [place, expected] = PlaceOf(tile_);
      const size_t count = std::min<size_t>(rest.size(), header_.tile_bytes - within_);
      std::memcpy(place + within_, rest.data(), count);
      rest = rest.subspan(count);
      within_ += count;
      if (within_ < header_.tile_bytes) continue;
      if (Crc32c(std::span<const std::byte>(place, header_.tile_bytes)) != expected) {
        Miss(page_, PageStatus::kCorrupt);
        return true;
      }
      within_ = 0;
      ++tile_;
    }
    if (tile_ == delivered_.tiles()) {
      response_.pages[page_].status = PageStatus::kHit;
      response_.pages[page_].fragments.push_back({header_, delivered_});
      open_ = false;
    }
    return true;
  }

  const transport::FetchRequest& request_;
  transport::FetchResponse response_;
  size_t page_ = 0;
  bool open_ = false;  // a fragment of page_ is being filled
  FragmentHeader header_;
  TileRange delivered_;
  int tile_ = 0;
  size_t within_ = 0;  // bytes of tile_ that are there
};

class GrpcFetch : public grpc::ClientReadReactor<v1::PeerReadResponse> {
 public:
  GrpcFetch(std::shared_ptr<v1::PeerService::Stub> stub, std::shared_ptr<OutgoingCalls> calls,
            transport::FetchRequest request, transport::FetchDone done)
      : stub_(std::move(stub)),
        calls_(std::move(calls)),
        request_(std::move(request)),
        done_(std::move(done)),
        assembler_(request_) {}

  // Deletes itself.
  void Start(TimePoint now) {
    FillRequest(now);
    context_.set_deadline(ToGrpcDeadline(request_.deadline, now));
    if (!calls_->Add(&context_)) {
      done_(assembler_.Finish(PageStatus::kUnavailable, absl::OkStatus()));
      delete this;
      return;
    }
    stub_->async()->PeerRead(&context_, &wire_, this);
    StartRead(&message_);
    StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (!assembler_.Add(message_)) {
      broken_ = true;
      context_.TryCancel();
    }
    StartRead(&message_);
  }

  void OnDone(const grpc::Status& status) override {
    const bool late = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
    absl::Status detail = FromGrpc(status);
    if (broken_) detail = absl::InternalError("the peer does not keep to the protocol");
    const PageStatus missing = broken_ ? PageStatus::kCorrupt
                               : late  ? PageStatus::kDeadline
                                       : PageStatus::kUnavailable;
    done_(assembler_.Finish(missing, std::move(detail)));
    const std::shared_ptr<OutgoingCalls> calls = calls_;
    calls->Remove(&context_);
    delete this;
  }

 private:
  void FillRequest(TimePoint now) {
    wire_.set_session(std::string(request_.session.begin(), request_.session.end()));
    wire_.set_keyspace(std::string(request_.keyspace.view()));
    wire_.set_generation(request_.generation);
    const TileRange& range = request_.pages.front().range;
    wire_.mutable_range()->set_layer_begin(range.layers.begin);
    wire_.mutable_range()->set_layer_end(range.layers.end);
    wire_.mutable_range()->set_head_begin(range.heads.begin);
    wire_.mutable_range()->set_head_end(range.heads.end);
    for (const transport::RequestedPage& wish : request_.pages) {
      wire_.mutable_keys()->append(wish.key.view());
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(request_.deadline - now).count();
    wire_.set_wait_ms(static_cast<uint32_t>(std::clamp<int64_t>(left, 0, 60'000)));
  }

  const std::shared_ptr<v1::PeerService::Stub> stub_;
  const std::shared_ptr<OutgoingCalls> calls_;
  const transport::FetchRequest request_;
  const transport::FetchDone done_;
  grpc::ClientContext context_;
  v1::PeerReadRequest wire_;
  v1::PeerReadResponse message_;
  FetchAssembler assembler_;
  bool broken_ = false;
};

}  // namespace

void StartGrpcFetch(const std::shared_ptr<v1::PeerService::Stub>& stub,
                    const std::shared_ptr<OutgoingCalls>& calls, const Clock& clock,
                    transport::FetchRequest request, transport::FetchDone done) {
  auto* fetch = new GrpcFetch(stub, calls, std::move(request), std::move(done));
  fetch->Start(clock.Now());
}

}  // namespace crumb::server
