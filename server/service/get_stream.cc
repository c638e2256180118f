// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/streams.h"

#include <atomic>
#include <optional>
#include <string>
#include <utility>

#include "common/status_macros.h"
#include "crumb/v1/cache_service.pb.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "grpcpp/support/slice.h"
#include "server/calls/get_reader.h"
#include "server/service/call_metadata.h"
#include "server/service/decode.h"
#include "server/service/grpc_status.h"

namespace crumb::server {
namespace {

// Field number and wire type "length-delimited" of GetResponse.tiles.
constexpr uint32_t kTilesTag = v1::GetResponse::kTilesFieldNumber << 3 | 2;

// The message's own fields and then its tiles, which stay where they are: the slice holds the
// lease.
grpc::ByteBuffer Encode(const std::shared_ptr<GetReader>& reader, const GetReader::Part& part) {
  std::string front = part.message.SerializeAsString();
  if (part.tiles.empty()) {
    const grpc::Slice slice(front);
    return grpc::ByteBuffer(&slice, 1);
  }
  {
    google::protobuf::io::StringOutputStream stream(&front);  // appends
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.WriteTag(kTilesTag);
    coded.WriteVarint32(static_cast<uint32_t>(part.tiles.size()));
  }
  auto* holder = new std::shared_ptr<GetReader>(reader);
  const grpc::Slice slices[] = {
      grpc::Slice(front),
      grpc::Slice(
          const_cast<std::byte*>(part.tiles.data()), part.tiles.size(),
          [](void* held) { delete static_cast<std::shared_ptr<GetReader>*>(held); }, holder)};
  return grpc::ByteBuffer(slices, 2);
}

class GetStream : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                  public StallableStream,
                  public std::enable_shared_from_this<GetStream> {
 public:
  GetStream(const CallContext& context, const StreamParts& parts, std::unique_ptr<CallScope> scope,
            grpc::CallbackServerContext& call, const grpc::ByteBuffer& request)
      : context_(context),
        scope_(std::move(scope)),
        call_(call),
        request_(request),
        place_(std::in_place, parts.calls.gets, context.caller.name()) {}

  void Start(const absl::Status& admitted, StallWatch& stalls) {
    self_ = shared_from_this();
    if (!admitted.ok()) return End(admitted);
    if (place_->taken() != TenantBudget::Taken::kYes) {
      context_.metrics.Reject(Rejection::kGetStreams, place_->taken());
      return End(TenantBudget::Error(place_->taken(), "limits.get_streams"));
    }
    stalls.Add(weak_from_this());
    RunInTurn(
        context_, request_.Length(), [this] { Open(); },
        [this](const absl::Status& refused) { End(refused); });
  }

  void OnWriteDone(bool ok) override {
    if (!EndWait()) return EndStalled();
    if (!ok) return End(absl::CancelledError());
    WriteNext();
  }

  void Stalled() override {
    context_.metrics.stalled_streams.Add();
    call_.TryCancel();  // the write fails
    EndStalled();
  }

  void OnDone() override { self_.reset(); }  // may delete this

 private:
  // The request counts until its pages are leased.
  void Open() {
    v1::GetRequest request;
    const absl::Status decoded = DecodeRequest(request);
    if (!decoded.ok()) return End(decoded);
    GetReader::Open(context_, request, DeadlineOf(call_, context_.clock.Now()),
                    [this](absl::StatusOr<std::unique_ptr<GetReader>> reader) {
                      if (!reader.ok()) return End(reader.status());
                      scope_->EndRequest();
                      reader_ = *std::move(reader);
                      WriteNext();
                    });
  }

  absl::Status DecodeRequest(v1::GetRequest& request) {
    const size_t bytes = request_.Length();
    CRUMB_RETURN_IF_ERROR(Decode(request_, request));
    const uint64_t counted = CountedMemory(request, bytes);
    return counted == 0 ? absl::OkStatus() : scope_->CountRequest(context_.caller.name(), counted);
  }

  void WriteNext() {
    if (!reader_->Next(part_)) return End(absl::OkStatus());
    message_ = Encode(reader_, part_);
    BeginWait(context_.clock.Now(), /*progressed=*/true);
    StartWrite(&message_);
  }

  // Ends the stream once TryCancel has returned, which needs the call, and the write has failed.
  void EndStalled() {
    if (stalled_steps_.fetch_add(1) == 0) return;
    End(absl::DeadlineExceededError("nothing was read for limits.stream_progress_timeout"));
  }

  void End(const absl::Status& status) {
    FreeBytes(request_);
    scope_->EndRequest();
    scope_->SetCode(status.code());
    place_.reset();
    Finish(ToGrpc(status));
  }

  const CallContext context_;
  const std::unique_ptr<CallScope> scope_;
  grpc::CallbackServerContext& call_;
  const grpc::ByteBuffer& request_;  // encoded; gRPC keeps it until OnDone
  // Until the call has its status: gRPC reports later that it is done.
  std::optional<TenantGrant> place_;
  std::shared_ptr<GetReader> reader_;
  GetReader::Part part_;
  grpc::ByteBuffer message_;
  std::atomic<int> stalled_steps_{0};
  std::shared_ptr<GetStream> self_;  // keeps the stream alive until OnDone
};

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* StartGet(const CallContext& context,
                                                     const absl::Status& admitted,
                                                     const StreamParts& parts,
                                                     std::unique_ptr<CallScope> scope,
                                                     grpc::CallbackServerContext& call,
                                                     const grpc::ByteBuffer& request) {
  const auto stream = std::make_shared<GetStream>(context, parts, std::move(scope), call, request);
  stream->Start(admitted, parts.stalls);
  return stream.get();
}

}  // namespace crumb::server
