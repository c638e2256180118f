// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/grpc_peer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "common/crc32c.h"
#include "crumb/v1/peer_service.grpc.pb.h"
#include "grpcpp/create_channel.h"
#include "server/base/outgoing_calls.h"
#include "transport/fetch.h"

namespace crumb::server {

namespace {

// A lease that is not released in this time ends by cluster.peer_lease.
constexpr auto kReleaseDeadline = std::chrono::seconds(1);
// Longest pause between two tries to connect to a silent node: as the default of
// cluster.breaker_open, so that a node that is back is used after one pause of the breaker.
constexpr int kReconnectMaxMs = 2000;

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

// Fetches pages as gRPC bytes, with the meaning of transport::Transport::Fetch, for nodes that no
// faster transport connects. All wishes have the same range. `done` runs on a gRPC thread.
void StartGrpcFetch(const std::shared_ptr<v1::PeerService::Stub>& stub,
                    const std::shared_ptr<OutgoingCalls>& calls, const Clock& clock,
                    transport::FetchRequest request, transport::FetchDone done) {
  auto* fetch = new GrpcFetch(stub, calls, std::move(request), std::move(done));
  fetch->Start(clock.Now());
}

}  // namespace

std::shared_ptr<v1::PeerService::Stub> PeerStub(const std::string& address,
                                                const PeerChannel& channel, ConnectWhen when) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMaxMs);
  // A channel of its own for each node, even when a test runs several in one process.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A node's responses are bounded as they arrive, which decompression would undo.
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  if (!channel.name.empty()) arguments.SetSslTargetNameOverride(channel.name);
  const auto made = grpc::CreateCustomChannel(address, channel.credentials, arguments);
  if (when == ConnectWhen::kNow) made->GetState(/*try_to_connect=*/true);
  return v1::PeerService::NewStub(made);
}

GrpcPeer::GrpcPeer(v1::NodeRecord record, const Breaker::Options& options, const Clock& clock,
                   CallerInfo caller, std::shared_ptr<v1::PeerService::Stub> stub,
                   std::shared_ptr<OutgoingCalls> calls, transport::Transport* transport)
    : Peer(std::move(record), options, clock),
      clock_(clock),
      caller_(std::move(caller)),
      stub_(std::move(stub)),
      calls_(std::move(calls)),
      transport_(transport) {}

void GrpcPeer::FillCaller(v1::PeerCaller* caller) const {
  caller->set_node(caller_.node);
  caller->set_incarnation(caller_.incarnation);
  // The highest version that both nodes support.
  caller->set_wire_version(std::min(caller_.wire_max, record().wire_max()));
}

void GrpcPeer::Acquire(v1::PeerAcquireRequest request, TimePoint deadline,
                       Callback<v1::PeerAcquireResponse> done) {
  FillCaller(request.mutable_caller());
  StartCall<v1::PeerAcquireResponse>(
      calls_, std::move(request), ToGrpcDeadline(deadline, clock_.Now()),
      [this](auto... arguments) { stub_->async()->PeerAcquire(arguments...); }, std::move(done));
}

void GrpcPeer::Release(uint64_t lease) {
  v1::PeerReleaseRequest request;
  FillCaller(request.mutable_caller());
  request.add_leases(lease);
  StartCall<v1::PeerReleaseResponse>(
      calls_, std::move(request), ToGrpcDeadline(clock_.Now() + kReleaseDeadline, clock_.Now()),
      [this](auto... arguments) { stub_->async()->PeerRelease(arguments...); },
      [self = shared_from_this()](const absl::StatusOr<v1::PeerReleaseResponse>&) {});
}

void GrpcPeer::Push(v1::PeerPushRequest request, TimePoint deadline,
                    Callback<v1::PeerPushResponse> done) {
  FillCaller(request.mutable_caller());
  StartCall<v1::PeerPushResponse>(
      calls_, std::move(request), ToGrpcDeadline(deadline, clock_.Now()),
      [this](auto... arguments) { stub_->async()->PeerPush(arguments...); }, std::move(done));
}

void GrpcPeer::Keyspaces(v1::PeerKeyspacesRequest request, TimePoint deadline,
                         Callback<v1::PeerKeyspacesResponse> done) {
  FillCaller(request.mutable_caller());
  StartCall<v1::PeerKeyspacesResponse>(
      calls_, std::move(request), ToGrpcDeadline(deadline, clock_.Now()),
      [this](auto... arguments) { stub_->async()->PeerKeyspaces(arguments...); }, std::move(done));
}

void GrpcPeer::Drain(TimePoint deadline, Callback<v1::PeerDrainResponse> done) {
  v1::PeerDrainRequest request;
  FillCaller(request.mutable_caller());
  StartCall<v1::PeerDrainResponse>(
      calls_, std::move(request), ToGrpcDeadline(deadline, clock_.Now()),
      [this](auto... arguments) { stub_->async()->PeerDrain(arguments...); }, std::move(done));
}

void GrpcPeer::Fetch(transport::FetchRequest request, transport::FetchDone done) {
  if (!UsesTransport()) {
    return StartGrpcFetch(stub_, calls_, clock_, std::move(request), std::move(done));
  }
  const size_t pages = request.pages.size();
  const auto shared_done = std::make_shared<transport::FetchDone>(std::move(done));
  const auto again = std::make_shared<transport::FetchRequest>(request);
  const auto fetch = transport_->Fetch(
      record().transport_address(), std::move(request),
      [self = shared_from_this(), again, shared_done](transport::FetchResponse response) {
        if (!absl::IsFailedPrecondition(response.detail))
          return (*shared_done)(std::move(response));
        // No version of frames in common: bytes go by gRPC until one of the two is another release.
        StartGrpcFetch(self->stub_, self->calls_, self->clock_, std::move(*again),
                       std::move(*shared_done));
      });
  if (fetch.ok()) return;
  transport::FetchResponse response;
  response.pages.resize(pages);
  const bool busy = absl::IsResourceExhausted(fetch.status());
  for (transport::PageResponse& page : response.pages) {
    page.status = busy ? transport::PageStatus::kBusy : transport::PageStatus::kUnavailable;
  }
  response.detail = fetch.status();
  (*shared_done)(std::move(response));
}

}  // namespace crumb::server
