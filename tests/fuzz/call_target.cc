// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Both ends of a call socket (docs/adr/0014-calls-without-grpc.md). The first byte says which end
// is tried and with which call, whether requests name a keyspace that is open, and whether
// crumbd's thread copies small Commits; behind it stand messages, each after its size in two bytes.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "client/rpc/call_socket.h"
#include "server/calls/call_sockets.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/server/call_fixture.h"

namespace crumb::fuzz {
namespace {

constexpr unsigned kClientBit = 1;
constexpr unsigned kOpenKeyspaceBit = 2;
constexpr unsigned kCopiesBit = 4;
// The call that the client makes: an Acquire without these bits.
constexpr unsigned kReserveBit = 8;
constexpr unsigned kCommitBit = 16;
constexpr auto kPatience = std::chrono::seconds(60);
// The number of the client's call: a CallSocket numbers its Reserves and Commits from 1.
constexpr uint64_t kCallNumber = 1;

std::vector<std::string> Split(const std::string& bytes) {
  std::vector<std::string> messages;
  for (size_t at = 0; at + 2 <= bytes.size();) {
    const size_t size = static_cast<uint8_t>(bytes[at]) | static_cast<uint8_t>(bytes[at + 1]) << 8;
    messages.push_back(bytes.substr(at + 2, size));
    at += 2 + size;
  }
  return messages;
}

std::string Join(unsigned first, const std::vector<std::string>& messages) {
  std::string input(1, static_cast<char>(first));
  for (const std::string& message : messages) {
    input += {static_cast<char>(message.size() & 255), static_cast<char>(message.size() >> 8)};
    input += message;
  }
  return input;
}

// False: the other end has closed, or does not read.
bool Send(int socket, const std::string& message) {
  return ::send(socket, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
}

// False: the end.
bool Receive(int socket, std::string* message) {
  pollfd waiting{socket, POLLIN, 0};
  Check(::poll(&waiting, 1, std::chrono::milliseconds(kPatience).count()) == 1);
  message->resize(kCallMessageBytesMax);
  const ssize_t size = ::recv(socket, message->data(), message->size(), MSG_DONTWAIT);
  message->resize(static_cast<size_t>(std::max<ssize_t>(size, 0)));
  return size > 0;
}

// crumbd's end, over a store with one page.
class HostileCalls final : public server::CallFixture {
 public:
  HostileCalls() { Store(Key(1)); }
  void TestBody() override {}

  void Run(const std::vector<std::string>& messages, bool open_keyspace, bool copies);
  // An Acquire that gets one page.
  v1::SocketCall Right(uint64_t request) const;
  // A Reserve that gets one offset, and a Commit of that one.
  v1::SocketCall RightReserve(uint64_t request) const;
  v1::SocketCall RightCommit(uint64_t request) const;

 private:
  // The largest content that a response to one request number may have.
  struct Most {
    size_t keys = 0;
    size_t reserved = 0;
    size_t committed = 0;
  };
  using Limits = std::map<uint64_t, Most>;

  std::string Prepare(const std::string& message, bool open_keyspace, Limits& limits) const;
  void ReadResponses(int socket, const Limits& limits) const;
};

v1::SocketCall HostileCalls::Right(uint64_t request) const {
  v1::SocketCall call;
  call.set_timeout_us(std::chrono::microseconds(kPatience).count());
  call.mutable_acquire()->set_request(request);
  call.mutable_acquire()->set_keyspace(std::string(keyspace_->id.view()));
  call.mutable_acquire()->set_keys(Keys(1, 2));
  return call;
}

std::string HostileCalls::Prepare(const std::string& message, bool open_keyspace,
                                  Limits& limits) const {
  v1::SocketCall call;
  if (!call.ParseFromString(message)) return message;
  Most& most = limits[call.has_acquire() ? call.acquire().request() : call.request()];
  most.keys = std::max(most.keys, call.acquire().keys().size() / sizeof(PageKey));
  most.reserved = std::max<size_t>(most.reserved, call.reserve().count());
  most.committed = std::max(most.committed, static_cast<size_t>(call.commit().offsets_size()));
  if (!open_keyspace) return message;
  const std::string id(keyspace_->id.view());
  if (call.has_acquire()) call.mutable_acquire()->set_keyspace(id);
  if (call.has_reserve()) call.mutable_reserve()->set_keyspace(id);
  if (call.has_commit()) call.mutable_commit()->set_keyspace(id);
  return call.SerializeAsString();
}

void HostileCalls::ReadResponses(int socket, const Limits& limits) const {
  for (std::string message; Receive(socket, &message);) {
    v1::SocketResponse response;
    Check(response.ParseFromString(message));
    const auto limit = limits.find(response.request());
    Check(limit != limits.end() && response.request() != 0);
    Check(response.code() == 0 ||
          !(response.has_acquire() || response.has_reserve() || response.has_commit()));
    const Most& most = limit->second;
    Check(response.acquire().hit_pages() <= most.keys);
    Check(static_cast<size_t>(response.reserve().offsets_size()) <=
          std::min<size_t>(most.reserved, kCallFragmentsMax));
    Check(static_cast<size_t>(response.commit().outcomes_size()) <=
          std::min<size_t>(most.committed, kCallFragmentsMax));
    Check((response.acquire().lease() != 0) == (response.acquire().hit_pages() > 0));
  }
}

v1::SocketCall HostileCalls::RightReserve(uint64_t request) const {
  v1::SocketCall call;
  call.set_request(request);
  call.mutable_reserve()->set_count(1);
  call.mutable_reserve()->set_fragment_bytes(fragment_bytes());
  return call;
}

v1::SocketCall HostileCalls::RightCommit(uint64_t request) const {
  v1::SocketCall call;
  call.set_request(request);
  call.mutable_commit()->set_keyspace(std::string(keyspace_->id.view()));
  call.mutable_commit()->add_offsets(0);
  call.mutable_commit()->add_header_offsets(tiles_bytes());
  return call;
}

void HostileCalls::Run(const std::vector<std::string>& messages, bool open_keyspace, bool copies) {
  const auto sockets = server::CallSockets::Start(context_, {.copies = copies}).value();
  const auto session = OpenSession();
  const auto closing =
      std::make_shared<server::OwnerTasks>(server::OwnerTasks::Options{.name = "closing"});
  const auto hostile = sockets->Open(session, closing, "user").value();
  const auto other = sockets->Open(session, closing, "user").value();
  Limits limits;
  for (const std::string& message : messages) {
    if (!Send(hostile.socket.get(), Prepare(message, open_keyspace, limits))) break;
  }
  ::shutdown(hostile.socket.get(), SHUT_WR);
  ReadResponses(hostile.socket.get(), limits);
  // Other sessions get their responses nevertheless.
  std::string message;
  v1::SocketResponse response;
  Check(Send(other.socket.get(), Right(UINT64_MAX).SerializeAsString()));
  Check(Receive(other.socket.get(), &message) && response.ParseFromString(message));
  Check(response.request() == UINT64_MAX && response.acquire().hit_pages() == 1);
  sockets->Stop();
  sessions_.End(session);
  Check(store_.Stats().leases == 0);
  Check(session->staging() == nullptr);
}

// Makes the client's call, of the kind that the first byte's bits name.
std::unique_ptr<client::PendingCall> StartCall(client::CallSocket& calls, unsigned first,
                                               v1::SocketResponse* response) {
  v1::SocketCall call;
  if ((first & kReserveBit) != 0) {
    call.mutable_reserve();
  } else if ((first & kCommitBit) != 0) {
    call.mutable_commit();
  } else {
    call.mutable_acquire()->set_request(kCallNumber);
  }
  return calls.Start(call, Clock::Real().Now() + kPatience, response);
}

// A client whose call is kCallNumber reads `messages` and the end behind them.
void RunClient(const std::vector<std::string>& messages, unsigned first) {
  int ends[2];
  Check(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd crumbd(ends[0]);
  client::CallSocket calls{UniqueFd(ends[1])};
  v1::SocketResponse expected;
  bool decided = false;  // the response came, or a message that is none
  for (const std::string& message : messages) {
    if (!Send(crumbd.get(), message)) break;
    if (decided) continue;
    v1::SocketResponse response;
    const bool sound = !message.empty() && response.ParseFromString(message);
    decided = !sound || response.request() == kCallNumber;
    if (sound && decided) expected = response;
  }
  ::shutdown(crumbd.get(), SHUT_WR);

  v1::SocketResponse received;
  const auto call = StartCall(calls, first, &received);
  Check(call != nullptr);
  const absl::Status status = call->Finish();
  if (expected.request() != kCallNumber) {
    Check(absl::IsUnavailable(status));
    Check(StartCall(calls, first, &received) == nullptr);
    return;
  }
  Check(status.ok() == (expected.code() == 0));
  if (!status.ok()) return;
  Check(received.SerializeAsString() == expected.SerializeAsString());
}

void Run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto first = static_cast<unsigned>(input[0]);
  const std::vector<std::string> messages = Split(TextOf(input.subspan(1)));
  if ((first & kClientBit) != 0) return RunClient(messages, first);
  HostileCalls().Run(messages, (first & kOpenKeyspaceBit) != 0, (first & kCopiesBit) != 0);
}

std::string ResponseSeed() {
  v1::SocketResponse late;
  late.set_request(kCallNumber + 1);
  late.mutable_acquire()->set_lease(3);
  v1::SocketResponse response;
  response.set_request(kCallNumber);
  response.mutable_acquire()->set_hit_pages(2);
  response.mutable_acquire()->set_lease(5);
  for (const uint32_t page : {0, 1}) {
    response.mutable_acquire()->add_page_tiers(v1::TIER_HOST);
    response.mutable_acquire()->mutable_fragments()->add_pages(page);
    response.mutable_acquire()->mutable_fragments()->add_offsets(4096 * page);
  }
  return Join(kClientBit, {late.SerializeAsString(), response.SerializeAsString()});
}

std::string RefusalSeed() {
  v1::SocketResponse refusal;
  refusal.set_request(kCallNumber);
  refusal.set_code(8);
  refusal.set_error("full");
  refusal.set_fragments_apart(true);
  return Join(kClientBit, {refusal.SerializeAsString()});
}

std::vector<std::string> StagingSeeds(const HostileCalls& hostile) {
  v1::SocketResponse late;
  late.set_request(kCallNumber + 1);
  late.mutable_reserve()->add_offsets(512);
  v1::SocketResponse reserved;
  reserved.set_request(kCallNumber);
  reserved.mutable_reserve()->add_offsets(1024);
  v1::SocketResponse committed;
  committed.set_request(kCallNumber);
  committed.mutable_commit()->add_outcomes(v1::COMMIT_OUTCOME_STORED);
  committed.mutable_commit()->set_flush_mark(3);
  v1::SocketCall keys = hostile.RightReserve(7);
  keys.mutable_reserve()->set_keyspace(std::string(32, 'k'));
  keys.mutable_reserve()->set_keys(std::string(64, 'p'));
  const std::vector<std::string> put = {hostile.RightReserve(5).SerializeAsString(),
                                        hostile.RightCommit(6).SerializeAsString()};
  return {Join(kOpenKeyspaceBit, put), Join(kOpenKeyspaceBit | kCopiesBit, put),
          Join(kOpenKeyspaceBit, {keys.SerializeAsString(), put[1], put[1]}),
          Join(kClientBit | kReserveBit, {late.SerializeAsString(), reserved.SerializeAsString()}),
          Join(kClientBit | kCommitBit, {committed.SerializeAsString()})};
}

std::vector<std::string> Seeds() {
  const HostileCalls hostile;
  v1::SocketCall ranged = hostile.Right(2);
  ranged.mutable_acquire()->mutable_range()->set_layer_end(2);
  ranged.mutable_acquire()->mutable_range()->set_head_end(1);
  ranged.mutable_acquire()->set_first_page(32);
  ranged.mutable_acquire()->set_run(std::string(32, 'r'));
  v1::SocketCall joining = hostile.Right(3);
  joining.mutable_acquire()->set_lease(1);
  joining.mutable_acquire()->add_pools(std::string(16, 'p'));
  joining.mutable_acquire()->set_window_tokens(256);
  std::vector<std::string> seeds = {
      Join(kOpenKeyspaceBit, {hostile.Right(1).SerializeAsString()}),
      Join(kOpenKeyspaceBit, {hostile.Right(1).SerializeAsString(), ranged.SerializeAsString(),
                              joining.SerializeAsString(), hostile.Right(1).SerializeAsString()}),
      Join(0, {hostile.Right(4).SerializeAsString()}), ResponseSeed(), RefusalSeed()};
  for (std::string& seed : StagingSeeds(hostile)) seeds.push_back(std::move(seed));
  return seeds;
}

}  // namespace

const FuzzTarget kCallTarget = {"call", Run, Seeds};

}  // namespace crumb::fuzz
