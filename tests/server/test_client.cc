// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/server/test_client.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "common/crc32c.h"
#include "common/hex.h"

namespace crumb::server {

UniqueFd OwnPidfd() { return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0))); }

TestClient::TestClient(const std::string& fd_socket, const std::string& grpc_target,
                       uint64_t staging_bytes, const std::string& tenant_token)
    : socket_(ConnectFdChannel(fd_socket).value()), tenant_token_(tenant_token) {
  v1::SessionHello hello;
  hello.set_protocol_version(1);
  hello.set_process_name("test");
  hello.set_staging_bytes(staging_bytes);
  hello.set_tenant_token(tenant_token);
  hello.set_slab_grants(true);
  hello.set_staging_socket(true);
  const UniqueFd pidfd = OwnPidfd();
  const int fds[] = {pidfd.get()};
  SendFdMessage(socket_.get(), hello.SerializeAsString(), fds).IgnoreError();
  FdMessage message = ReceiveFdMessage(socket_.get()).value();
  welcome_.ParseFromString(message.bytes);
  token_ = HexEncode(
      {reinterpret_cast<const uint8_t*>(welcome_.token().data()), welcome_.token().size()});
  size_t next = 0;
  if (welcome_.staging_bytes() > 0) {
    staging_ = Mapping::Of(message.fds.at(next++).get(), welcome_.staging_bytes(),
                           Mapping::Access::kReadWrite)
                   .value();
  }
  for (uint32_t slab = 0; slab < welcome_.slab_count(); ++next, ++slab) {
    slabs_.emplace(slab, Mapping::Of(message.fds.at(next).get(), welcome_.slab_bytes(),
                                     Mapping::Access::kReadOnly)
                             .value());
  }
  if (welcome_.staging_socket()) staging_socket_ = std::move(message.fds.at(next));
  stub_ = v1::CacheService::NewStub(
      grpc::CreateChannel(grpc_target, grpc::InsecureChannelCredentials()));
}

std::unique_ptr<grpc::ClientContext> TestClient::Context() const {
  auto context = std::make_unique<grpc::ClientContext>();
  if (!token_.empty()) context->AddMetadata("crumb-session", token_);
  if (!tenant_token_.empty()) context->AddMetadata("authorization", "Bearer " + tenant_token_);
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  return context;
}

grpc::Status TestClient::OpenKeyspace(const std::string& model) {
  v1::OpenKeyspaceRequest request;
  (*request.mutable_fields())["model"] = model;
  (*request.mutable_fields())["format"] = "int2";
  request.set_layers(kLayers);
  request.set_kv_heads(kKvHeads);
  request.set_head_dim(kHeadDim);
  request.set_group_size(kGroupSize);
  return stub_->OpenKeyspace(Context().get(), request, &keyspace_);
}

std::vector<std::byte> TestClient::Fragment(const PageKey& key, uint8_t fill,
                                            const TileRange& range) const {
  FragmentHeader header;
  header.tile_bytes = keyspace_.int2_tile_bytes();
  header.generation = keyspace_.generation();
  header.keyspace = KeyspaceId::FromBytes(keyspace_.keyspace()).value();
  header.key = key;
  header.range = range;
  std::vector<std::byte> fragment(FragmentBytes(range.tiles(), header.tile_bytes), std::byte{fill});
  for (int tile = 0; tile < header.range.tiles(); ++tile) {
    header.tile_sums.push_back(Crc32c(std::span(fragment).subspan(
        static_cast<size_t>(tile) * header.tile_bytes, header.tile_bytes)));
  }
  const auto tiles_bytes = FragmentTilesBytes(range.tiles(), header.tile_bytes);
  EncodeFragmentHeader(header, std::span(fragment).subspan(tiles_bytes));
  return fragment;
}

v1::SocketResponse TestClient::CallOverSocket(const v1::SocketCall& call) {
  SendFdMessage(staging_socket_.get(), call.SerializeAsString(), {}).IgnoreError();
  v1::SocketResponse reply;
  reply.ParseFromString(ReceiveFdMessage(staging_socket_.get()).value().bytes);
  return reply;
}

grpc::Status TestClient::Commit(const std::vector<std::byte>& fragment,
                                v1::CommitResponse* response) {
  v1::ReserveRequest reserve;
  reserve.set_count(1);
  reserve.set_fragment_bytes(fragment.size());
  v1::ReserveResponse room;
  const grpc::Status reserved = stub_->Reserve(Context().get(), reserve, &room);
  if (!reserved.ok()) return reserved;
  if (room.offsets_size() != 1) return {grpc::StatusCode::RESOURCE_EXHAUSTED, "staging is full"};
  std::memcpy(staging_.data() + room.offsets(0), fragment.data(), fragment.size());
  v1::CommitRequest commit;
  commit.set_keyspace(keyspace_.keyspace());
  commit.add_offsets(room.offsets(0));
  commit.add_header_offsets(tiles_bytes());
  return stub_->Commit(Context().get(), commit, response);
}

grpc::Status TestClient::Acquire(const std::string& keys, v1::AcquireResponse* response) {
  v1::AcquireRequest request;
  request.set_keyspace(keyspace_.keyspace());
  request.set_keys(keys);
  request.set_wait_ms(10'000);
  return stub_->Acquire(Context().get(), request, response);
}

grpc::Status TestClient::Release(uint64_t lease) {
  v1::ReleaseRequest request;
  request.add_leases(lease);
  v1::ReleaseResponse response;
  return stub_->Release(Context().get(), request, &response);
}

grpc::Status TestClient::Put(const std::vector<std::vector<std::byte>>& fragments,
                             v1::PutResponse* response) {
  const auto context = Context();
  const auto stream = stub_->Put(context.get(), response);
  for (const std::vector<std::byte>& fragment : fragments) {
    const auto* bytes = reinterpret_cast<const char*>(fragment.data());
    v1::PutRequest request;
    request.set_keyspace(keyspace_.keyspace());
    int tiles = 1;
    while (FragmentBytes(tiles, keyspace_.int2_tile_bytes()) < fragment.size()) ++tiles;
    const size_t tiles_end = FragmentTilesBytes(tiles, keyspace_.int2_tile_bytes());
    request.set_header(bytes + tiles_end, fragment.size() - tiles_end);
    request.set_tiles(bytes, tiles_end / 3);
    stream->Write(request);
    v1::PutRequest rest;
    rest.set_tiles(bytes + tiles_end / 3, tiles_end - tiles_end / 3);
    stream->Write(rest);
  }
  stream->WritesDone();
  return stream->Finish();
}

grpc::Status TestClient::Get(const std::string& keys,
                             std::vector<std::vector<std::byte>>* fragments,
                             v1::MissReason* miss_reason) {
  v1::GetRequest request;
  request.set_keyspace(keyspace_.keyspace());
  request.set_keys(keys);
  request.set_wait_ms(10'000);
  const auto context = Context();
  const auto stream = stub_->Get(context.get(), request);
  v1::GetResponse part;
  std::string header;
  std::string tiles;
  const auto append = [](std::vector<std::byte>& to, const std::string& from) {
    const auto bytes = std::as_bytes(std::span(from));
    to.insert(to.end(), bytes.begin(), bytes.end());
  };
  while (stream->Read(&part)) {
    if (part.miss_reason() != v1::MISS_REASON_UNSPECIFIED) *miss_reason = part.miss_reason();
    if (!part.header().empty()) {
      header = part.header();
      tiles.clear();
    }
    tiles += part.tiles();
    if (tiles.size() != tiles_bytes()) continue;
    append(fragments->emplace_back(), tiles + header);
    tiles.clear();
  }
  return stream->Finish();
}

const std::map<uint32_t, Mapping>& TestClient::Slabs() {
  pollfd waiting{socket_.get(), POLLIN, 0};
  while (::poll(&waiting, 1, 0) == 1) {
    FdMessage message = ReceiveFdMessage(socket_.get()).value();
    v1::SlabGrant grant;
    grant.ParseFromString(message.bytes);
    slabs_[grant.slab()] =
        Mapping::Of(message.fds.at(0).get(), grant.bytes(), Mapping::Access::kReadOnly).value();
    if (keeps_) kept_.push_back(std::move(message.fds[0]));
  }
  return slabs_;
}

std::span<const std::byte> TestClient::Mapped(const v1::Fragments& fragments, int index) const {
  return slabs_.at(fragments.slabs(index))
      .bytes()
      .subspan(fragments.offsets(index), fragment_bytes());
}

PageKey TestClient::Key(int number) {
  PageKey key;
  std::memcpy(key.bytes.data(), &number, sizeof(number));
  key.bytes[31] = 1;
  return key;
}

std::string TestClient::Keys(int first, int count) {
  std::string keys;
  for (int i = first; i < first + count; ++i) keys += Key(i).view();
  return keys;
}

}  // namespace crumb::server
