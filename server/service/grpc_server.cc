// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/grpc_server.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string_view>
#include <utility>

#include "common/clock.h"
#include "common/limited_log.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "common/thread.h"
#include "grpc/grpc.h"
#include "grpc/support/log.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "server/base/listen_check.h"
#include "server/base/tls_credentials.h"
#include "server/calls/field_bounds.h"
#include "server/service/cache_service.h"
#include "server/service/callback_wakes.h"
#include "server/service/connection_listener.h"
#include "server/service/peer_service.h"

namespace crumb::server {
namespace {

// Bytes of one call's headers; a token and a session's id take less than 300 bytes.
constexpr int kMetadataBytesMax = 8 << 10;

// Threads of gRPC's reflection service, whose calls each hold one, with or without a token, and a
// message of up to 4 MiB. One of them waits for calls; those beyond the bound are refused.
constexpr int kReflectionThreadsMax = 4;

// Formats an address the way gRPC does.
std::string Target(const HostPort& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  const std::string host = v6 ? "[" + address.host + "]" : address.host;
  return host + ":" + std::to_string(address.port);
}

// Time after which a stopping crumbd cancels a call whose caller reads nothing.
constexpr Duration kStopReadTimeout = std::chrono::seconds(1);
// Between two looks whether connections are to be ended.
constexpr Duration kDisconnectInterval = std::chrono::milliseconds(100);

// Ends connections while gRPC's server shuts down, which waits for as long as a peer leaves data
// unread. They get `idle_grace` if there are no calls but those that StallWatch has cancelled, and
// otherwise `grace`, the time after which gRPC cancels calls. Its thread, crumb-stop, ends with it.
class Disconnector {
 public:
  Disconnector(ConnectionListener& listener, StallWatch& stalls, const RequestMetrics& requests,
               Duration idle_grace, Duration grace)
      : listener_(listener),
        stalls_(stalls),
        requests_(requests),
        idle_due_(Clock::Real().Now() + idle_grace),
        due_(Clock::Real().Now() + grace),
        thread_("crumb-stop", [this] { Run(); }) {}
  ~Disconnector() {
    {
      MutexLock lock(&mutex_);
      ended_ = true;
    }
    changed_.NotifyAll();
    thread_.Join();
  }

 private:
  void Run() {
    MutexLock lock(&mutex_);
    for (TimePoint next = idle_due_; !ended_; next = Clock::Real().Now() + kDisconnectInterval) {
      while (!ended_ && changed_.WaitUntil(&mutex_, next)) {
      }
      if (ended_) return;
      // Calls of gRPC's own services are not counted: they do nothing that callers could miss.
      const bool idle = requests_.in_flight() <= stalls_.lingering();
      if (idle || Clock::Real().Now() >= due_) listener_.Disconnect();
    }
  }

  ConnectionListener& listener_;
  StallWatch& stalls_;
  const RequestMetrics& requests_;
  const TimePoint idle_due_;
  const TimePoint due_;
  Mutex mutex_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

// Keeps gRPC's library running until the process ends. Its shutdown, which otherwise comes with the
// last object of gRPC, waits for up to 10 s for a thread that polls connections whose peers have
// left data unread.
void KeepLibrary() {
  static const bool kept = [] {
    ::grpc_init();
    return true;
  }();
  static_cast<void>(kept);
}

class BuiltServer : public GrpcServer {
 public:
  BuiltServer(const ListenOptions& options, const CallContext& context, const NodeInfo& node)
      : stalls_(context.limits.stream_progress_timeout, context.clock),
        service_(context, stalls_, node),
        metrics_(context.metrics),
        listener_(context.limits, context.metrics) {
    if (context.cluster != nullptr) {
      peer_service_ =
          std::make_unique<PeerService>(context, *context.cluster, stalls_, options.tls.peer_name);
    }
  }
  ~BuiltServer() override { Stop(Duration::zero()); }

  // Bounds the resources that callers, with or without a token, can make gRPC itself use: memory of
  // incomplete messages, handshakes that do not end, connections without calls.
  static void SetBounds(const Limits& limits, grpc::ServerBuilder& builder) {
    const auto milliseconds = [](Duration duration) {
      return static_cast<int>(
          std::chrono::duration_cast<std::chrono::milliseconds>(duration).count());
    };
    grpc::ResourceQuota quota("crumbd");
    quota.Resize(limits.receive_bytes_max.value);
    quota.SetMaxThreads(kReflectionThreadsMax);
    builder.SetResourceQuota(quota);
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    // gRPC compares a message's size with the maximum when it has decompressed it. None of our
    // callers compresses.
    builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
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
    SetBounds(limits, builder);
    CRUMB_RETURN_IF_ERROR(listener_.ListenUnix(options.unix_socket));
    auto local = AddAcceptor(builder, grpc::InsecureServerCredentials());
    std::unique_ptr<ConnectionListener::Acceptor> remote;
    HostPort tcp;
    if (!options.tcp.empty()) {
      CRUMB_ASSIGN_OR_RETURN(tcp, ParseHostPort("listen.tcp", options.tcp));
      CRUMB_RETURN_IF_ERROR(CheckTcpFree("listen.tcp", tcp));
      CRUMB_RETURN_IF_ERROR(listener_.ListenTcp(tcp));
      remote = AddAcceptor(builder, TcpServerCredentials(options.tls));
    }
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return absl::UnavailableError("gRPC's server does not start");
    if (!options.tcp.empty()) tcp_address_ = Target(tcp);
    SetServing(false);
    wakes_ = std::make_unique<CallbackWakes>(*server_);
    return listener_.Start(std::move(local), std::move(remote));
  }

  // Adds an acceptor, which hands connections to gRPC; gRPC secures them with `credentials`.
  static std::unique_ptr<ConnectionListener::Acceptor> AddAcceptor(
      grpc::ServerBuilder& builder, const std::shared_ptr<grpc::ServerCredentials>& credentials) {
    using Builder = grpc::ServerBuilder::experimental_type;
    return builder.experimental().AddExternalConnectionAcceptor(
        Builder::ExternalConnectionType::FROM_FD, credentials);
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
    listener_.Stop();
    wakes_.reset();
    const Duration read_timeout = std::min(grace, kStopReadTimeout);
    service_.StopStreams();
    stalls_.HastenReaders(read_timeout);
    const Disconnector disconnector(listener_, stalls_, metrics_.requests, read_timeout, grace);
    server_->Shutdown(std::chrono::system_clock::now() +
                      std::chrono::duration_cast<std::chrono::system_clock::duration>(grace));
    server_->Wait();
    server_.reset();
  }

 private:
  StallWatch stalls_;  // watches the streams of both services
  CacheService service_;
  std::unique_ptr<PeerService> peer_service_;  // null: this node is alone
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<CallbackWakes> wakes_;
  const ServerMetrics& metrics_;
  ConnectionListener listener_;
  std::string tcp_address_;
};

// The text of gRPC 1.51 for a failed TLS handshake, at either end.
constexpr std::string_view kHandshakeFailed = "Handshake failed with fatal error";
std::atomic<uint64_t> handshake_failures{0};

// Takes a line that gRPC logs. Callers can cause such lines.
void LogGrpcLine(gpr_log_func_args* line) {
  const std::string_view text = line->message;
  if (text.find(kHandshakeFailed) != std::string_view::npos) handshake_failures.fetch_add(1);
  LogWarningLimited("grpc: {}", text);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const ListenOptions& options,
                                                              const CallContext& context,
                                                              const NodeInfo& node) {
  KeepLibrary();
  auto server = std::make_unique<BuiltServer>(options, context, node);
  CRUMB_RETURN_IF_ERROR(server->Open(options, context.limits));
  return server;
}

void TakeGrpcLog() { gpr_set_log_function(LogGrpcLine); }

uint64_t TlsHandshakeFailures() { return handshake_failures.load(); }

}  // namespace crumb::server
