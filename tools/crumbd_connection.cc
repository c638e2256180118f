// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/crumbd_connection.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "common/status_macros.h"
#include "crumb/v1/cache_service.grpc.pb.h"

namespace crumb::tools {
namespace {

// Bytes of tiles in one message of Put: well below gRPC's limit of 4 MiB for a message.
constexpr size_t kPutPieceBytes = 1 << 20;

class GrpcConnection : public CrumbdConnection {
 public:
  GrpcConnection(const std::string& target, Duration timeout)
      : target_(target),
        timeout_(timeout),
        channel_(grpc::CreateChannel(target, grpc::InsecureChannelCredentials())),
        stub_(v1::CacheService::NewStub(channel_)) {}

  absl::StatusOr<std::string> Health() override;
  absl::StatusOr<std::vector<FragmentFile>> GetPage(const KeyspaceId& keyspace,
                                                    const PageKey& key) override;
  absl::StatusOr<v1::PutResponse> Put(const KeyspaceId& keyspace,
                                      const std::vector<FragmentFile>& fragments) override;

  absl::StatusOr<v1::StatsResponse> Stats() override {
    return Call(&v1::CacheService::Stub::Stats, v1::StatsRequest());
  }
  absl::StatusOr<v1::LookupResponse> Lookup(const v1::LookupRequest& request) override {
    return Call(&v1::CacheService::Stub::Lookup, request);
  }
  absl::StatusOr<v1::FlushResponse> Flush() override {
    return Call(&v1::CacheService::Stub::Flush, v1::FlushRequest());
  }
  absl::StatusOr<v1::PinResponse> Pin(const v1::PinRequest& request) override {
    return Call(&v1::CacheService::Stub::Pin, request);
  }
  absl::StatusOr<v1::UnpinResponse> Unpin(const v1::UnpinRequest& request) override {
    return Call(&v1::CacheService::Stub::Unpin, request);
  }
  absl::StatusOr<v1::DeleteResponse> Delete(const v1::DeleteRequest& request) override {
    return Call(&v1::CacheService::Stub::Delete, request);
  }
  absl::StatusOr<v1::DropKeyspaceResponse> DropKeyspace(
      const v1::DropKeyspaceRequest& request) override {
    return Call(&v1::CacheService::Stub::DropKeyspace, request);
  }
  absl::Status SetKeyspaceState(const v1::SetKeyspaceStateRequest& request) override {
    return Call(&v1::CacheService::Stub::SetKeyspaceState, request).status();
  }

 private:
  void Prepare(grpc::ClientContext& context) const {
    context.set_deadline(std::chrono::system_clock::now() + timeout_);
  }

  // gRPC's codes have the numbers of absl's.
  absl::Status FromGrpc(const grpc::Status& status) const {
    if (status.ok()) return absl::OkStatus();
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
      return absl::UnavailableError("no crumbd answers at " + target_ + " (" +
                                    status.error_message() +
                                    "); start crumbd, or name it with --socket-dir or --address");
    }
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  }

  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (v1::CacheService::Stub::*method)(grpc::ClientContext*,
                                                                               const Request&,
                                                                               Response*),
                                const Request& request) {
    grpc::ClientContext context;
    Prepare(context);
    Response response;
    CRUMB_RETURN_IF_ERROR(FromGrpc((stub_.get()->*method)(&context, request, &response)));
    return response;
  }

  const std::string target_;
  const Duration timeout_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::CacheService::Stub> stub_;
};

// The health service is called without generated code: its request for the whole server is empty,
// and its answer is one enum field.
absl::StatusOr<std::string> GrpcConnection::Health() {
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  Prepare(context);
  auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check",
                                    grpc::ByteBuffer(nullptr, 0), &queue);
  call->StartCall();
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->Finish(&answer, &status, &queue);
  void* tag = nullptr;
  bool finished = false;
  queue.Next(&tag, &finished);
  CRUMB_RETURN_IF_ERROR(FromGrpc(status));
  grpc::Slice bytes;
  const bool serving = answer.DumpToSingleSlice(&bytes).ok() && bytes.size() == 2 &&
                       bytes.begin()[0] == 0x08 && bytes.begin()[1] == 0x01;
  return serving ? "serving" : "not serving";
}

// Checks what came of one page and takes the next message in.
class PageAssembly {
 public:
  PageAssembly(const KeyspaceId& keyspace, const PageKey& key) : keyspace_(keyspace), key_(key) {}

  absl::Status Add(const v1::GetResponse& message) {
    if (message.miss_reason() != v1::MISS_REASON_UNSPECIFIED) {
      return absl::NotFoundError("the page is a miss: " + MissReasonName(message.miss_reason()));
    }
    if (!message.header().empty()) {
      CRUMB_RETURN_IF_ERROR(Finish());
      CRUMB_ASSIGN_OR_RETURN(FragmentHeader header,
                             DecodeFragmentHeader(std::as_bytes(std::span(message.header()))));
      if (header.keyspace != keyspace_ || header.key != key_) {
        return absl::DataLossError("crumbd answered with another page's header");
      }
      fragments_.push_back({std::move(header), {}});
    }
    if (fragments_.empty()) return absl::DataLossError("crumbd sent tiles without a header");
    const auto bytes = std::as_bytes(std::span(message.tiles()));
    std::vector<std::byte>& tiles = fragments_.back().tiles;
    tiles.insert(tiles.end(), bytes.begin(), bytes.end());
    return absl::OkStatus();
  }

  // The fragment that was open is complete: its sums must hold.
  absl::Status Finish() {
    if (fragments_.empty()) return absl::OkStatus();
    return VerifyTileSums(fragments_.back().header, fragments_.back().tiles);
  }

  std::vector<FragmentFile> Take() { return std::move(fragments_); }

 private:
  const KeyspaceId keyspace_;
  const PageKey key_;
  std::vector<FragmentFile> fragments_;
};

absl::StatusOr<std::vector<FragmentFile>> GrpcConnection::GetPage(const KeyspaceId& keyspace,
                                                                  const PageKey& key) {
  v1::GetRequest request;
  request.set_keyspace(std::string(keyspace.view()));
  request.set_keys(std::string(key.view()));
  request.set_wait_ms(static_cast<uint32_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(timeout_).count()));
  grpc::ClientContext context;
  Prepare(context);
  auto reader = stub_->Get(&context, request);
  PageAssembly page(keyspace, key);
  v1::GetResponse message;
  while (reader->Read(&message)) {
    if (absl::Status status = page.Add(message); !status.ok()) {
      context.TryCancel();
      reader->Finish();
      return status;
    }
  }
  CRUMB_RETURN_IF_ERROR(FromGrpc(reader->Finish()));
  CRUMB_RETURN_IF_ERROR(page.Finish());
  std::vector<FragmentFile> fragments = page.Take();
  if (fragments.empty()) return absl::NotFoundError("the page is a miss");
  return fragments;
}

absl::StatusOr<v1::PutResponse> GrpcConnection::Put(const KeyspaceId& keyspace,
                                                    const std::vector<FragmentFile>& fragments) {
  grpc::ClientContext context;
  Prepare(context);
  v1::PutResponse response;
  auto writer = stub_->Put(&context, &response);
  bool open = true;
  for (size_t i = 0; i < fragments.size() && open; ++i) {
    const FragmentFile& fragment = fragments[i];
    v1::PutRequest message;
    if (i == 0) message.set_keyspace(std::string(keyspace.view()));
    std::string header(FragmentHeaderBytes(fragment.header.range.tiles()), '\0');
    EncodeFragmentHeader(fragment.header, std::as_writable_bytes(std::span(header)));
    message.set_header(std::move(header));
    for (size_t at = 0; at < fragment.tiles.size() && open; at += kPutPieceBytes) {
      const size_t size = std::min(kPutPieceBytes, fragment.tiles.size() - at);
      message.set_tiles(fragment.tiles.data() + at, size);
      open = writer->Write(message);
      message.Clear();
    }
  }
  writer->WritesDone();
  CRUMB_RETURN_IF_ERROR(FromGrpc(writer->Finish()));
  return response;
}

// "MISS_REASON_NOT_COVERED" -> "not covered".
std::string ReadableEnum(const std::string& name, size_t prefix_size) {
  std::string text = name.size() > prefix_size ? name.substr(prefix_size) : name;
  for (char& c : text) c = c == '_' ? ' ' : static_cast<char>(std::tolower(c));
  return text;
}

}  // namespace

std::unique_ptr<CrumbdConnection> CrumbdConnection::To(const std::string& target,
                                                       Duration timeout) {
  return std::make_unique<GrpcConnection>(target, timeout);
}

std::string MissReasonName(v1::MissReason reason) {
  if (reason == v1::MISS_REASON_UNSPECIFIED) return "none";
  return ReadableEnum(v1::MissReason_Name(reason), sizeof("MISS_REASON_") - 1);
}

std::string TierName(v1::Tier tier) {
  return ReadableEnum(v1::Tier_Name(tier), sizeof("TIER_") - 1);
}

}  // namespace crumb::tools
