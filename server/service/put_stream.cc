// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/put_stream.h"

#include <optional>
#include <utility>

#include "server/calls/put_assembler.h"
#include "server/service/grpc_status.h"

namespace crumb::server {
namespace {

class PutStream : public grpc::ServerReadReactor<v1::PutRequest> {
 public:
  PutStream(const CallContext& context, CallsInProgress& calls, std::unique_ptr<CallScope> scope,
            v1::PutResponse* response)
      : context_(context),
        scope_(std::move(scope)),
        place_(std::in_place, calls.puts, context.limits.put_streams),
        assembler_(context),
        response_(response) {}

  void Start(const absl::Status& admitted) {
    if (!admitted.ok()) return End(admitted);
    if (!place_->taken()) {
      context_.metrics.Reject(Rejection::kPutStreams);
      return End(absl::ResourceExhaustedError("limits.put_streams is reached, try again"));
    }
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      *response_ = assembler_.Finish();
      return End(absl::OkStatus());
    }
    const absl::StatusOr<bool> complete = assembler_.Add(request_);
    if (!complete.ok()) return End(complete.status());
    if (!*complete) return StartRead(&request_);
    const bool queued = context_.commits.Submit([this] {
      assembler_.Commit();
      StartRead(&request_);
    });
    if (queued) return;
    context_.metrics.Reject(Rejection::kCommitQueue);
    End(absl::ResourceExhaustedError("limits.commit_queue is reached, try again"));
  }

  void OnDone() override { delete this; }

 private:
  void End(const absl::Status& status) {
    scope_->SetCode(status.code());
    place_.reset();
    Finish(ToGrpc(status));
  }

  const CallContext context_;
  const std::unique_ptr<CallScope> scope_;
  std::optional<Place> place_;  // until the call has its status: gRPC tells later that it is done
  PutAssembler assembler_;
  v1::PutRequest request_;
  v1::PutResponse* const response_;
};

}  // namespace

grpc::ServerReadReactor<v1::PutRequest>* StartPut(const CallContext& context,
                                                  const absl::Status& admitted,
                                                  CallsInProgress& calls,
                                                  std::unique_ptr<CallScope> scope,
                                                  v1::PutResponse* response) {
  // Deletes itself in OnDone.
  auto* stream = new PutStream(context, calls, std::move(scope), response);
  stream->Start(admitted);
  return stream;
}

}  // namespace crumb::server
