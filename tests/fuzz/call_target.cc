// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Both ends of a call socket (docs/adr/0014-calls-without-grpc.md). The first byte says which end
// is tried, and whether questions name a keyspace that is open; behind it stand messages, each
// after its size in two bytes.
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
constexpr auto kPatience = std::chrono::seconds(60);
constexpr uint64_t kAsked = 7;  // the request that the client asks

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

  void Ask(const std::vector<std::string>& messages, bool open_keyspace);
  // A question that is answered one page.
  v1::SocketCall Right(uint64_t request) const;

 private:
  using Asked = std::map<uint64_t, size_t>;  // keys by request, the most of one

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
  const size_t keys = call.acquire().keys().size() / sizeof(PageKey);
  size_t& most = asked[call.acquire().request()];
  most = std::max(most, keys);
  if (!open_keyspace || !call.has_acquire()) return message;
  call.mutable_acquire()->set_keyspace(std::string(keyspace_->id.view()));
  return call.SerializeAsString();
}

void Questions::ReadAnswers(int socket, const Asked& asked) const {
  for (std::string message; Receive(socket, &message);) {
    v1::SocketAnswer answer;
    Check(answer.ParseFromString(message));
    const auto question = asked.find(answer.request());
    Check(question != asked.end() && answer.request() != 0);
    Check(answer.code() == 0 || !answer.has_acquire());
    Check(answer.acquire().hit_pages() <= question->second);
    Check((answer.acquire().lease() != 0) == (answer.acquire().hit_pages() > 0));
  }
}

void Questions::Ask(const std::vector<std::string>& messages, bool open_keyspace) {
  const auto sockets = server::CallSockets::Start(context_).value();
  const auto session = OpenSession();
  const auto closing = std::make_shared<OwnerTasks>(OwnerTasks::Options{.name = "closing"});
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
  v1::SocketAnswer answer;
  Check(Send(other.socket.get(), Right(UINT64_MAX).SerializeAsString()));
  Check(Receive(other.socket.get(), &message) && answer.ParseFromString(message));
  Check(answer.request() == UINT64_MAX && answer.acquire().hit_pages() == 1);
  sockets->Stop();
  sessions_.End(session);
  Check(store_.Stats().leases == 0);
}

// A client that has asked kAsked reads `messages` and the end behind them.
void Answer(const std::vector<std::string>& messages) {
  int ends[2];
  Check(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd crumbd(ends[0]);
  client::CallSocket calls{UniqueFd(ends[1])};
  v1::SocketAnswer expected;
  bool decided = false;  // by an answer, or by a message that is none
  for (const std::string& message : messages) {
    if (!Send(crumbd.get(), message)) break;
    if (decided) continue;
    v1::SocketAnswer answer;
    const bool sound = !message.empty() && answer.ParseFromString(message);
    decided = !sound || answer.request() == kAsked;
    if (sound && decided) expected = answer;
  }
  ::shutdown(crumbd.get(), SHUT_WR);

  v1::AcquireRequest request;
  request.set_request(kAsked);
  v1::AcquireResponse response;
  client::CallSocket::ResponseFlags extent;
  const auto call = calls.Start(request, Clock::Real().Now() + kPatience, &response, &extent);
  Check(call != nullptr);
  const absl::Status status = call->Finish();
  if (expected.request() != kAsked) {
    Check(absl::IsUnavailable(status));
    Check(calls.Start(request, Clock::Real().Now() + kPatience, &response, &extent) == nullptr);
    return;
  }
  Check(status.ok() == (expected.code() == 0));
  if (!status.ok()) return;
  Check(response.SerializeAsString() == expected.acquire().SerializeAsString());
  Check(extent.fragments_apart == expected.fragments_apart());
}

void Run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto first = static_cast<unsigned>(input[0]);
  const std::vector<std::string> messages = Split(TextOf(input.subspan(1)));
  if ((first & kClientBit) != 0) return Answer(messages);
  Questions().Ask(messages, (first & kOpenKeyspaceBit) != 0);
}

std::string AnswerSeed() {
  v1::SocketAnswer late;
  late.set_request(kAsked - 1);
  late.mutable_acquire()->set_lease(3);
  v1::SocketAnswer answer;
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
  v1::SocketAnswer refusal;
  refusal.set_request(kAsked);
  refusal.set_code(8);
  refusal.set_error("full");
  refusal.set_fragments_apart(true);
  return Join(kClientBit, {refusal.SerializeAsString()});
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
  return {
      Join(kOpenKeyspaceBit, {questions.Right(1).SerializeAsString()}),
      Join(kOpenKeyspaceBit, {questions.Right(1).SerializeAsString(), ranged.SerializeAsString(),
                              joining.SerializeAsString(), questions.Right(1).SerializeAsString()}),
      Join(0, {questions.Right(4).SerializeAsString()}), AnswerSeed(), RefusalSeed()};
}

}  // namespace

const FuzzTarget kCallTarget = {"call", Run, Seeds};

}  // namespace crumb::fuzz
