// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/streams.h"

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "server/calls/put_assembler.h"
#include "server/service/grpc_status.h"
#include "server/service/unary_call.h"

namespace crumb::server {
namespace {

// A caller who sends at least this much between two waits makes progress.
constexpr size_t kProgressBytes = 1 << 20;

class PutStream : public grpc::ServerReadReactor<v1::PutRequest>,
                  public StallableStream,
                  public std::enable_shared_from_this<PutStream> {
 public:
  PutStream(const CallContext& context, const StreamParts& parts, std::unique_ptr<CallScope> scope,
            grpc::CallbackServerContext& call, v1::PutResponse* response)
      : context_(context),
        scope_(std::move(scope)),
        hold_(call),
        place_(std::in_place, parts.calls.puts, context.caller.name()),
        assembler_(context),
        response_(response) {}

  void Start(const absl::Status& admitted, StallWatch& stalls) {
    self_ = shared_from_this();
    if (!admitted.ok()) return End(admitted);
    if (place_->taken() != TenantBudget::Taken::kYes) {
      context_.metrics.Reject(Rejection::kPutStreams, place_->taken());
      return End(TenantBudget::Error(place_->taken(), "limits.put_streams"));
    }
    stalls.Add(weak_from_this());
    ReadNext(true);
  }

  void OnReadDone(bool ok) override {
    if (!EndWait()) return;  // Stalled() ends the stream
    // They can take many times as much memory as the message has bytes.
    request_.DiscardUnknownFields();
    if (!ok) {
      *response_ = assembler_.Finish();
      responded_.store(true);
      // The wait ends when the response was read.
      BeginWait(context_.clock.Now(), /*progressed=*/true);
      return End(absl::OkStatus());
    }
    const absl::StatusOr<bool> complete = assembler_.Add(request_);
    if (!complete.ok()) return End(complete.status());
    if (!*complete) {
      received_ += request_.tiles().size();
      return ReadNext(received_ >= kProgressBytes);
    }
    const bool queued = context_.commits.Submit(context_.caller.name(), [this] {
      assembler_.Commit();
      ReadNext(true);
    });
    if (queued) return;
    context_.metrics.Reject(Rejection::kCommitQueue);
    End(absl::ResourceExhaustedError(
        "limits.commit_queue, or the tenant's part of it, is reached, try again"));
  }

  bool WaitsForReader() const override { return responded_.load(); }

  // A read in progress ends with the stream.
  void Stalled() override {
    context_.metrics.stalled_streams.Add();
    if (responded_.load()) return hold_.Cancel();
    End(absl::DeadlineExceededError(
        "the Put made no progress for limits.stream_progress_timeout; what it had sent whole is "
        "stored"));
  }

  void OnDone() override { self_.reset(); }  // may delete this

 private:
  void ReadNext(bool progressed) {
    if (progressed) received_ = 0;
    BeginWait(context_.clock.Now(), progressed);
    StartRead(&request_);
  }

  void End(const absl::Status& status) {
    scope_->SetCode(status.code());
    place_.reset();
    Finish(ToGrpc(status));
  }

  const CallContext context_;
  const std::unique_ptr<CallScope> scope_;
  CallHold hold_;
  std::atomic<bool> responded_{false};  // the response is complete
  // Until the call has its status: gRPC reports later that it is done.
  std::optional<TenantGrant> place_;
  PutAssembler assembler_;
  size_t received_ = 0;  // tile bytes since the last progress
  v1::PutRequest request_;
  v1::PutResponse* const response_;
  std::shared_ptr<PutStream> self_;  // keeps the stream alive until OnDone
};

}  // namespace

grpc::ServerReadReactor<v1::PutRequest>* StartPut(const CallContext& context,
                                                  const absl::Status& admitted,
                                                  const StreamParts& parts,
                                                  std::unique_ptr<CallScope> scope,
                                                  grpc::CallbackServerContext& call,
                                                  v1::PutResponse* response) {
  const auto stream = std::make_shared<PutStream>(context, parts, std::move(scope), call, response);
  stream->Start(admitted, parts.stalls);
  return stream.get();
}

}  // namespace crumb::server
