// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/etcd/etcd_client.h"

#include <utility>

#include "common/status_macros.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "server/cluster/etcd/etcd.grpc.pb.h"
#include "server/cluster/outgoing_calls.h"

namespace crumb::server {
namespace {

// A member that has vanished without a word ends a watch after about this.
constexpr int kKeepAliveMs = 10'000;
constexpr int kKeepAliveTimeoutMs = 5'000;
// gRPC takes this for the time that a connection may take to come up, too.
constexpr int kConnectTimeoutMs = 3000;

struct Member {
  explicit Member(const std::shared_ptr<grpc::Channel>& channel)
      : kv(etcdserverpb::KV::NewStub(channel)),
        watch(etcdserverpb::Watch::NewStub(channel)),
        lease(etcdserverpb::Lease::NewStub(channel)) {}
  std::unique_ptr<etcdserverpb::KV::Stub> kv;
  std::unique_ptr<etcdserverpb::Watch::Stub> watch;
  std::unique_ptr<etcdserverpb::Lease::Stub> lease;
};

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& endpoint) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepAliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepAliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(endpoint, grpc::InsecureChannelCredentials(), arguments);
}

EtcdEntry EntryOf(const etcdserverpb::KeyValue& kv) {
  return {kv.key(), kv.value(), kv.mod_revision(), false};
}

class GrpcEtcdClient final : public EtcdClient {
 public:
  GrpcEtcdClient(const std::vector<std::string>& endpoints, Duration call_deadline)
      : call_deadline_(call_deadline) {
    for (const std::string& endpoint : endpoints) members_.emplace_back(ChannelTo(endpoint));
  }

  absl::StatusOr<std::vector<EtcdEntry>> Range(const std::string& prefix,
                                               int64_t* revision) override {
    etcdserverpb::RangeRequest request;
    request.set_key(prefix);
    request.set_range_end(EndOfPrefix(prefix));
    etcdserverpb::RangeResponse response;
    CRUMB_RETURN_IF_ERROR(Call([&](Member& member, grpc::ClientContext* context) {
      return member.kv->Range(context, request, &response);
    }));
    *revision = response.header().revision();
    std::vector<EtcdEntry> entries;
    for (const auto& kv : response.kvs()) entries.push_back(EntryOf(kv));
    return entries;
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

  absl::Status KeepAlive(int64_t lease) override {
    etcdserverpb::LeaseKeepAliveRequest request;
    request.set_id(lease);
    etcdserverpb::LeaseKeepAliveResponse response;
    CRUMB_RETURN_IF_ERROR(Call([&](Member& member, grpc::ClientContext* context) {
      auto stream = member.lease->LeaseKeepAlive(context);
      const bool answered =
          stream->Write(request) && stream->WritesDone() && stream->Read(&response);
      const grpc::Status status = stream->Finish();
      // Cancelled by its own end is no failure once the answer is here.
      return answered ? grpc::Status::OK
             : status.ok()
                 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "etcd ended the stream at once")
                 : status;
    }));
    if (response.ttl() <= 0) return absl::NotFoundError("the etcd lease has ended");
    return absl::OkStatus();
  }

  absl::Status Watch(const std::string& prefix, int64_t revision, const Changed& changed) override {
    const size_t index = Current();
    grpc::ClientContext context;
    if (!calls_.Add(&context)) return absl::CancelledError("stopped");
    auto stream = members_[index].watch->Watch(&context);
    etcdserverpb::WatchRequest request;
    request.mutable_create_request()->set_key(prefix);
    request.mutable_create_request()->set_range_end(EndOfPrefix(prefix));
    request.mutable_create_request()->set_start_revision(revision + 1);
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
  template <typename Rpc>
  absl::Status Call(const Rpc& rpc) {
    const size_t index = Current();
    grpc::ClientContext context;
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
  // Unless somebody has moved on already.
  void Next(size_t from) {
    MutexLock lock(&mutex_);
    if (current_ == from) current_ = (current_ + 1) % members_.size();
  }

  const Duration call_deadline_;
  std::vector<Member> members_;
  OutgoingCalls calls_;
  Mutex mutex_;
  size_t current_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

std::unique_ptr<EtcdClient> EtcdClient::Make(const std::vector<std::string>& endpoints,
                                             Duration call_deadline) {
  return std::make_unique<GrpcEtcdClient>(endpoints, call_deadline);
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
