// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/rpc_stub.h"

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <optional>
#include <utility>

#include "common/mutex.h"
#include "crumb/v1/cache_service.grpc.pb.h"

namespace crumb::client {
namespace {

using Service = v1::CacheService;

// the response to an Acquire of 16,384 pages is below 1 MiB
constexpr int kMessageBytesMax = 64 << 20;
constexpr char kSessionMetadata[] = "crumb-session";
constexpr unsigned kTlsReloadSeconds = 10;

// The process in which gRPC's global state was created.
std::atomic<pid_t> grpc_process{0};

// Converts a deadline of steady_clock to gRPC's system_clock by the time that is left.
std::chrono::system_clock::time_point ToSystem(TimePoint deadline) {
  if (deadline == TimePoint::max()) return std::chrono::system_clock::time_point::max();
  return std::chrono::system_clock::now() +
         std::chrono::duration_cast<std::chrono::system_clock::duration>(deadline -
                                                                         Clock::Real().Now());
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  // An unknown session belongs to an earlier crumbd, and reconnecting helps.
  const auto code = status.error_code() == grpc::StatusCode::UNAUTHENTICATED
                        ? absl::StatusCode::kUnavailable
                        : static_cast<absl::StatusCode>(status.error_code());
  return absl::Status(code, status.error_message());
}

void AddToken(const std::string& authorization, grpc::ClientContext& context) {
  if (!authorization.empty()) context.AddMetadata("authorization", authorization);
}

bool IsUnix(const std::string& target) { return target.starts_with("unix:"); }

// Changed files are used for the next connection.
std::shared_ptr<grpc::ChannelCredentials> CredentialsFor(const std::string& target,
                                                         const ClientOptions& options) {
  namespace tls = grpc::experimental;
  if (IsUnix(target) || options.tls_ca_file.empty()) return grpc::InsecureChannelCredentials();
  tls::TlsChannelCredentialsOptions credentials;
  credentials.set_certificate_provider(std::make_shared<tls::FileWatcherCertificateProvider>(
      options.tls_key_file, options.tls_cert_file, options.tls_ca_file, kTlsReloadSeconds));
  credentials.watch_root_certs();
  if (!options.tls_cert_file.empty()) credentials.watch_identity_key_cert_pairs();
  return tls::TlsCredentials(credentials);
}

// Returns a hint to add to gRPC's error when there is no connection: gRPC does not know why the
// other end closed it.
std::string HintFor(const std::string& target, const ClientOptions& options) {
  if (IsUnix(target) || options.tls_ca_file.empty()) return "";
  return " (over TLS, crumbd checked with " + options.tls_ca_file +
         (options.tls_cert_file.empty()
              ? ", without a certificate of this process, which crumbd may require)"
              : ", our certificate is " + options.tls_cert_file + ")");
}

class GrpcSessionStream final : public SessionStream {
 public:
  GrpcSessionStream(Service::Stub& stub, std::string_view session,
                    const std::string& authorization) {
    AddToken(authorization, context_);
    context_.AddMetadata(kSessionMetadata, std::string(session));
    stream_ = stub.AsyncSession(&context_, &queue_, &start_tag_);
  }

  ~GrpcSessionStream() override {
    {
      MutexLock lock(&mutex_);
      closed_ = true;
    }
    context_.TryCancel();
    wake_alarm_.Cancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  Event Wait(TimePoint deadline, v1::SessionResponse* message) override {
    while (true) {
      const std::optional<Event> event = Next(deadline);
      if (!event.has_value()) continue;
      if (*event == Event::kMessage) {
        *message = std::move(incoming_);
        Read();
      }
      return *event;
    }
  }

  bool Send(const v1::SessionRequest& request) override {
    if (ended_ || writing_ || !started_) return false;
    writing_ = true;
    stream_->Write(request, &write_tag_);
    return true;
  }

  void Flush(TimePoint deadline) override {
    while (writing_ && !ended_ && Clock::Real().Now() < deadline) {
      const std::optional<Event> event = Next(deadline);
      if (event == Event::kMessage) Read();
    }
  }

  void Wake() override {
    MutexLock lock(&mutex_);
    if (closed_ || wake_set_) return;
    wake_set_ = true;
    wake_alarm_.Set(&queue_, std::chrono::system_clock::time_point(), &wake_tag_);
  }

 private:
  // Returns one completion, or nothing if it is internal.
  std::optional<Event> Next(TimePoint deadline) {
    if (ended_) return Event::kClosed;
    void* tag = nullptr;
    bool ok = false;
    switch (queue_.AsyncNext(&tag, &ok, ToSystem(deadline))) {
      case grpc::CompletionQueue::SHUTDOWN:
        ended_ = true;
        return Event::kClosed;
      case grpc::CompletionQueue::TIMEOUT:
        return Event::kTimeout;
      case grpc::CompletionQueue::GOT_EVENT:
        break;
    }
    return Handle(tag, ok);
  }

  std::optional<Event> Handle(void* tag, bool ok) {
    if (tag == &wake_tag_) {
      MutexLock lock(&mutex_);
      wake_set_ = false;
      return Event::kWoken;
    }
    if (tag == &write_tag_) writing_ = false;
    if (!ok) {
      ended_ = true;
      return Event::kClosed;
    }
    if (tag == &read_tag_) return Event::kMessage;
    if (tag == &start_tag_) {
      started_ = true;
      Read();
    }
    return std::nullopt;
  }

  void Read() { stream_->Read(&incoming_, &read_tag_); }

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::SessionRequest, v1::SessionResponse>> stream_;
  v1::SessionResponse incoming_;
  bool started_ = false;
  bool writing_ = false;
  bool ended_ = false;
  char start_tag_ = 0;
  char read_tag_ = 0;
  char write_tag_ = 0;
  char wake_tag_ = 0;

  Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool wake_set_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Alarm wake_alarm_ ABSL_GUARDED_BY(mutex_);
};

// A unary call with a completion queue of its own.
template <typename Response>
class GrpcCall final : public PendingCall {
 public:
  using Reader = grpc::ClientAsyncResponseReader<Response>;

  explicit GrpcCall(std::function<absl::Status(const grpc::Status&)> ended)
      : ended_(std::move(ended)) {}
  ~GrpcCall() override {
    if (reader_ != nullptr && !finished_) {
      context_.TryCancel();
      Await();
    }
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  grpc::ClientContext& context() { return context_; }
  grpc::CompletionQueue& queue() { return queue_; }
  void Send(std::unique_ptr<Reader> reader, Response* response) {
    reader_ = std::move(reader);
    reader_->StartCall();
    reader_->Finish(response, &status_, this);
  }

  bool Ready() override {
    void* tag = nullptr;
    bool ok = false;
    finished_ = finished_ || queue_.AsyncNext(&tag, &ok, gpr_time_0(GPR_CLOCK_MONOTONIC)) ==
                                 grpc::CompletionQueue::GOT_EVENT;
    return finished_;
  }
  absl::Status Finish() override {
    Await();
    return ended_(status_);
  }

 private:
  void Await() {
    void* tag = nullptr;
    bool ok = false;
    if (!finished_) queue_.Next(&tag, &ok);
    finished_ = true;
  }

  const std::function<absl::Status(const grpc::Status&)> ended_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<Reader> reader_;
  grpc::Status status_;
  bool finished_ = false;
};

class GrpcStub final : public RpcStub {
 public:
  GrpcStub(std::shared_ptr<grpc::Channel> channel, const std::string& token, std::string hint)
      : authorization_(token.empty() ? "" : "Bearer " + token),
        hint_(std::move(hint)),
        channel_(std::move(channel)),
        stub_(Service::NewStub(channel_)) {}

  bool WaitConnected(TimePoint deadline) override {
    return channel_->WaitForConnected(ToSystem(deadline));
  }
  bool connected() override { return channel_->GetState(true) == GRPC_CHANNEL_READY; }

  absl::Status Call(const CallContext& call, const v1::OpenKeyspaceRequest& request,
                    v1::OpenKeyspaceResponse* response) override {
    return Unary(&Service::Stub::OpenKeyspace, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::SetKeyspaceStateRequest& request,
                    v1::SetKeyspaceStateResponse* response) override {
    return Unary(&Service::Stub::SetKeyspaceState, call, request, response);
  }
  std::unique_ptr<PendingCall> Start(const CallContext& call, const v1::AcquireRequest& request,
                                     v1::AcquireResponse* response) override {
    auto pending = std::make_unique<GrpcCall<v1::AcquireResponse>>(
        [this](const grpc::Status& status) { return Ended(status); });
    Prepare(call, pending->context());
    pending->Send(stub_->PrepareAsyncAcquire(&pending->context(), request, &pending->queue()),
                  response);
    return pending;
  }
  absl::Status Call(const CallContext& call, const v1::LookupRequest& request,
                    v1::LookupResponse* response) override {
    return Unary(&Service::Stub::Lookup, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::ReleaseRequest& request,
                    v1::ReleaseResponse* response) override {
    return Unary(&Service::Stub::Release, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::ReserveRequest& request,
                    v1::ReserveResponse* response) override {
    return Unary(&Service::Stub::Reserve, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::CommitRequest& request,
                    v1::CommitResponse* response) override {
    return Unary(&Service::Stub::Commit, call, request, response);
  }
  std::unique_ptr<PendingCall> Start(const CallContext& call, const v1::CommitRequest& request,
                                     v1::CommitResponse* response) override {
    auto pending = std::make_unique<GrpcCall<v1::CommitResponse>>(
        [this](const grpc::Status& status) { return Ended(status); });
    Prepare(call, pending->context());
    pending->Send(stub_->PrepareAsyncCommit(&pending->context(), request, &pending->queue()),
                  response);
    return pending;
  }
  absl::Status Call(const CallContext& call, const v1::AbortRequest& request,
                    v1::AbortResponse* response) override {
    return Unary(&Service::Stub::Abort, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::FlushRequest& request,
                    v1::FlushResponse* response) override {
    return Unary(&Service::Stub::Flush, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::PrefetchRequest& request,
                    v1::PrefetchResponse* response) override {
    return Unary(&Service::Stub::Prefetch, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::PinRequest& request,
                    v1::PinResponse* response) override {
    return Unary(&Service::Stub::Pin, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::UnpinRequest& request,
                    v1::UnpinResponse* response) override {
    return Unary(&Service::Stub::Unpin, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::DeleteRequest& request,
                    v1::DeleteResponse* response) override {
    return Unary(&Service::Stub::Delete, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::DropKeyspaceRequest& request,
                    v1::DropKeyspaceResponse* response) override {
    return Unary(&Service::Stub::DropKeyspace, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::StatsRequest& request,
                    v1::StatsResponse* response) override {
    return Unary(&Service::Stub::Stats, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::ListNodesRequest& request,
                    v1::ListNodesResponse* response) override {
    return Unary(&Service::Stub::ListNodes, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::LocatePageRequest& request,
                    v1::LocatePageResponse* response) override {
    return Unary(&Service::Stub::LocatePage, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::ClaimSlotsRequest& request,
                    v1::ClaimSlotsResponse* response) override {
    return Unary(&Service::Stub::ClaimSlots, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::ScrubSlotsRequest& request,
                    v1::ScrubSlotsResponse* response) override {
    return Unary(&Service::Stub::ScrubSlots, call, request, response);
  }
  absl::Status Call(const CallContext& call, const v1::DrainNodeRequest& request,
                    v1::DrainNodeResponse* response) override {
    return Unary(&Service::Stub::DrainNode, call, request, response);
  }

  absl::Status Get(const CallContext& call, const v1::GetRequest& request,
                   const std::function<absl::Status(v1::GetResponse&)>& receive) override {
    grpc::ClientContext context;
    Prepare(call, context);
    const auto reader = stub_->Get(&context, request);
    v1::GetResponse response;
    absl::Status received;
    while (received.ok() && reader->Read(&response)) received = receive(response);
    if (!received.ok()) context.TryCancel();
    const absl::Status finished = Ended(reader->Finish());
    return received.ok() ? finished : received;
  }

  absl::Status Put(const CallContext& call, const std::function<bool(v1::PutRequest*)>& next,
                   v1::PutResponse* response) override {
    grpc::ClientContext context;
    Prepare(call, context);
    const auto writer = stub_->Put(&context, response);
    v1::PutRequest request;
    while (next(&request) && writer->Write(request)) request.Clear();
    writer->WritesDone();
    return Ended(writer->Finish());
  }

  std::shared_ptr<SessionStream> OpenSession(std::string_view session) override {
    return std::make_shared<GrpcSessionStream>(*stub_, session, authorization_);
  }

 private:
  template <typename Request, typename Response>
  absl::Status Unary(grpc::Status (Service::Stub::*method)(grpc::ClientContext*, const Request&,
                                                           Response*),
                     const CallContext& call, const Request& request, Response* response) {
    grpc::ClientContext context;
    Prepare(call, context);
    return Ended(((*stub_).*method)(&context, request, response));
  }

  void Prepare(const CallContext& call, grpc::ClientContext& context) const {
    context.set_deadline(ToSystem(call.deadline));
    if (!call.session.empty()) context.AddMetadata(kSessionMetadata, std::string(call.session));
    AddToken(authorization_, context);
  }

  absl::Status Ended(const grpc::Status& status) const {
    const absl::Status ended = FromGrpc(status);
    if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return ended;
    return absl::Status(ended.code(), std::string(ended.message()) + hint_);
  }

  const std::string authorization_;  // empty: none
  const std::string hint_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<Service::Stub> stub_;
};

}  // namespace

bool RpcStub::Usable() {
  const pid_t owner = grpc_process.load();
  return owner == 0 || owner == ::getpid();
}

std::unique_ptr<RpcStub> RpcStub::Connect(const std::string& target, const ClientOptions& options) {
  pid_t no_process = 0;
  grpc_process.compare_exchange_strong(no_process, ::getpid());
  grpc::ChannelArguments arguments;
  // Every connection is a session of its own: it must not use a former connection's subchannel.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetMaxSendMessageSize(kMessageBytesMax);
  if (!IsUnix(target) && !options.tls_server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls_server_name);
  }
  return std::make_unique<GrpcStub>(
      grpc::CreateCustomChannel(target, CredentialsFor(target, options), arguments), options.token,
      HintFor(target, options));
}

}  // namespace crumb::client
