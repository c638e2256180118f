// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/streams.h"

#include <string>
#include <utility>
#include <variant>

#include "common/status_macros.h"
#include "server/base/wire_enums.h"
#include "server/calls/device_calls.h"
#include "server/calls/field_bounds.h"
#include "server/calls/keyspace_calls.h"
#include "server/service/queue_stream.h"

namespace crumb::server {
namespace {

using Base = StallableQueueStream<grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>,
                                  v1::SessionResponse>;

v1::SessionResponse MessageOf(const NoticeQueue::Notice& notice) {
  v1::SessionResponse message;
  if (const auto* durable = std::get_if<NoticeQueue::Durable>(&notice)) {
    message.mutable_durable()->set_keyspace(std::string(durable->keyspace.view()));
    std::string& keys = *message.mutable_durable()->mutable_keys();
    keys.reserve(durable->keys.size() * sizeof(PageKey));
    for (const PageKey& key : durable->keys) keys += key.view();
  } else if (const auto* gone = std::get_if<NoticeQueue::SlabGone>(&notice)) {
    message.mutable_slab_gone()->set_slab(gone->slab);
  } else if (const auto* demotions = std::get_if<NoticeQueue::Demotions>(&notice)) {
    message.mutable_demotions()->set_pool(std::string(demotions->pool.view()));
    for (const storage::DemotionWork& one : demotions->work) {
      message.mutable_demotions()->add_slots(one.slot);
      message.mutable_demotions()->add_headers(ToBytes(*one.header));
    }
  } else {
    const auto& change = std::get<NoticeQueue::StateChange>(notice);
    message.mutable_keyspace_state()->set_keyspace(std::string(change.keyspace.view()));
    message.mutable_keyspace_state()->set_state(ToProto(change.state));
    message.mutable_keyspace_state()->set_reason(change.reason);
    message.mutable_keyspace_state()->set_generation(change.generation);
  }
  return message;
}

class SessionStream : public Base {
 public:
  SessionStream(const CallContext& context, std::unique_ptr<CallScope> scope,
                grpc::CallbackServerContext& call, absl::StatusOr<std::shared_ptr<Session>> session)
      : Base(call, context.clock, context.metrics.stalled_streams),
        context_(context),
        scope_(std::move(scope)),
        admitted_(session.status()),
        session_(session.ok() ? *std::move(session) : nullptr) {}

  void Start(StreamRegistry& streams) {
    const absl::Status status = Subscribe(streams);
    scope_->SetCode(status.code());
    if (status.ok()) {
      StartRead(&request_);
    } else {
      End(ToGrpc(status));
    }
    Begin();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      request_ = {};
      return End(grpc::Status::OK);  // the caller has nothing more to say
    }
    const absl::Status fits = CheckFields(context_.limits, request_);
    if (!fits.ok()) {
      request_ = {};
      scope_->SetCode(fits.code());
      return End(ToGrpc(fits));
    }
    Count(request_.counters());
    uint64_t samples =
        Admit(Reported::kQualitySamples, static_cast<uint64_t>(request_.quality_size()));
    for (const v1::SessionRequest::QualitySample& sample : request_.quality()) {
      if (samples-- == 0) break;
      context_.metrics.quality.Observe(sample.layer(), sample.attention_error(), sample.key_error(),
                                       sample.value_error());
    }
    request_ = {};  // frees its memory, until the next message comes
    StartRead(&request_);
  }

 protected:
  bool Take(v1::SessionResponse& message) override {
    if (notices_ == nullptr) return false;
    const std::optional<NoticeQueue::Notice> notice = notices_->Take();
    if (!notice.has_value()) return false;
    message = MessageOf(*notice);
    return true;
  }

  void Ended() override {
    if (notices_ == nullptr) return;
    session_->CloseNotices();
    context_.sessions.NoteStreamEnd(*session_);
  }

 private:
  absl::Status Subscribe(StreamRegistry& streams) {
    CRUMB_RETURN_IF_ERROR(admitted_);
    if (!streams.Add(shared_from_this())) return absl::UnavailableError("crumbd is stopping");
    auto notices = std::make_shared<NoticeQueue>(
        static_cast<size_t>(context_.limits.notices_max),
        [weak = weak_from_this()] {
          if (const auto self = weak.lock()) self->Wake();
        },
        session_->engine().tenant(), &context_.events.notice_bytes());
    if (!session_->OpenNotices(notices)) {
      return absl::FailedPreconditionError("the session has a stream already");
    }
    notices_ = std::move(notices);
    return absl::OkStatus();
  }

  // How much of an amount that the client reports counts.
  uint64_t Admit(Reported kind, uint64_t amount) {
    return context_.metrics.reported.Admit(context_.caller.name(), kind, amount,
                                           context_.clock.Now());
  }

  void Count(const v1::SessionRequest::Counters& counters) {
    ServerMetrics& metrics = context_.metrics;
    metrics.used_tokens.Add(Admit(Reported::kUsedTokens, counters.used_tokens()));
    metrics.prefill_tokens_avoided.Add(
        Admit(Reported::kTokensAvoided, counters.prefill_tokens_avoided()));
    metrics.publish_dropped_pages.Add(
        Admit(Reported::kDroppedPages, counters.publish_dropped_pages()));
    metrics.client_deadline_exceeded.Add(Admit(Reported::kDeadlines, counters.deadline_exceeded()));
    metrics.client_verify_failures.Add(
        Admit(Reported::kVerifyFailures, counters.verify_failures()));
    metrics.Refuse(Refusal::kNonFinite,
                   Admit(Reported::kRefusedWindows, counters.windows_refused()));
    metrics.scrubbed_pages.Add(Admit(Reported::kScrubbedPages, counters.scrubbed_pages()));
  }

  const CallContext context_;
  const std::unique_ptr<CallScope> scope_;
  const absl::Status admitted_;
  const std::shared_ptr<Session> session_;  // null: not admitted
  std::shared_ptr<NoticeQueue> notices_;    // null: not subscribed
  v1::SessionRequest request_;
};

}  // namespace

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionResponse>* StartSessionStream(
    const CallContext& context, StreamRegistry& streams, StallWatch& stalls,
    std::unique_ptr<CallScope> scope, grpc::CallbackServerContext& call,
    absl::StatusOr<std::shared_ptr<Session>> session) {
  const auto stream =
      std::make_shared<SessionStream>(context, std::move(scope), call, std::move(session));
  stalls.Add(stream);
  stream->Start(streams);
  return stream.get();
}

}  // namespace crumb::server
