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
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "server/listen_check.h"
#include "server/service/cache_service.h"
#include "server/service/callback_wakes.h"
#include "server/service/peer_service.h"
#include "server/tls_credentials.h"

namespace crumb::server {
namespace {

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

  absl::Status Open(const ListenOptions& options, const Limits& limits) {
    CRUMB_RETURN_IF_ERROR(CheckUnixSocketFree(options.unix_socket));
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    if (peer_service_ != nullptr) builder.RegisterService(peer_service_.get());
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a port in use is an error
    builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                               static_cast<int>(limits.streams_per_connection));
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
