// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/grpc_peer.h"

#include <algorithm>
#include <utility>

#include "grpcpp/create_channel.h"
#include "server/cluster/grpc_fetch.h"

namespace crumb::server {
namespace {

// A lease that is not released in this time ends by cluster.peer_lease.
constexpr auto kReleaseDeadline = std::chrono::seconds(1);
// Longest pause between two tries to connect to a silent node: as the default of
// cluster.breaker_open, so that a node that is back is used after one pause of the breaker.
constexpr int kReconnectMaxMs = 2000;

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
