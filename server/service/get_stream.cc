// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/get_stream.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "crumb/v1/cache_service.pb.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "grpcpp/support/slice.h"
#include "server/calls/get_reader.h"
#include "server/service/grpc_status.h"

namespace crumb::server {
namespace {

// Field number and wire type "length-delimited" of GetResponse.tiles.
constexpr uint32_t kTilesTag = v1::GetResponse::kTilesFieldNumber << 3 | 2;

bool Parse(const grpc::ByteBuffer& bytes, v1::GetRequest& request) {
  std::vector<grpc::Slice> slices;
  if (!bytes.Dump(&slices).ok()) return false;
  std::string joined;
  for (const grpc::Slice& slice : slices) {
    joined.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return request.ParseFromString(joined);
}

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

class GetStream : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  GetStream(const CallContext& context, CallsInProgress& calls, std::unique_ptr<CallScope> scope)
      : context_(context),
        scope_(std::move(scope)),
        place_(std::in_place, calls.gets, context.limits.get_streams) {}

  void Start(const absl::Status& admitted, TimePoint deadline, const grpc::ByteBuffer& bytes) {
    if (!admitted.ok()) return End(admitted);
    if (!place_->taken()) {
      context_.metrics.Reject(Rejection::kGetStreams);
      return End(absl::ResourceExhaustedError("limits.get_streams is reached, try again"));
    }
    v1::GetRequest request;
    if (!Parse(bytes, request)) return End(absl::InvalidArgumentError("not a GetRequest"));
    GetReader::Open(context_, request, deadline,
                    [this](absl::StatusOr<std::unique_ptr<GetReader>> reader) {
                      if (!reader.ok()) return End(reader.status());
                      reader_ = *std::move(reader);
                      WriteNext();
                    });
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return End(absl::CancelledError());
    WriteNext();
  }
  void OnDone() override { delete this; }

 private:
  void WriteNext() {
    if (!reader_->Next(part_)) return End(absl::OkStatus());
    message_ = Encode(reader_, part_);
    StartWrite(&message_);
  }

  void End(const absl::Status& status) {
    scope_->SetCode(status.code());
    place_.reset();
    Finish(ToGrpc(status));
  }

  const CallContext context_;
  const std::unique_ptr<CallScope> scope_;
  std::optional<Place> place_;  // until the call has its status: gRPC tells later that it is done
  std::shared_ptr<GetReader> reader_;
  GetReader::Part part_;
  grpc::ByteBuffer message_;
};

}  // namespace

grpc::ServerWriteReactor<grpc::ByteBuffer>* StartGet(
    const CallContext& context, const absl::Status& admitted, CallsInProgress& calls,
    std::unique_ptr<CallScope> scope, TimePoint deadline, const grpc::ByteBuffer& request) {
  auto* stream = new GetStream(context, calls, std::move(scope));  // deletes itself in OnDone
  stream->Start(admitted, deadline, request);
  return stream;
}

}  // namespace crumb::server
