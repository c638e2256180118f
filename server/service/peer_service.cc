// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/peer_service.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "server/base/tls_credentials.h"
#include "server/calls/field_bounds.h"
#include "server/service/call_metadata.h"
#include "server/service/grpc_status.h"
#include "server/service/unary_call.h"

namespace crumb::server {
namespace {

// The pages of one PeerRead, message by message. Keeps itself alive from Start to OnDone, and
// store leases until all pages were sent: a peer that does not read for
// limits.stream_progress_timeout loses both.
class ReadStream : public grpc::ServerWriteReactor<v1::PeerReadResponse>,
                   public StallableStream,
                   public std::enable_shared_from_this<ReadStream> {
 public:
  ReadStream(const CallContext& context, Cluster& cluster, std::unique_ptr<CallScope> scope,
             grpc::CallbackServerContext& call)
      : context_(context), cluster_(cluster), scope_(std::move(scope)), call_(call) {}

  void Start(const absl::Status& admitted, StallWatch& stalls, const v1::PeerReadRequest& request,
             TimePoint deadline) {
    self_ = shared_from_this();
    if (!admitted.ok()) return End(admitted);
    stalls.Add(weak_from_this());
    auto wanted = SourceRequestOf(cluster_.calls(), request, deadline);
    if (!wanted.ok()) return End(wanted.status());
    ranges_.reserve(wanted->pages.size());
    for (const auto& page : wanted->pages) ranges_.push_back(page.range);
    cluster_.source().Acquire(*std::move(wanted), [this](transport::SourceResponse response) {
      response_ = std::move(response);
      WriteNext();
    });
  }

  void OnWriteDone(bool ok) override {
    if (!EndWait()) return EndStalled();
    if (!ok) return End(absl::CancelledError());
    WriteNext();
  }

  void Stalled() override {
    context_.metrics.stalled_streams.Add();
    call_.TryCancel();  // the write fails
    EndStalled();
  }

  void OnDone() override { self_.reset(); }  // may delete this

 private:
  void WriteNext() {
    if (!Next()) return End(absl::OkStatus());
    BeginWait(context_.clock.Now(), /*progressed=*/true);
    StartWrite(&message_);
  }

  // The next message; false after the last.
  bool Next() {
    message_.Clear();
    while (page_ < response_.pages.size()) {
      const transport::SourcePage& page = response_.pages[page_];
      message_.set_page(static_cast<uint32_t>(page_));
      if (page.status != transport::PageStatus::kHit) {
        message_.set_status(static_cast<uint32_t>(page.status));
        ++page_;
        return true;
      }
      if (fragment_ == page.fragments.size()) {
        ++page_;
        fragment_ = 0;
        continue;
      }
      FillPiece(page.fragments[fragment_]);
      return true;
    }
    return false;
  }

  // Adds as many whole tiles of the wanted range as fit into a message, after the header of the
  // fragment.
  void FillPiece(const transport::SourceFragment& fragment) {
    if (tile_ == 0) {
      const auto header = fragment.header();
      message_.set_header(header.data(), header.size());
    }
    const TileRange delivered = Intersect(fragment.range, ranges_[page_]);
    const size_t most =
        std::max<size_t>(context_.limits.chunk_bytes.value / fragment.tile_bytes, 1);
    std::string& data = *message_.mutable_data();
    for (size_t count = 0; count < most && tile_ < delivered.tiles(); ++count, ++tile_) {
      const int layer = delivered.layers.begin + tile_ / delivered.heads.size();
      const int head = delivered.heads.begin + tile_ % delivered.heads.size();
      const auto index =
          static_cast<size_t>((layer - fragment.range.layers.begin) * fragment.range.heads.size() +
                              head - fragment.range.heads.begin);
      const auto tile = fragment.tiles().subspan(index * fragment.tile_bytes, fragment.tile_bytes);
      data.append(reinterpret_cast<const char*>(tile.data()), tile.size());
    }
    cluster_.calls().metrics.served_bytes.Add(data.size());
    if (tile_ == delivered.tiles()) {
      tile_ = 0;
      ++fragment_;
    }
  }

  // Ends the stream once TryCancel has returned, which needs the call, and the write has failed.
  void EndStalled() {
    if (stalled_steps_.fetch_add(1) == 0) return;
    End(absl::DeadlineExceededError("nothing was read for limits.stream_progress_timeout"));
  }

  void End(const absl::Status& status) {
    scope_->SetCode(status.code());
    scope_.reset();
    response_ = {};
    Finish(ToGrpc(status));
  }

  const CallContext context_;
  Cluster& cluster_;
  std::unique_ptr<CallScope> scope_;
  grpc::CallbackServerContext& call_;
  std::vector<TileRange> ranges_;  // the range of each page
  transport::SourceResponse response_;
  size_t page_ = 0;
  size_t fragment_ = 0;
  int tile_ = 0;
  v1::PeerReadResponse message_;
  std::atomic<int> stalled_steps_{0};
  std::shared_ptr<ReadStream> self_;  // keeps the stream alive until OnDone
};

}  // namespace

template <typename Request, typename Response>
grpc::ServerUnaryReactor* PeerService::Respond(
    Context* call_context, Rpc rpc, const EncodedMessages& encoded,
    const std::function<void(const Request&, Response*, PeerDone)>& call) {
  const auto unary = std::make_shared<UnaryCallOf<Request, Response>>(
      context_, StreamParts{calls_, stalls_}, rpc, *call_context, encoded);
  unary->Begin();
  const PeerDone done = [call = unary.get()](const absl::Status& status) { call->End(status); };
  absl::Status admitted = CheckPeerName(*call_context, peer_name_);
  if (admitted.ok()) admitted = unary->Admit("");
  if (admitted.ok()) admitted = unary->Decode();
  if (admitted.ok()) admitted = CheckFields(context_.limits, unary->request());
  if (admitted.ok()) {
    call(unary->request(), &unary->response(), done);
  } else {
    done(admitted);
  }
  return unary.get();
}

grpc::ServerUnaryReactor* PeerService::PeerHello(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::PeerHelloRequest, v1::PeerHelloResponse>(
      call, Rpc::kPeerHello, {*in, *out}, [&](const auto&, auto* response, const PeerDone& done) {
        server::PeerHello(cluster_.calls(), response);
        done(absl::OkStatus());
      });
}

grpc::ServerUnaryReactor* PeerService::PeerAcquire(Context* call, const Bytes* in, Bytes* out) {
  const TimePoint deadline = DeadlineOf(*call, context_.clock.Now());
  return Respond<v1::PeerAcquireRequest, v1::PeerAcquireResponse>(
      call, Rpc::kPeerAcquire, {*in, *out},
      [&](const auto& request, auto* response, const PeerDone& done) {
        server::PeerAcquire(cluster_.calls(), request, deadline, response, done);
      });
}

grpc::ServerUnaryReactor* PeerService::PeerRelease(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::PeerReleaseRequest, v1::PeerReleaseResponse>(
      call, Rpc::kPeerRelease, {*in, *out}, [&](const auto& request, auto*, const PeerDone& done) {
        done(server::PeerRelease(cluster_.calls(), request));
      });
}

grpc::ServerUnaryReactor* PeerService::PeerPush(Context* call, const Bytes* in, Bytes* out) {
  const TimePoint deadline = DeadlineOf(*call, context_.clock.Now());
  return Respond<v1::PeerPushRequest, v1::PeerPushResponse>(
      call, Rpc::kPeerPush, {*in, *out},
      [&](const auto& request, auto* response, const PeerDone& done) {
        server::PeerPush(cluster_.calls(), request, deadline, response, done);
      });
}

grpc::ServerUnaryReactor* PeerService::PeerKeyspaces(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::PeerKeyspacesRequest, v1::PeerKeyspacesResponse>(
      call, Rpc::kPeerKeyspaces, {*in, *out},
      [&](const auto& request, auto* response, const PeerDone& done) {
        server::PeerKeyspaces(cluster_.calls(), request, response, done);
      });
}

grpc::ServerUnaryReactor* PeerService::PeerDrain(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::PeerDrainRequest, v1::PeerDrainResponse>(
      call, Rpc::kPeerDrain, {*in, *out},
      [&](const auto&, auto*, const PeerDone& done) { done(cluster_.calls().drain()); });
}

grpc::ServerWriteReactor<v1::PeerReadResponse>* PeerService::PeerRead(
    Context* call, const v1::PeerReadRequest* request) {
  auto scope = std::make_unique<CallScope>(context_, calls_, Rpc::kPeerRead);
  // gRPC would keep the request until the other node has read the last message or the status.
  v1::PeerReadRequest taken;
  taken.Swap(const_cast<v1::PeerReadRequest*>(request));
  absl::Status admitted = CheckPeerName(*call, peer_name_);
  if (admitted.ok()) admitted = scope->Admit("");
  if (admitted.ok()) admitted = CheckFields(context_.limits, taken);
  const auto stream = std::make_shared<ReadStream>(context_, cluster_, std::move(scope), *call);
  stream->Start(admitted, stalls_, taken, DeadlineOf(*call, context_.clock.Now()));
  return stream.get();
}

}  // namespace crumb::server
