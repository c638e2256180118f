// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/grpc_peer.h"

#include <algorithm>
#include <utility>

#include "grpcpp/create_channel.h"
#include "server/cluster/grpc_fetch.h"

namespace crumb::server {
namespace {

constexpr auto kReleaseDeadline = std::chrono::seconds(1);
constexpr int kReconnectMaxMs = 2000;
// gRPC takes this for the time that a connection may take to come up, too.
constexpr int kConnectTimeoutMs = 3000;

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
  // The highest version that both speak.
  caller->set_wire_version(std::min(caller_.wire_max, record().wire_max()));
}

void GrpcPeer::Acquire(v1::PeerAcquireRequest request, TimePoint deadline,
                       Answer<v1::PeerAcquireResponse> answer) {
  FillCaller(request.mutable_caller());
  StartCall<v1::PeerAcquireResponse>(
      calls_, std::move(request), ToGrpcDeadline(deadline, clock_.Now()),
      [this](auto... arguments) { stub_->async()->PeerAcquire(arguments...); }, std::move(answer));
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
                    Answer<v1::PeerPushResponse> answer) {
  FillCaller(request.mutable_caller());
  StartCall<v1::PeerPushResponse>(
      calls_, std::move(request), ToGrpcDeadline(deadline, clock_.Now()),
      [this](auto... arguments) { stub_->async()->PeerPush(arguments...); }, std::move(answer));
}

void GrpcPeer::Keyspaces(v1::PeerKeyspacesRequest request, TimePoint deadline,
                         Answer<v1::PeerKeyspacesResponse> answer) {
  FillCaller(request.mutable_caller());
  StartCall<v1::PeerKeyspacesResponse>(
      calls_, std::move(request), ToGrpcDeadline(deadline, clock_.Now()),
      [this](auto... arguments) { stub_->async()->PeerKeyspaces(arguments...); },
      std::move(answer));
}

void GrpcPeer::Drain(TimePoint deadline, Answer<v1::PeerDrainResponse> answer) {
  v1::PeerDrainRequest request;
  FillCaller(request.mutable_caller());
  StartCall<v1::PeerDrainResponse>(
      calls_, std::move(request), ToGrpcDeadline(deadline, clock_.Now()),
      [this](auto... arguments) { stub_->async()->PeerDrain(arguments...); }, std::move(answer));
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
      [self = shared_from_this(), again, shared_done](transport::FetchAnswer answer) {
        if (!absl::IsFailedPrecondition(answer.detail)) return (*shared_done)(std::move(answer));
        // No version of frames in common: bytes go by gRPC until one of the two is another release.
        StartGrpcFetch(self->stub_, self->calls_, self->clock_, std::move(*again),
                       std::move(*shared_done));
      });
  if (fetch.ok()) return;
  transport::FetchAnswer answer;
  answer.pages.resize(pages);
  const bool busy = absl::IsResourceExhausted(fetch.status());
  for (transport::PageAnswer& page : answer.pages) {
    page.status = busy ? transport::PageStatus::kBusy : transport::PageStatus::kUnavailable;
  }
  answer.detail = fetch.status();
  (*shared_done)(std::move(answer));
}

}  // namespace crumb::server
