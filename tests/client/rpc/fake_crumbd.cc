// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "fake_crumbd.h"

#include <sys/socket.h>

#include <array>
#include <cstring>
#include <utility>

#include "common/call_message.h"
#include "common/clock.h"
#include "common/fd_channel.h"
#include "common/hex.h"
#include "common/keyspace.h"
#include "common/status_macros.h"
#include "crumb/v1/call_socket.pb.h"
#include "crumb/v1/session.pb.h"
#include "gtest/gtest.h"
#include "kernels/tile.h"

namespace crumb::client {
namespace {

constexpr uint64_t kSlabBytes = 64 << 20;

uint64_t RoundUp(uint64_t bytes) { return (bytes + 511) / 512 * 512; }

KeyspaceId IdOf(const std::string& bytes) { return KeyspaceId::FromBytes(bytes).value(); }

PageKey KeyAt(const std::string& keys, size_t index) {
  return PageKey::FromBytes(std::string_view(keys).substr(index * 32, 32)).value();
}

}  // namespace

std::unique_ptr<FakeCrumbd> FakeCrumbd::Start(const std::string& dir, uint64_t epoch) {
  std::unique_ptr<FakeCrumbd> fake(new FakeCrumbd(dir, epoch));
  const absl::Status status = fake->Listen();
  EXPECT_TRUE(status.ok()) << status;
  return fake;
}

absl::Status FakeCrumbd::Listen() {
  CRUMB_ASSIGN_OR_RETURN(slab_fd_, CreateMemfd("fake-slab", kSlabBytes));
  CRUMB_ASSIGN_OR_RETURN(slab_,
                         Mapping::Of(slab_fd_.get(), kSlabBytes, Mapping::Access::kReadWrite));
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + dir_ + "/crumbd.sock", grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::InternalError("the fake's gRPC server does not start");
  CRUMB_ASSIGN_OR_RETURN(listener_, ListenFdChannel(dir_ + "/crumbd.fd.sock"));
  accept_thread_ = Thread("fake-accept", [this] { Accept(); });
  return absl::OkStatus();
}

FakeCrumbd::~FakeCrumbd() {
  stopping_ = true;
  ::shutdown(listener_.get(), SHUT_RDWR);
  accept_thread_.Join();
  for (const UniqueFd& socket : calls_) ::shutdown(socket.get(), SHUT_RDWR);
  call_threads_.clear();
  ::unlink((dir_ + "/crumbd.fd.sock").c_str());
  BreakStreams();
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

void FakeCrumbd::Accept() {
  while (!stopping_) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (socket.valid() && !stopping_) Welcome(std::move(socket)).IgnoreError();
  }
}

absl::Status FakeCrumbd::Welcome(UniqueFd socket) {
  CRUMB_ASSIGN_OR_RETURN(const FdMessage message, ReceiveFdMessage(socket.get()));
  v1::SessionHello hello;
  v1::SessionWelcome welcome;
  if (!hello.ParseFromString(message.bytes) || message.fds.size() != 1) {
    return absl::InvalidArgumentError("no hello");
  }
  if (refuse_hello) {
    welcome.set_error("the fake refuses");
    return SendFdMessage(socket.get(), welcome.SerializeAsString(), {});
  }
  CRUMB_ASSIGN_OR_RETURN(const UniqueFd staging_fd,
                         CreateMemfd("fake-staging", hello.staging_bytes()));
  Room room;
  CRUMB_ASSIGN_OR_RETURN(room.staging, Mapping::Of(staging_fd.get(), hello.staging_bytes(),
                                                   Mapping::Access::kReadWrite));
  const size_t calls_before = calls_.size();
  std::vector<UniqueFd> calls;
  if (call_sockets && hello.call_socket()) {
    CRUMB_ASSIGN_OR_RETURN(calls.emplace_back(), OpenCalls());
    welcome.set_call_socket(true);
  }
  if (staging_sockets && hello.staging_socket()) {
    CRUMB_ASSIGN_OR_RETURN(calls.emplace_back(), OpenCalls());
    welcome.set_staging_socket(true);
  }
  MutexLock lock(&mutex_);
  std::string token(16, '\0');
  const uint64_t id = ++last_id_;
  std::memcpy(token.data(), &id, sizeof(id));
  welcome.set_token(token);
  room.engine = hello.engine().empty() ? token : hello.engine();
  welcome.set_engine(room.engine);
  welcome.set_epoch(epoch_);
  welcome.set_slab_bytes(kSlabBytes);
  welcome.set_slab_count(1);
  welcome.set_staging_bytes(hello.staging_bytes());
  std::vector<int> fds = {staging_fd.get(), slab_fd_.get()};
  for (const UniqueFd& end : calls) fds.push_back(end.get());
  CRUMB_RETURN_IF_ERROR(SendFdMessage(socket.get(), welcome.SerializeAsString(), fds));
  room.socket = std::move(socket);
  const auto* bytes = reinterpret_cast<const uint8_t*>(token.data());
  const std::string session = HexEncode({bytes, token.size()});
  sessions_[session] = std::move(room);
  for (size_t i = calls_before; i < calls_.size(); ++i) {
    call_threads_.emplace_back("fake-calls", [this, session, responding = calls_[i].get()] {
      RespondToCalls(session, responding);
    });
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> FakeCrumbd::OpenCalls() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::InternalError("socketpair");
  }
  calls_.emplace_back(ends[0]);
  return UniqueFd(ends[1]);
}

void FakeCrumbd::RespondToCalls(const std::string& session, int socket) {
  std::vector<char> bytes(kCallMessageBytesMax);
  while (true) {
    const ssize_t size = ::recv(socket, bytes.data(), bytes.size(), 0);
    v1::SocketCall call;
    if (size <= 0 || !call.ParseFromArray(bytes.data(), static_cast<int>(size))) return;
    v1::SocketResponse response;
    response.set_request(call.has_acquire() ? call.acquire().request() : call.request());
    if (call.has_acquire()) {
      RespondToAcquire(session, call.acquire(), &response);
    } else {
      ++staging_calls_;
      MutexLock lock(&mutex_);
      while (block_commit && call.has_commit() && !stopping_) {
        changed_.WaitUntil(&mutex_, Clock::Real().Now() + std::chrono::milliseconds(1));
      }
      Room& room = sessions_[session];
      if (call.has_reserve()) ReserveLocked(room, call.reserve(), response.mutable_reserve());
      if (call.has_commit()) CommitLocked(room, call.commit(), response.mutable_commit());
    }
    const std::string encoded = response.SerializeAsString();
    ::send(socket, encoded.data(), encoded.size(), MSG_NOSIGNAL);
  }
}

void FakeCrumbd::RespondToAcquire(const std::string& session, const v1::AcquireRequest& request,
                                  v1::SocketResponse* response) {
  ++acquires_;
  ++socket_calls_;
  MutexLock lock(&mutex_);
  while (block_acquire && !stopping_) {
    changed_.WaitUntil(&mutex_, Clock::Real().Now() + std::chrono::milliseconds(1));
  }
  AcquireLocked(sessions_[session], request, response->mutable_acquire());
  if (!fragments_apart) return;
  response->mutable_acquire()->clear_fragments();
  response->set_fragments_apart(true);
}

FakeCrumbd::Room* FakeCrumbd::Find(Context* context) {
  const auto& metadata = context->client_metadata();
  const auto token = metadata.find("crumb-session");
  if (token == metadata.end()) return nullptr;
  const auto found = sessions_.find(std::string(token->second.data(), token->second.size()));
  return found == sessions_.end() ? nullptr : &found->second;
}

grpc::Status FakeCrumbd::OpenKeyspace(Context*, const v1::OpenKeyspaceRequest* request,
                                      v1::OpenKeyspaceResponse* response) {
  KeyspaceDescription description;
  for (const auto& [name, value] : request->fields()) {
    if (!description.Set(name, value).ok()) return {grpc::StatusCode::INVALID_ARGUMENT, name};
  }
  const kernels::TileShape shape{.tokens = 64,
                                 .head_dim = static_cast<int>(request->head_dim()),
                                 .group_size = static_cast<int>(request->group_size())};
  response->set_keyspace(std::string(description.Id().view()));
  response->set_generation(generation);
  const bool int2 = description.fields().at("format") == "int2";
  response->set_state(int2 && bf16_only ? v1::KEYSPACE_STATE_BF16 : v1::KEYSPACE_STATE_ACTIVE);
  response->set_int2_tile_bytes(static_cast<uint32_t>(shape.int2_bytes()));
  response->set_bf16_tile_bytes(static_cast<uint32_t>(shape.bf16_bytes()));
  return grpc::Status::OK;
}

grpc::Status FakeCrumbd::SetKeyspaceState(Context*, const v1::SetKeyspaceStateRequest* request,
                                          v1::SetKeyspaceStateResponse*) {
  bf16_only = request->state() == v1::KEYSPACE_STATE_BF16;
  MutexLock lock(&mutex_);
  state_reason_ = request->who() + ": " + request->reason();
  return grpc::Status::OK;
}

void FakeCrumbd::WaitWhile(const std::atomic<bool>& blocked, Context* context) {
  MutexLock lock(&mutex_);
  while (blocked && !stopping_ && !context->IsCancelled()) {
    changed_.WaitUntil(&mutex_, Clock::Real().Now() + std::chrono::milliseconds(1));
  }
}

grpc::Status FakeCrumbd::Acquire(Context* context, const v1::AcquireRequest* request,
                                 v1::AcquireResponse* response) {
  ++acquires_;
  WaitWhile(block_acquire, context);
  MutexLock lock(&mutex_);
  if (Find(context) == nullptr) return {grpc::StatusCode::UNAUTHENTICATED, "no session"};
  if (request->lease() != 0) {
    Join(*Find(context), *request, response);
    return grpc::Status::OK;
  }
  AcquireLocked(*Find(context), *request, response);
  return grpc::Status::OK;
}

void FakeCrumbd::AcquireLocked(const Room& room, const v1::AcquireRequest& request,
                               v1::AcquireResponse* response) {
  Lease lease{.engine = room.engine, .pages = {}};
  for (size_t i = 0; i < request.keys().size() / 32; ++i) {
    const PageId id{IdOf(request.keyspace()), KeyAt(request.keys(), i)};
    if (device_pages_ > 0 || !AddPageTo(id, request, response)) break;
    lease.pages.push_back(id);
  }
  if (device_pages_ > 0) {
    response->set_hit_pages(device_pages_);
    *response->mutable_device_fragments() = device_fragments_;
  }
  if (response->hit_pages() > 0) {
    response->set_lease(++last_id_);
    if (forgotten_.erase(request.request()) == 0) leases_[last_id_] = std::move(lease);
    lease_of_request_[request.request()] = last_id_;
  }
}

bool FakeCrumbd::AddPageTo(const PageId& id, const v1::AcquireRequest& request,
                           v1::AcquireResponse* response) {
  const auto found = pages_.find(id);
  if (found == pages_.end()) {
    response->set_miss_reason(v1::MISS_REASON_ABSENT);
    return false;
  }
  const auto number = [](uint32_t value) { return static_cast<uint16_t>(value); };
  const v1::TileRange& range = request.range();
  TileRange wanted{{number(range.layer_begin()), number(range.layer_end())},
                   {number(range.head_begin()), number(range.head_end())}};
  if (!request.has_range()) wanted = found->second.front().header.range;
  int covered = 0;
  for (const Page& page : found->second) covered += Intersect(page.header.range, wanted).tiles();
  if (covered != wanted.tiles() && !claim_coverage) {
    response->set_miss_reason(v1::MISS_REASON_NOT_COVERED);
    return false;
  }
  v1::Fragments& fragments = *response->mutable_fragments();
  for (const Page& page : found->second) {
    if (Intersect(page.header.range, wanted).tiles() == 0) continue;
    fragments.add_pages(response->hit_pages());
    fragments.add_slabs(0);
    fragments.add_offsets(page.offset);
    fragments.add_header_offsets(page.tiles_bytes);
  }
  response->set_hit_pages(response->hit_pages() + 1);
  response->add_page_tiers(tier);
  return true;
}

void FakeCrumbd::Join(const Room& room, const v1::AcquireRequest& request,
                      v1::AcquireResponse* response) {
  const auto found = leases_.find(request.lease());
  if (found == leases_.end() || found->second.engine != room.engine) {
    response->set_miss_reason(v1::MISS_REASON_ABSENT);
    return;
  }
  for (const PageId& id : found->second.pages) {
    if (!AddPageTo(id, request, response)) break;
  }
  response->set_lease(request.lease());
  ++found->second.holders;
  ++joins_;
}

void FakeCrumbd::ReleaseOne(uint64_t lease) {
  const auto found = leases_.find(lease);
  if (found != leases_.end() && --found->second.holders == 0) leases_.erase(found);
}

grpc::Status FakeCrumbd::Release(Context*, const v1::ReleaseRequest* request,
                                 v1::ReleaseResponse*) {
  MutexLock lock(&mutex_);
  for (const uint64_t lease : request->leases()) ReleaseOne(lease);
  for (const uint64_t acquire : request->requests()) {
    const auto granted = lease_of_request_.find(acquire);
    if (granted == lease_of_request_.end()) {
      forgotten_.insert(acquire);
    } else {
      ReleaseOne(granted->second);
    }
  }
  return grpc::Status::OK;
}

grpc::Status FakeCrumbd::Reserve(Context* context, const v1::ReserveRequest* request,
                                 v1::ReserveResponse* response) {
  MutexLock lock(&mutex_);
  while (block_reserve && !stopping_) {
    changed_.WaitUntil(&mutex_, Clock::Real().Now() + std::chrono::milliseconds(1));
  }
  Room* room = Find(context);
  if (room == nullptr) return {grpc::StatusCode::UNAUTHENTICATED, "no session"};
  ReserveLocked(*room, *request, response);
  return grpc::Status::OK;
}

void FakeCrumbd::ReserveLocked(Room& room, const v1::ReserveRequest& request,
                               v1::ReserveResponse* response) {
  ++reserves_;
  if (no_staging_room || room.given_up.contains(request.request())) return;
  const uint64_t bytes = RoundUp(request.fragment_bytes());
  uint64_t offset = 0;
  // First fit between the reserved ranges.
  for (auto next = room.rooms.begin();
       response->offsets_size() < static_cast<int>(request.count());) {
    const uint64_t end = next == room.rooms.end() ? room.staging.size() : next->first;
    if (offset + bytes <= end) {
      room.rooms[offset] = {bytes, request.request()};
      response->add_offsets(offset);
      offset += bytes;
    } else if (next == room.rooms.end()) {
      break;
    } else {
      offset = next->first + next->second.bytes;
      ++next;
    }
  }
}

v1::CommitOutcome FakeCrumbd::CommitOne(Room& room, uint64_t offset, uint32_t tiles_bytes) {
  const auto reserved = room.rooms.find(offset);
  if (reserved == room.rooms.end() || refuse_commits) return v1::COMMIT_OUTCOME_REFUSED;
  const std::span<std::byte> staged = room.staging.bytes().subspan(offset, reserved->second.bytes);
  const auto header = DecodeFragmentHeader(staged.subspan(tiles_bytes));
  const bool sound = header.ok() && VerifyTileSums(*header, staged.first(tiles_bytes)).ok() &&
                     header->generation == generation;
  room.rooms.erase(reserved);
  if (!sound) return v1::COMMIT_OUTCOME_REFUSED;
  const PageId id{header->keyspace, header->key};
  if (slab_used_ + staged.size() > kSlabBytes) return v1::COMMIT_OUTCOME_NO_ROOM;
  int there = 0;
  for (const Page& page : pages_[id]) there += Intersect(page.header.range, header->range).tiles();
  if (there == header->range.tiles()) return v1::COMMIT_OUTCOME_DEDUPLICATED;
  if (there > 0) return v1::COMMIT_OUTCOME_REFUSED;  // crumbd would keep the missing tiles
  std::memcpy(slab_.data() + slab_used_, staged.data(), staged.size());
  pages_[id].push_back({slab_used_, tiles_bytes, *header});
  slab_used_ += staged.size();
  return v1::COMMIT_OUTCOME_STORED;
}

grpc::Status FakeCrumbd::Commit(Context* context, const v1::CommitRequest* request,
                                v1::CommitResponse* response) {
  WaitWhile(block_commit, context);
  MutexLock lock(&mutex_);
  Room* room = Find(context);
  if (room == nullptr) return {grpc::StatusCode::UNAUTHENTICATED, "no session"};
  CommitLocked(*room, *request, response);
  return grpc::Status::OK;
}

void FakeCrumbd::CommitLocked(Room& room, const v1::CommitRequest& request,
                              v1::CommitResponse* response) {
  for (int i = 0; i < request.offsets_size(); ++i) {
    response->add_outcomes(CommitOne(room, request.offsets(i), request.header_offsets(i)));
  }
}

grpc::Status FakeCrumbd::Abort(Context* context, const v1::AbortRequest* request,
                               v1::AbortResponse*) {
  WaitWhile(block_abort, context);
  MutexLock lock(&mutex_);
  Room* room = Find(context);
  if (room == nullptr) return {grpc::StatusCode::UNAUTHENTICATED, "no session"};
  for (int i = 0; i < request->offsets_size(); ++i) {
    const auto found = room->rooms.find(request->offsets(i));
    if (found == room->rooms.end()) continue;
    const bool named = i < request->reserves_size();
    if (!named || request->reserves(i) == found->second.request) room->rooms.erase(found);
  }
  for (const uint64_t number : request->requests()) {
    std::erase_if(room->rooms, [&](const auto& entry) { return entry.second.request == number; });
    room->given_up.insert(number);
  }
  ++aborts_;
  return grpc::Status::OK;
}

grpc::Status FakeCrumbd::Get(Context*, const v1::GetRequest* request,
                             grpc::ServerWriter<v1::GetResponse>* writer) {
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < request->keys().size() / 32; ++i) {
    v1::GetResponse message;
    const auto found = pages_.find({IdOf(request->keyspace()), KeyAt(request->keys(), i)});
    if (found == pages_.end()) {
      message.set_miss_reason(v1::MISS_REASON_ABSENT);
      writer->Write(message);
      break;
    }
    const std::span<std::byte> bytes = Bytes(found->second.front());
    const size_t tiles = found->second.front().tiles_bytes;
    const auto* text = reinterpret_cast<const char*>(bytes.data());
    message.set_page(static_cast<uint32_t>(i));
    message.set_tier(tier);
    message.set_header(std::string(text + tiles, bytes.size() - tiles));
    message.set_tiles(std::string(text, tiles / 2));
    writer->Write(message);
    v1::GetResponse rest;
    rest.set_tiles(std::string(text + tiles / 2, tiles - tiles / 2));
    writer->Write(rest);
  }
  return grpc::Status::OK;
}

grpc::Status FakeCrumbd::Put(Context*, grpc::ServerReader<v1::PutRequest>* reader,
                             v1::PutResponse* response) {
  v1::PutRequest message;
  std::string tiles;
  std::string header_bytes;
  while (reader->Read(&message)) {
    if (!message.header().empty()) header_bytes = message.header();
    tiles += message.tiles();
    const auto header = DecodeFragmentHeader(std::as_bytes(std::span(header_bytes)));
    if (!header.ok()) return {grpc::StatusCode::INVALID_ARGUMENT, "bad header"};
    if (tiles.size() < FragmentTilesBytes(header->range.tiles(), header->tile_bytes)) continue;
    const std::string bytes = tiles + header_bytes;
    MutexLock lock(&mutex_);
    std::memcpy(slab_.data() + slab_used_, bytes.data(), bytes.size());
    pages_[{header->keyspace, header->key}] = {
        {slab_used_, static_cast<uint32_t>(tiles.size()), *header}};
    slab_used_ += RoundUp(bytes.size());
    response->add_outcomes(v1::COMMIT_OUTCOME_STORED);
    tiles.clear();
  }
  return grpc::Status::OK;
}

grpc::Status FakeCrumbd::Session(
    Context* context, grpc::ServerReaderWriter<v1::SessionResponse, v1::SessionRequest>* stream) {
  {
    MutexLock lock(&mutex_);
    if (Find(context) == nullptr) return {grpc::StatusCode::UNAUTHENTICATED, "no session"};
    streams_.insert(stream);
    stream_contexts_.insert(context);
  }
  v1::SessionRequest request;
  while (stream->Read(&request)) {
    const v1::SessionRequest::Counters& added = request.counters();
    MutexLock lock(&mutex_);
    counters_.set_used_tokens(counters_.used_tokens() + added.used_tokens());
    counters_.set_prefill_tokens_avoided(counters_.prefill_tokens_avoided() +
                                         added.prefill_tokens_avoided());
    counters_.set_publish_dropped_pages(counters_.publish_dropped_pages() +
                                        added.publish_dropped_pages());
    counters_.set_deadline_exceeded(counters_.deadline_exceeded() + added.deadline_exceeded());
    counters_.set_verify_failures(counters_.verify_failures() + added.verify_failures());
    counters_.set_windows_refused(counters_.windows_refused() + added.windows_refused());
    quality_samples_ += static_cast<size_t>(request.quality_size());
    for (const auto& sample : request.quality()) quality_layers_.insert(sample.layer());
  }
  MutexLock lock(&mutex_);
  streams_.erase(stream);
  stream_contexts_.erase(context);
  return grpc::Status::OK;
}

std::set<uint32_t> FakeCrumbd::quality_layers() const {
  MutexLock lock(&mutex_);
  return quality_layers_;
}

void FakeCrumbd::PushState(const KeyspaceId& keyspace, v1::KeyspaceState state) {
  v1::SessionResponse message;
  message.mutable_keyspace_state()->set_keyspace(std::string(keyspace.view()));
  message.mutable_keyspace_state()->set_state(state);
  MutexLock lock(&mutex_);
  for (auto* stream : streams_) stream->Write(message);
}

void FakeCrumbd::BreakStreams() {
  MutexLock lock(&mutex_);
  for (Context* context : stream_contexts_) context->TryCancel();
}

std::map<FakeCrumbd::PageId, FakeCrumbd::Page> FakeCrumbd::pages() const {
  MutexLock lock(&mutex_);
  std::map<PageId, Page> first;
  for (const auto& [id, fragments] : pages_) first[id] = fragments.front();
  return first;
}

std::vector<FakeCrumbd::Page> FakeCrumbd::fragments(const PageId& id) const {
  MutexLock lock(&mutex_);
  return pages_.at(id);
}

void FakeCrumbd::Drop(const PageId& id) {
  MutexLock lock(&mutex_);
  pages_.erase(id);
}

std::span<std::byte> FakeCrumbd::Bytes(const Page& page) const {
  return slab_.bytes().subspan(page.offset,
                               page.tiles_bytes + FragmentHeaderBytes(page.header.range.tiles()));
}

void FakeCrumbd::Swap(const PageId& a, const PageId& b) {
  MutexLock lock(&mutex_);
  std::swap(pages_.at(a), pages_.at(b));
}

void FakeCrumbd::Place(const PageId& id, const Page& page) {
  MutexLock lock(&mutex_);
  pages_[id] = {page};
}

void FakeCrumbd::PlaceOnDevices(uint32_t pages, const v1::DeviceFragments& fragments) {
  MutexLock lock(&mutex_);
  device_pages_ = pages;
  device_fragments_ = fragments;
}

size_t FakeCrumbd::leases() const {
  MutexLock lock(&mutex_);
  return leases_.size();
}

size_t FakeCrumbd::reservations() const {
  MutexLock lock(&mutex_);
  size_t count = 0;
  for (const auto& [token, room] : sessions_) count += room.rooms.size();
  return count;
}

size_t FakeCrumbd::sessions() const {
  MutexLock lock(&mutex_);
  size_t count = 0;
  for (const auto& [token, room] : sessions_) {
    char byte;
    count += ::recv(room.socket.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) != 0;
  }
  return count;
}

size_t FakeCrumbd::quality_samples() const {
  MutexLock lock(&mutex_);
  return quality_samples_;
}

std::string FakeCrumbd::state_reason() const {
  MutexLock lock(&mutex_);
  return state_reason_;
}

v1::SessionRequest::Counters FakeCrumbd::counters() const {
  MutexLock lock(&mutex_);
  return counters_;
}

}  // namespace crumb::client
