// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/fd_channel.h"
#include "common/fragment_header.h"
#include "common/mapping.h"
#include "crumb/v1/cache_service.grpc.pb.h"
#include "crumb/v1/call_socket.pb.h"
#include "crumb/v1/session.pb.h"
#include "grpcpp/grpcpp.h"

namespace crumb::server {

// Returns a pidfd of this process.
UniqueFd OwnPidfd();

// A worker as bare as can be: a session, its staging memory and slabs, and blocking calls. Fails
// hard (StatusOr::value) when crumbd does not respond; a refusal is in welcome().error().
class TestClient {
 public:
  static constexpr int kLayers = 2;
  static constexpr int kKvHeads = 2;
  static constexpr int kHeadDim = 64;
  static constexpr int kGroupSize = 32;

  TestClient(const std::string& fd_socket, const std::string& grpc_target,
             uint64_t staging_bytes = 1 << 20, const std::string& tenant_token = "");

  // Opens the keyspace {model} with the geometry above.
  grpc::Status OpenKeyspace(const std::string& model = "tiny");

  // A context with the session's token and a deadline of 20 seconds.
  std::unique_ptr<grpc::ClientContext> Context() const;

  // A page of `fill`, tiles and header.
  std::vector<std::byte> Fragment(const PageKey& key, uint8_t fill,
                                  const TileRange& range = {{0, kLayers}, {0, kKvHeads}}) const;

  // Reserve, write, Commit.
  grpc::Status Commit(const std::vector<std::byte>& fragment, v1::CommitResponse* response);
  // Calls over the session's socket for Reserve and Commit. REQUIRES: welcome().staging_socket().
  v1::SocketResponse CallOverSocket(const v1::SocketCall& call);
  grpc::Status Acquire(const std::string& keys, v1::AcquireResponse* response);
  grpc::Status Release(uint64_t lease);
  // Through Put and Get, without session.
  grpc::Status Put(const std::vector<std::vector<std::byte>>& fragments, v1::PutResponse* response);
  grpc::Status Get(const std::string& keys, std::vector<std::vector<std::byte>>* fragments,
                   v1::MissReason* miss_reason);

  // Bytes of one fragment of a response, as mapped.
  std::span<const std::byte> Mapped(const v1::Fragments& fragments, int index) const;
  // All slabs that this client maps, by number; takes those that crumbd has sent meanwhile.
  const std::map<uint32_t, Mapping>& Slabs();
  void ForgetSlab(uint32_t slab) { slabs_.erase(slab); }
  void ForgetSlabs() { slabs_.clear(); }
  // Descriptors of slabs that came, from the first call on.
  std::vector<UniqueFd>& KeepDescriptors() {
    keeps_ = true;
    return kept_;
  }

  static PageKey Key(int number);
  static std::string Keys(int first, int count);

  v1::CacheService::Stub& stub() { return *stub_; }
  const std::string& token() const { return token_; }  // the session's token, in hexadecimal
  const v1::OpenKeyspaceResponse& keyspace() const { return keyspace_; }
  const v1::SessionWelcome& welcome() const { return welcome_; }
  uint32_t tiles_bytes() const { return kLayers * kKvHeads * keyspace_.int2_tile_bytes(); }
  size_t fragment_bytes() const {
    return FragmentBytes(kLayers * kKvHeads, keyspace_.int2_tile_bytes());
  }
  Mapping& staging() { return staging_; }
  void CloseSocket() { socket_.Reset(); }

 private:
  UniqueFd socket_;
  UniqueFd staging_socket_;
  v1::SessionWelcome welcome_;
  std::string token_;
  const std::string tenant_token_;
  Mapping staging_;
  std::map<uint32_t, Mapping> slabs_;
  bool keeps_ = false;
  std::vector<UniqueFd> kept_;
  std::unique_ptr<v1::CacheService::Stub> stub_;
  v1::OpenKeyspaceResponse keyspace_;
};

}  // namespace crumb::server
