// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/etcd/etcd_client.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "server/base/outgoing_calls.h"
#include "server/cluster/etcd/etcd.grpc.pb.h"

namespace crumb::server {
namespace {

// A member that has vanished without a word ends a watch after about this.
constexpr int kKeepAliveMs = 10'000;
constexpr int kKeepAliveTimeoutMs = 5'000;
// Entries of one response to a Range: the number requested at first, and at most. A value is 1.5
// MiB at most (etcd's own bound of a request), a message as long as kMessageBytesMax.
constexpr int64_t kRangeEntries = 16;
constexpr int64_t kRangeEntriesMax = 1024;
constexpr int kMessageBytesMax = 32 << 20;

struct Member {
  explicit Member(const std::shared_ptr<grpc::Channel>& channel)
      : kv(etcdserverpb::KV::NewStub(channel)),
        watch(etcdserverpb::Watch::NewStub(channel)),
        lease(etcdserverpb::Lease::NewStub(channel)),
        auth(etcdserverpb::Auth::NewStub(channel)) {}
  std::unique_ptr<etcdserverpb::KV::Stub> kv;
  std::unique_ptr<etcdserverpb::Watch::Stub> watch;
  std::unique_ptr<etcdserverpb::Lease::Stub> lease;
  std::unique_ptr<etcdserverpb::Auth::Stub> auth;
};

std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const EtcdAccess& access) {
  namespace tls = grpc::experimental;
  if (!access.tls()) return grpc::InsecureChannelCredentials();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(access.reload_interval);
  tls::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(std::make_shared<tls::FileWatcherCertificateProvider>(
      access.key_file, access.cert_file, access.ca_file, static_cast<unsigned>(seconds.count())));
  options.watch_root_certs();
  if (!access.cert_file.empty()) options.watch_identity_key_cert_pairs();
  return tls::TlsCredentials(options);
}

std::shared_ptr<grpc::Channel> ChannelTo(
    const std::string& endpoint, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    const std::string& server_name) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepAliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepAliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  if (!server_name.empty()) arguments.SetSslTargetNameOverride(server_name);
  return grpc::CreateCustomChannel(endpoint, credentials, arguments);
}

EtcdEntry EntryOf(const etcdserverpb::KeyValue& kv) {
  return {kv.key(), kv.value(), kv.mod_revision(), false};
}

class GrpcEtcdClient final : public EtcdClient {
 public:
  GrpcEtcdClient(const std::vector<std::string>& endpoints, Duration call_deadline,
                 const EtcdAccess& access)
      : call_deadline_(call_deadline), access_(access) {
    const auto credentials = CredentialsOf(access);
    for (const std::string& endpoint : endpoints) {
      members_.emplace_back(ChannelTo(endpoint, credentials, access.server_name));
    }
  }

  absl::StatusOr<std::vector<EtcdEntry>> Range(const std::string& prefix,
                                               int64_t* revision) override {
    etcdserverpb::RangeRequest request;
    request.set_key(prefix);
    request.set_range_end(EndOfPrefix(prefix));
    request.set_limit(kRangeEntries);
    std::vector<EtcdEntry> entries;
    while (true) {
      etcdserverpb::RangeResponse response;
      const absl::Status status = Call([&](Member& member, grpc::ClientContext* context) {
        response.Clear();
        return member.kv->Range(context, request, &response);
      });
      // Its entries are longer than those before: fewer of them fit into a message.
      if (absl::IsResourceExhausted(status) && request.limit() > 1) {
        request.set_limit(request.limit() / 2);
        continue;
      }
      CRUMB_RETURN_IF_ERROR(status);
      for (const auto& kv : response.kvs()) entries.push_back(EntryOf(kv));
      // All pages are of the first one's revision.
      if (request.revision() == 0) request.set_revision(response.header().revision());
      *revision = request.revision();
      if (!response.more() || response.kvs().empty()) return entries;
      request.set_key(entries.back().key + '\0');
      const bool small = response.ByteSizeLong() < kMessageBytesMax / 32;
      if (small) request.set_limit(std::min(request.limit() * 2, kRangeEntriesMax));
    }
  }

  absl::StatusOr<bool> PutIf(const std::string& key, const std::string& value, int64_t lease,
                             int64_t mod_revision) override {
    etcdserverpb::TxnRequest request;
    auto* compare = request.add_compare();
    compare->set_result(etcdserverpb::Compare::EQUAL);
    compare->set_target(etcdserverpb::Compare::MOD);
    compare->set_key(key);
    compare->set_mod_revision(mod_revision);
    auto* put = request.add_success()->mutable_request_put();
    put->set_key(key);
    put->set_value(value);
    put->set_lease(lease);
    etcdserverpb::TxnResponse response;
    CRUMB_RETURN_IF_ERROR(Call([&](Member& member, grpc::ClientContext* context) {
      return member.kv->Txn(context, request, &response);
    }));
    return response.succeeded();
  }

  absl::Status Put(const std::string& key, const std::string& value, int64_t lease) override {
    etcdserverpb::PutRequest request;
    request.set_key(key);
    request.set_value(value);
    request.set_lease(lease);
    etcdserverpb::PutResponse response;
    return Call([&](Member& member, grpc::ClientContext* context) {
      return member.kv->Put(context, request, &response);
    });
  }

  absl::Status Delete(const std::string& key) override {
    etcdserverpb::TxnRequest request;
    request.add_success()->mutable_request_delete_range()->set_key(key);
    etcdserverpb::TxnResponse response;
    return Call([&](Member& member, grpc::ClientContext* context) {
      return member.kv->Txn(context, request, &response);
    });
  }

  absl::StatusOr<int64_t> GrantLease(Duration ttl) override {
    etcdserverpb::LeaseGrantRequest request;
    request.set_ttl(std::chrono::ceil<std::chrono::seconds>(ttl).count());
    etcdserverpb::LeaseGrantResponse response;
    CRUMB_RETURN_IF_ERROR(Call([&](Member& member, grpc::ClientContext* context) {
      return member.lease->LeaseGrant(context, request, &response);
    }));
    return response.id();
  }

  absl::Status RevokeLease(int64_t lease) override {
    etcdserverpb::LeaseRevokeRequest request;
    request.set_id(lease);
    etcdserverpb::LeaseRevokeResponse response;
    return Call([&](Member& member, grpc::ClientContext* context) {
      return member.lease->LeaseRevoke(context, request, &response);
    });
  }

  absl::Status KeepAlive(int64_t lease) override {
    etcdserverpb::LeaseKeepAliveRequest request;
    request.set_id(lease);
    etcdserverpb::LeaseKeepAliveResponse response;
    CRUMB_RETURN_IF_ERROR(Call([&](Member& member, grpc::ClientContext* context) {
      auto stream = member.lease->LeaseKeepAlive(context);
      const bool responded =
          stream->Write(request) && stream->WritesDone() && stream->Read(&response);
      const grpc::Status status = stream->Finish();
      // Cancelled by its own end is no failure once the response is here.
      return responded ? grpc::Status::OK
             : status.ok()
                 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "etcd ended the stream at once")
                 : status;
    }));
    if (response.ttl() <= 0) return absl::NotFoundError("the etcd lease has ended");
    return absl::OkStatus();
  }

  absl::Status Watch(const std::string& prefix, int64_t revision, const Changed& changed) override {
    const size_t index = Current();
    CRUMB_RETURN_IF_ERROR(LogIn());
    grpc::ClientContext context;
    AddToken(&context);
    if (!calls_.Add(&context)) return absl::CancelledError("stopped");
    auto stream = members_[index].watch->Watch(&context);
    etcdserverpb::WatchRequest request;
    request.mutable_create_request()->set_key(prefix);
    request.mutable_create_request()->set_range_end(EndOfPrefix(prefix));
    request.mutable_create_request()->set_start_revision(revision + 1);
    // A long batch of changes comes in messages of a request's size at most.
    request.mutable_create_request()->set_fragment(true);
    absl::Status end;
    bool lost = false;
    bool ended = false;
    if (stream->Write(request)) {
      etcdserverpb::WatchResponse response;
      while (!lost && !ended && stream->Read(&response)) {
        lost = response.canceled() || response.compact_revision() > 0;
        std::vector<EtcdEntry> entries;
        for (const auto& event : response.events()) {
          entries.push_back(EntryOf(event.kv()));
          entries.back().deleted = event.type() == etcdserverpb::Event::DELETE;
        }
        if (!entries.empty()) ended = !changed(std::move(entries));
      }
    }
    if (lost || ended) context.TryCancel();
    end = FromGrpc(stream->Finish());
    calls_.Remove(&context);
    if (lost) return absl::DataLossError("etcd has no history as far back");
    if (ended) return absl::AbortedError("the range is to be read again");
    if (end.ok()) end = absl::UnavailableError("etcd ended the watch");
    Next(index);
    return end;
  }

  void Cancel() override { calls_.Stop(); }

 private:
  // Makes a call with the token of the user, if one is set. A token that etcd does not know any
  // more is renewed once.
  template <typename Rpc>
  absl::Status Call(const Rpc& rpc) {
    CRUMB_RETURN_IF_ERROR(LogIn());
    const absl::Status status = CallOnce(rpc);
    // The statuses for a token that is old, for one from before etcd's restart, and for none.
    const bool forgotten = absl::IsUnauthenticated(status) || absl::IsInvalidArgument(status);
    if (access_.user.empty() || !forgotten) return status;
    SetToken("");
    CRUMB_RETURN_IF_ERROR(LogIn());
    return CallOnce(rpc);
  }

  absl::Status LogIn() {
    if (access_.user.empty() || !Token().empty()) return absl::OkStatus();
    etcdserverpb::AuthenticateRequest request;
    request.set_name(access_.user);
    CRUMB_ASSIGN_OR_RETURN(*request.mutable_password(), ReadPassword(access_.password_file));
    etcdserverpb::AuthenticateResponse response;
    const absl::Status status = CallOnce([&](Member& member, grpc::ClientContext* context) {
      return member.auth->Authenticate(context, request, &response);
    });
    if (status.ok()) SetToken(response.token());
    if (!absl::IsInvalidArgument(status) && !absl::IsFailedPrecondition(status)) return status;
    return absl::Status(status.code(), "logging in to etcd as " + access_.user + ": " +
                                           std::string(status.message()));
  }

  std::string Token() {
    MutexLock lock(&mutex_);
    return token_;
  }
  void SetToken(const std::string& token) {
    MutexLock lock(&mutex_);
    token_ = token;
  }
  void AddToken(grpc::ClientContext* context) {
    const std::string token = Token();
    if (!token.empty()) context->AddMetadata("token", token);
  }

  template <typename Rpc>
  absl::Status CallOnce(const Rpc& rpc) {
    const size_t index = Current();
    grpc::ClientContext context;
    AddToken(&context);
    context.set_deadline(ToGrpcDeadline(Clock::Real().Now() + call_deadline_, Clock::Real().Now()));
    // gRPC watches a connection that comes up only while some call waits for it.
    context.set_wait_for_ready(true);
    if (!calls_.Add(&context)) return absl::CancelledError("stopped");
    const absl::Status status = FromGrpc(rpc(members_[index], &context));
    calls_.Remove(&context);
    if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) Next(index);
    return status;
  }

  size_t Current() {
    MutexLock lock(&mutex_);
    return current_;
  }
  // Does nothing when another call has moved on already.
  void Next(size_t from) {
    MutexLock lock(&mutex_);
    if (current_ == from) current_ = (current_ + 1) % members_.size();
  }

  const Duration call_deadline_;
  const EtcdAccess access_;
  std::vector<Member> members_;
  OutgoingCalls calls_;
  Mutex mutex_;
  size_t current_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string token_ ABSL_GUARDED_BY(mutex_);  // token of the login; empty if there is none
};

}  // namespace

std::unique_ptr<EtcdClient> EtcdClient::Make(const std::vector<std::string>& endpoints,
                                             Duration call_deadline, const EtcdAccess& access) {
  return std::make_unique<GrpcEtcdClient>(endpoints, call_deadline, access);
}

std::string EndOfPrefix(std::string prefix) {
  while (!prefix.empty()) {
    if (static_cast<uint8_t>(prefix.back()) < 0xff) {
      ++prefix.back();
      return prefix;
    }
    prefix.pop_back();
  }
  return std::string(1, '\0');  // all keys
}

}  // namespace crumb::server
