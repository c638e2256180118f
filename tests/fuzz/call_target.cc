// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Both ends of a call socket (docs/adr/0014-calls-without-grpc.md). The first byte says which end
// is tried and with which call, whether questions name a keyspace that is open, and whether
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
constexpr uint64_t kAsked = 1;

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
class Questions final : public server::CallFixture {
 public:
  Questions() { Store(Key(1)); }
  void TestBody() override {}

  void Ask(const std::vector<std::string>& messages, bool open_keyspace, bool copies);
  // A question that is answered one page.
  v1::SocketCall Right(uint64_t request) const;
  // A Reserve that is answered one offset, and a Commit of that one.
  v1::SocketCall RightReserve(uint64_t request) const;
  v1::SocketCall RightCommit(uint64_t request) const;

 private:
  // The most that an answer to one request number may hold.
  struct Most {
    size_t keys = 0;
    size_t reserved = 0;
    size_t committed = 0;
  };
  using Asked = std::map<uint64_t, Most>;

  std::string Prepare(const std::string& message, bool open_keyspace, Asked& asked) const;
  void ReadAnswers(int socket, const Asked& asked) const;
};

v1::SocketCall Questions::Right(uint64_t request) const {
  v1::SocketCall call;
  call.set_timeout_us(std::chrono::microseconds(kPatience).count());
  call.mutable_acquire()->set_request(request);
  call.mutable_acquire()->set_keyspace(std::string(keyspace_->id.view()));
  call.mutable_acquire()->set_keys(Keys(1, 2));
  return call;
}

std::string Questions::Prepare(const std::string& message, bool open_keyspace, Asked& asked) const {
  v1::SocketCall call;
  if (!call.ParseFromString(message)) return message;
  Most& most = asked[call.has_acquire() ? call.acquire().request() : call.request()];
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

void Questions::ReadAnswers(int socket, const Asked& asked) const {
  for (std::string message; Receive(socket, &message);) {
    v1::SocketResponse answer;
    Check(answer.ParseFromString(message));
    const auto question = asked.find(answer.request());
    Check(question != asked.end() && answer.request() != 0);
    Check(answer.code() == 0 ||
          !(answer.has_acquire() || answer.has_reserve() || answer.has_commit()));
    const Most& most = question->second;
    Check(answer.acquire().hit_pages() <= most.keys);
    Check(static_cast<size_t>(answer.reserve().offsets_size()) <=
          std::min<size_t>(most.reserved, kCallFragmentsMax));
    Check(static_cast<size_t>(answer.commit().outcomes_size()) <=
          std::min<size_t>(most.committed, kCallFragmentsMax));
    Check((answer.acquire().lease() != 0) == (answer.acquire().hit_pages() > 0));
  }
}

v1::SocketCall Questions::RightReserve(uint64_t request) const {
  v1::SocketCall call;
  call.set_request(request);
  call.mutable_reserve()->set_count(1);
  call.mutable_reserve()->set_fragment_bytes(fragment_bytes());
  return call;
}

v1::SocketCall Questions::RightCommit(uint64_t request) const {
  v1::SocketCall call;
  call.set_request(request);
  call.mutable_commit()->set_keyspace(std::string(keyspace_->id.view()));
  call.mutable_commit()->add_offsets(0);
  call.mutable_commit()->add_header_offsets(tiles_bytes());
  return call;
}

void Questions::Ask(const std::vector<std::string>& messages, bool open_keyspace, bool copies) {
  const auto sockets = server::CallSockets::Start(context_, {.copies = copies}).value();
  const auto session = OpenSession();
  const auto closing =
      std::make_shared<server::OwnerTasks>(server::OwnerTasks::Options{.name = "closing"});
  const auto hostile = sockets->Open(session, closing, "user").value();
  const auto other = sockets->Open(session, closing, "user").value();
  Asked asked;
  for (const std::string& message : messages) {
    if (!Send(hostile.socket.get(), Prepare(message, open_keyspace, asked))) break;
  }
  ::shutdown(hostile.socket.get(), SHUT_WR);
  ReadAnswers(hostile.socket.get(), asked);
  // Whatever came of it, others are answered.
  std::string message;
  v1::SocketResponse answer;
  Check(Send(other.socket.get(), Right(UINT64_MAX).SerializeAsString()));
  Check(Receive(other.socket.get(), &message) && answer.ParseFromString(message));
  Check(answer.request() == UINT64_MAX && answer.acquire().hit_pages() == 1);
  sockets->Stop();
  sessions_.End(session);
  Check(store_.Stats().leases == 0);
  Check(session->staging() == nullptr);
}

// Makes the client's call, of the kind that the first byte's bits name.
std::unique_ptr<client::PendingCall> StartCall(client::CallSocket& calls, unsigned first,
                                               v1::SocketResponse* answer) {
  v1::SocketCall call;
  if ((first & kReserveBit) != 0) {
    call.mutable_reserve();
  } else if ((first & kCommitBit) != 0) {
    call.mutable_commit();
  } else {
    call.mutable_acquire()->set_request(kAsked);
  }
  return calls.Start(call, Clock::Real().Now() + kPatience, answer);
}

// A client whose call is kAsked reads `messages` and the end behind them.
void Answer(const std::vector<std::string>& messages, unsigned first) {
  int ends[2];
  Check(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd crumbd(ends[0]);
  client::CallSocket calls{UniqueFd(ends[1])};
  v1::SocketResponse expected;
  bool decided = false;  // by an answer, or by a message that is none
  for (const std::string& message : messages) {
    if (!Send(crumbd.get(), message)) break;
    if (decided) continue;
    v1::SocketResponse answer;
    const bool sound = !message.empty() && answer.ParseFromString(message);
    decided = !sound || answer.request() == kAsked;
    if (sound && decided) expected = answer;
  }
  ::shutdown(crumbd.get(), SHUT_WR);

  v1::SocketResponse received;
  const auto call = StartCall(calls, first, &received);
  Check(call != nullptr);
  const absl::Status status = call->Finish();
  if (expected.request() != kAsked) {
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
  if ((first & kClientBit) != 0) return Answer(messages, first);
  Questions().Ask(messages, (first & kOpenKeyspaceBit) != 0, (first & kCopiesBit) != 0);
}

std::string AnswerSeed() {
  v1::SocketResponse late;
  late.set_request(kAsked + 1);
  late.mutable_acquire()->set_lease(3);
  v1::SocketResponse answer;
  answer.set_request(kAsked);
  answer.mutable_acquire()->set_hit_pages(2);
  answer.mutable_acquire()->set_lease(5);
  for (const uint32_t page : {0, 1}) {
    answer.mutable_acquire()->add_page_tiers(v1::TIER_HOST);
    answer.mutable_acquire()->mutable_fragments()->add_pages(page);
    answer.mutable_acquire()->mutable_fragments()->add_offsets(4096 * page);
  }
  return Join(kClientBit, {late.SerializeAsString(), answer.SerializeAsString()});
}

std::string RefusalSeed() {
  v1::SocketResponse refusal;
  refusal.set_request(kAsked);
  refusal.set_code(8);
  refusal.set_error("full");
  refusal.set_fragments_apart(true);
  return Join(kClientBit, {refusal.SerializeAsString()});
}

std::vector<std::string> StagingSeeds(const Questions& questions) {
  v1::SocketResponse late;
  late.set_request(kAsked + 1);
  late.mutable_reserve()->add_offsets(512);
  v1::SocketResponse reserved;
  reserved.set_request(kAsked);
  reserved.mutable_reserve()->add_offsets(1024);
  v1::SocketResponse committed;
  committed.set_request(kAsked);
  committed.mutable_commit()->add_outcomes(v1::COMMIT_OUTCOME_STORED);
  committed.mutable_commit()->set_flush_mark(3);
  v1::SocketCall keys = questions.RightReserve(7);
  keys.mutable_reserve()->set_keyspace(std::string(32, 'k'));
  keys.mutable_reserve()->set_keys(std::string(64, 'p'));
  const std::vector<std::string> put = {questions.RightReserve(5).SerializeAsString(),
                                        questions.RightCommit(6).SerializeAsString()};
  return {Join(kOpenKeyspaceBit, put), Join(kOpenKeyspaceBit | kCopiesBit, put),
          Join(kOpenKeyspaceBit, {keys.SerializeAsString(), put[1], put[1]}),
          Join(kClientBit | kReserveBit, {late.SerializeAsString(), reserved.SerializeAsString()}),
          Join(kClientBit | kCommitBit, {committed.SerializeAsString()})};
}

std::vector<std::string> Seeds() {
  const Questions questions;
  v1::SocketCall ranged = questions.Right(2);
  ranged.mutable_acquire()->mutable_range()->set_layer_end(2);
  ranged.mutable_acquire()->mutable_range()->set_head_end(1);
  ranged.mutable_acquire()->set_first_page(32);
  ranged.mutable_acquire()->set_run(std::string(32, 'r'));
  v1::SocketCall joining = questions.Right(3);
  joining.mutable_acquire()->set_lease(1);
  joining.mutable_acquire()->add_pools(std::string(16, 'p'));
  joining.mutable_acquire()->set_window_tokens(256);
  std::vector<std::string> seeds = {
      Join(kOpenKeyspaceBit, {questions.Right(1).SerializeAsString()}),
      Join(kOpenKeyspaceBit, {questions.Right(1).SerializeAsString(), ranged.SerializeAsString(),
                              joining.SerializeAsString(), questions.Right(1).SerializeAsString()}),
      Join(0, {questions.Right(4).SerializeAsString()}), AnswerSeed(), RefusalSeed()};
  for (std::string& seed : StagingSeeds(questions)) seeds.push_back(std::move(seed));
  return seeds;
}

}  // namespace

const FuzzTarget kCallTarget = {"call", Run, Seeds};

}  // namespace crumb::fuzz
