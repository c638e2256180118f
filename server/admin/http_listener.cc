// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/admin/http_listener.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "common/errno_status.h"
#include "common/executor.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "common/thread.h"
#include "server/base/handshakes.h"
#include "server/base/tcp_listener.h"

namespace crumb::server {
namespace {

constexpr std::string_view kHeadEnd = "\r\n\r\n";
// How long accepting pauses when descriptors have run out.
constexpr auto kAcceptPause = std::chrono::milliseconds(200);
// Connections that are accepted before the others' bytes are moved.
constexpr int kAcceptsAtOnce = 16;

struct Connection {
  enum class Phase : uint8_t { kReading, kHandling, kWriting, kLingering };
  UniqueFd socket;
  unsigned address = 0;
  Phase phase = Phase::kReading;
  std::string bytes;  // the head received so far, then the response
  size_t written = 0;
};

// A number for the remote address, as Handshakes counts by.
unsigned AddressOf(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  if (address.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr;
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  const std::string_view network(reinterpret_cast<const char*>(v6.s6_addr), 8);
  return static_cast<unsigned>(std::hash<std::string_view>()(network));
}

class PollHttpListener : public HttpListener {
 public:
  PollHttpListener(const Options& options, std::vector<UniqueFd> listeners, Handler handler,
                   Counter& closed)
      : options_(options),
        listeners_(std::move(listeners)),
        handler_(std::move(handler)),
        closed_(closed),
        places_(options.connections_max, std::min<Duration>(kGrace, options.timeout),
                options.timeout),
        pool_({"crumb-admin", options.threads, options.connections_max}) {}

  ~PollHttpListener() override {
    stopping_.store(true);
    Wake();
    thread_.Join();
    pool_.Stop();
  }

  absl::Status Open() {
    wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_.valid()) return ErrnoStatus(errno, "eventfd");
    thread_ = Thread("crumb-admin", [this] { Run(); });
    return absl::OkStatus();
  }

 private:
  void Wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  }

  void Run() {
    while (!stopping_.load()) {
      std::vector<pollfd> waiting = {{wake_.get(), POLLIN, 0}};
      const bool accepts = MayAccept(Clock::Real().Now());
      for (const UniqueFd& listener : listeners_) {
        waiting.push_back({listener.get(), static_cast<short>(accepts ? POLLIN : 0), 0});
      }
      std::vector<uint64_t> numbers;
      for (const auto& [number, connection] : connections_) {
        if (connection.phase == Connection::Phase::kHandling) continue;
        const bool writes = connection.phase == Connection::Phase::kWriting;
        waiting.push_back(
            {connection.socket.get(), static_cast<short>(writes ? POLLOUT : POLLIN), 0});
        numbers.push_back(number);
      }
      if (::poll(waiting.data(), waiting.size(), WaitMs(Clock::Real().Now())) < 0) continue;
      TakeResponses();
      const size_t first = 1 + listeners_.size();
      for (size_t i = 0; i < numbers.size(); ++i) {
        if (waiting[first + i].revents != 0) Move(numbers[i]);
      }
      while (const auto late = places_.Late(Clock::Real().Now())) Drop(*late);
      for (size_t i = 0; accepts && i < listeners_.size(); ++i) {
        if (waiting[1 + i].revents != 0) Accept(listeners_[i].get());
      }
    }
  }

  // Whether there is a place, or one can be made. Connections in kHandling and later have places
  // of their own, as many again: `places_` holds the others.
  bool MayAccept(TimePoint now) const {
    if (now < accept_again_ || handling_ >= options_.connections_max) return false;
    return !places_.full() || places_.NextToClose() <= now;
  }

  int WaitMs(TimePoint now) const {
    TimePoint next = places_.NextLate();
    if (accept_again_ > now) next = std::min(next, accept_again_);
    const TimePoint place = places_.NextToClose();
    if (places_.full() && place > now) next = std::min(next, place);
    if (next == TimePoint::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - now);
    return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
  }

  void Accept(int listener) {
    for (int accepted = 0; accepted < kAcceptsAtOnce && MayAccept(Clock::Real().Now());
         ++accepted) {
      UniqueFd socket = AcceptConnection(listener);
      if (!socket.valid()) {
        if (errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) {
          accept_again_ = Clock::Real().Now() + kAcceptPause;
        }
        return;
      }
      if (places_.full()) Drop(*places_.ToClose(Clock::Real().Now()));
      const uint64_t number = ++last_number_;
      Connection& connection = connections_[number];
      connection.address = AddressOf(socket.get());
      connection.socket = std::move(socket);
      places_.Add(number, connection.address, Clock::Real().Now());
      Move(number);  // the request has often come with the connection
    }
  }

  void Drop(uint64_t number) {
    const auto found = connections_.find(number);
    if (found->second.phase != Connection::Phase::kLingering) closed_.Add();
    Close(number);
  }
  void Close(uint64_t number) {
    places_.Remove(number);
    connections_.erase(number);
  }

  void Move(uint64_t number) {
    const auto found = connections_.find(number);
    if (found == connections_.end()) return;
    Connection& connection = found->second;
    if (connection.phase == Connection::Phase::kReading) return Read(number, connection);
    if (connection.phase == Connection::Phase::kWriting) return Write(number, connection);
    std::array<char, 16 << 10> discarded;
    const ssize_t size =
        ::recv(connection.socket.get(), discarded.data(), discarded.size(), MSG_DONTWAIT);
    if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR)) Close(number);
  }

  void Read(uint64_t number, Connection& connection) {
    std::array<char, 4096> buffer;
    const ssize_t size =
        ::recv(connection.socket.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size <= 0) return Drop(number);
    // The end may lie across two pieces.
    const size_t from = connection.bytes.size() - std::min<size_t>(connection.bytes.size(), 3);
    connection.bytes.append(buffer.data(), static_cast<size_t>(size));
    const size_t end = connection.bytes.find(kHeadEnd, from);
    if (end == std::string::npos) {
      if (connection.bytes.size() > kHeadBytesMax) Drop(number);
      return;
    }
    connection.bytes.resize(end + kHeadEnd.size());
    Begin(number, connection);
  }

  void Begin(uint64_t number, Connection& connection) {
    connection.phase = Connection::Phase::kHandling;
    places_.Remove(number);
    ++handling_;
    const bool queued = pool_.Submit([this, number, head = std::move(connection.bytes)] {
      std::string response = handler_(head);
      {
        MutexLock lock(&mutex_);
        responses_.emplace_back(number, std::move(response));
      }
      Wake();
    });
    if (queued) return;
    --handling_;
    Drop(number);
  }

  void TakeResponses() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t read = ::read(wake_.get(), &count, sizeof(count));
    std::vector<std::pair<uint64_t, std::string>> responses;
    {
      MutexLock lock(&mutex_);
      responses.swap(responses_);
    }
    for (auto& [number, response] : responses) {
      --handling_;
      Connection& connection = connections_.at(number);  // nothing drops one in kHandling
      connection.phase = Connection::Phase::kWriting;
      connection.bytes = std::move(response);
      // A number behind all others: Handshakes goes by age.
      auto node = connections_.extract(number);
      node.key() = ++last_number_;
      connections_.insert(std::move(node));
      places_.Add(last_number_, connection.address, Clock::Real().Now());
      Write(last_number_, connection);
    }
  }

  void Write(uint64_t number, Connection& connection) {
    const std::string_view rest = std::string_view(connection.bytes).substr(connection.written);
    const ssize_t size =
        ::send(connection.socket.get(), rest.data(), rest.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size < 0) return Drop(number);
    connection.written += static_cast<size_t>(size);
    if (connection.written < connection.bytes.size()) return;
    ::shutdown(connection.socket.get(), SHUT_WR);
    connection.phase = Connection::Phase::kLingering;
  }

  const Options options_;
  const std::vector<UniqueFd> listeners_;
  const Handler handler_;
  Counter& closed_;
  UniqueFd wake_;
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  std::vector<std::pair<uint64_t, std::string>> responses_ ABSL_GUARDED_BY(mutex_);
  // Used by the thread alone.
  std::unordered_map<uint64_t, Connection> connections_;
  Handshakes places_;  // connections in kReading
  size_t handling_ = 0;
  uint64_t last_number_ = 0;
  TimePoint accept_again_ = TimePoint::min();
  Executor pool_;
  Thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpListener>> HttpListener::Start(const Options& options,
                                                                  std::vector<UniqueFd> listeners,
                                                                  Handler handler,
                                                                  Counter& closed) {
  auto listener =
      std::make_unique<PollHttpListener>(options, std::move(listeners), std::move(handler), closed);
  CRUMB_RETURN_IF_ERROR(listener->Open());
  return listener;
}

}  // namespace crumb::server
