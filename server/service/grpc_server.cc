// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/grpc_server.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "common/errno_status.h"
#include "common/status_macros.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "server/listen_check.h"
#include "server/service/cache_service.h"
#include "server/service/callback_wakes.h"
#include "server/service/peer_service.h"
#include "server/tls_credentials.h"

namespace crumb::server {
namespace {

// gRPC's default, said aloud: a Commit, an Acquire and a chunk of a Put at their limits fit.
constexpr int kMessageBytesMax = 4 << 20;
// Of one call's headers; a token and a session's id take less than 300 bytes.
constexpr int kMetadataBytesMax = 8 << 10;

// As gRPC writes it.
std::string Target(const HostPort& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  const std::string host = v6 ? "[" + address.host + "]" : address.host;
  return host + ":" + std::to_string(address.port);
}

class BuiltServer : public GrpcServer {
 public:
  BuiltServer(const ListenOptions& options, const CallContext& context, const NodeInfo& node)
      : service_(context, node) {
    if (context.cluster != nullptr) {
      peer_service_ =
          std::make_unique<PeerService>(context, *context.cluster, options.tls.peer_name);
    }
  }
  ~BuiltServer() override { Stop(Duration::zero()); }

  // What callers can make gRPC itself hold or do, with or without a token: memory of messages that
  // have not arrived whole, handshakes that do not end, connections that nobody uses.
  static void SetBounds(const Limits& limits, grpc::ServerBuilder& builder) {
    const auto milliseconds = [](Duration duration) {
      return static_cast<int>(
          std::chrono::duration_cast<std::chrono::milliseconds>(duration).count());
    };
    grpc::ResourceQuota quota("crumbd");
    quota.Resize(limits.receive_bytes_max.value);
    builder.SetResourceQuota(quota);
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMetadataBytesMax);
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                               static_cast<int>(limits.streams_per_connection));
    builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                               milliseconds(limits.handshake_timeout));
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, milliseconds(limits.keepalive_interval));
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                               milliseconds(limits.keepalive_timeout));
    builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no bound on ours
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                               milliseconds(limits.idle_connection));
  }

  absl::Status Open(const ListenOptions& options, const Limits& limits) {
    CRUMB_RETURN_IF_ERROR(CheckUnixSocketFree(options.unix_socket));
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    if (peer_service_ != nullptr) builder.RegisterService(peer_service_.get());
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a port in use is an error
    SetBounds(limits, builder);
    builder.AddListeningPort("unix:" + options.unix_socket, grpc::InsecureServerCredentials());
    int port = 0;
    HostPort tcp;
    if (!options.tcp.empty()) {
      CRUMB_ASSIGN_OR_RETURN(tcp, ParseHostPort("listen.tcp", options.tcp));
      CRUMB_RETURN_IF_ERROR(CheckTcpFree("listen.tcp", tcp));
      builder.AddListeningPort(Target(tcp), TcpServerCredentials(options.tls), &port);
    }
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || (!options.tcp.empty() && port == 0)) {
      return absl::UnavailableError("gRPC cannot listen at " + options.unix_socket +
                                    (options.tcp.empty() ? "" : " and " + options.tcp));
    }
    socket_path_ = options.unix_socket;
    if (::chmod(socket_path_.c_str(), 0660) != 0) {
      return ErrnoStatus(errno, "setting the mode of " + socket_path_);
    }
    if (port != 0) {
      tcp.port = port;
      tcp_address_ = Target(tcp);
    }
    SetServing(false);
    wakes_ = std::make_unique<CallbackWakes>(*server_);
    return absl::OkStatus();
  }

  std::string tcp_address() const override { return tcp_address_; }

  void SetServing(bool serving) override {
    grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
    if (health == nullptr) return;
    health->SetServingStatus(serving);
    health->SetServingStatus(v1::CacheService::service_full_name(), serving);
  }

  void Stop(Duration grace) override {
    if (server_ == nullptr) return;
    wakes_.reset();
    service_.StopStreams();
    server_->Shutdown(std::chrono::system_clock::now() +
                      std::chrono::duration_cast<std::chrono::system_clock::duration>(grace));
    server_->Wait();
    server_.reset();
    ::unlink(socket_path_.c_str());
  }

 private:
  CacheService service_;
  std::unique_ptr<PeerService> peer_service_;  // null: this node is alone
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<CallbackWakes> wakes_;
  std::string socket_path_;
  std::string tcp_address_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const ListenOptions& options,
                                                              const CallContext& context,
                                                              const NodeInfo& node) {
  auto server = std::make_unique<BuiltServer>(options, context, node);
  CRUMB_RETURN_IF_ERROR(server->Open(options, context.limits));
  return server;
}

}  // namespace crumb::server
