// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/loopback_transport.h"

#include <cstring>
#include <map>
#include <utility>

#include "common/mutex.h"
#include "common/status_macros.h"
#include "common/thread.h"
#include "transport/protocol.h"

namespace crumb::transport {
namespace {

class BytesArrival final : public Arrival {
 public:
  explicit BytesArrival(std::span<const std::byte> bytes) : bytes_(bytes) {}
  size_t size() const override { return bytes_.size(); }
  const std::byte* data() const override { return bytes_.data() ? bytes_.data() : &kNothing; }
  void Pull(std::vector<std::span<std::byte>>, Pulled pulled) override {
    pulled(absl::InternalError("the bytes are here"));
  }

 private:
  static constexpr std::byte kNothing{};
  const std::span<const std::byte> bytes_;
};

LoopbackNetwork::Frame Flatten(const OutgoingFrame& frame) {
  LoopbackNetwork::Frame flat;
  const FrameHeaderBytes header = EncodeFrameHeader(frame.header);
  flat.header.assign(header.begin(), header.end());
  flat.body = frame.body;
  for (const auto piece : frame.tiles)
    flat.body.insert(flat.body.end(), piece.begin(), piece.end());
  return flat;
}

}  // namespace

// One end of a connection, to which the other end posts from its thread.
struct LoopbackEnd {
  std::shared_ptr<Inbox> inbox;
  Protocol* protocol = nullptr;  // used only in tasks of the inbox, like `link`
  Link* link = nullptr;          // null after the link was destroyed
};

class LoopbackNetwork::State {
 public:
  void SetTap(Tap tap) {
    MutexLock lock(&mutex_);
    tap_ = std::move(tap);
  }
  std::vector<Frame> Pass(Frame frame) {
    Tap tap;
    {
      MutexLock lock(&mutex_);
      tap = tap_;
    }
    if (tap) return tap(std::move(frame));
    std::vector<Frame> frames;
    frames.push_back(std::move(frame));
    return frames;
  }
  absl::StatusOr<std::string> Bind(const std::string& listen, LoopbackTransport* transport);
  void Unbind(const std::string& address) {
    MutexLock lock(&mutex_);
    transports_.erase(address);
  }
  // Calls `accept` with the transport at `address`, which cannot be destroyed meanwhile.
  bool Visit(const std::string& address, const std::function<void(LoopbackTransport&)>& accept) {
    MutexLock lock(&mutex_);
    const auto found = transports_.find(address);
    if (found == transports_.end()) return false;
    accept(*found->second);
    return true;
  }

 private:
  Mutex mutex_;
  Tap tap_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, LoopbackTransport*> transports_ ABSL_GUARDED_BY(mutex_);
  int last_port_ ABSL_GUARDED_BY(mutex_) = 40000;
};

absl::StatusOr<std::string> LoopbackNetwork::State::Bind(const std::string& listen,
                                                         LoopbackTransport* transport) {
  MutexLock lock(&mutex_);
  const size_t colon = listen.rfind(':');
  if (colon == std::string::npos)
    return absl::InvalidArgumentError("transport.listen is no ADDRESS:PORT: " + listen);
  std::string address = listen;
  if (listen.substr(colon) == ":0") {
    address = listen.substr(0, colon + 1) + std::to_string(++last_port_);
  }
  if (!transports_.emplace(address, transport).second) {
    return absl::UnavailableError(address + " is in use");
  }
  return address;
}

class LoopbackNetwork::LoopbackLink final : public Link {
 public:
  LoopbackLink(std::shared_ptr<State> state, std::shared_ptr<LoopbackEnd> here,
               std::shared_ptr<LoopbackEnd> there)
      : state_(std::move(state)), here_(std::move(here)), there_(std::move(there)) {
    here_->link = this;
  }
  ~LoopbackLink() override {
    here_->link = nullptr;
    there_->inbox->Post([there = there_] {
      if (there->link == nullptr) return;
      there->protocol->OnDown(there->link,
                              absl::UnavailableError("the peer closed the connection"));
    });
  }

  void Send(OutgoingFrame frame, std::shared_ptr<const void> keep,
            std::function<void()> sent) override {
    for (Frame& flat : state_->Pass(Flatten(frame))) {
      there_->inbox->Post([there = there_, flat = std::move(flat)] {
        if (there->link == nullptr) return;
        BytesArrival arrival(flat.body);
        there->protocol->OnFrame(there->link, flat.header, arrival);
      });
    }
    keep.reset();
    if (!sent) return;
    here_->inbox->Post([here = here_, sent = std::move(sent)] {
      if (here->link != nullptr) sent();
    });
  }

 private:
  const std::shared_ptr<State> state_;
  const std::shared_ptr<LoopbackEnd> here_;
  const std::shared_ptr<LoopbackEnd> there_;
};

class LoopbackNetwork::LoopbackTransport final : public Transport, private LinkMaker {
 public:
  LoopbackTransport(std::shared_ptr<State> state, TransportOptions options, FragmentSource* source)
      : state_(std::move(state)),
        protocol_(std::move(options), source, *this, Clock::Real(), [this] { Wake(); }) {}
  ~LoopbackTransport() override { Stop(); }

  absl::Status Start(const std::string& listen) {
    if (!listen.empty()) {
      CRUMB_ASSIGN_OR_RETURN(address_, state_->Bind(listen, this));
    }
    thread_ = Thread("crumb-loopback", [this] { Run(); });
    return absl::OkStatus();
  }

  std::string address() const override { return address_; }
  absl::StatusOr<FetchId> Fetch(const std::string& address, FetchRequest request,
                                FetchDone done) override {
    return protocol_.Fetch(address, std::move(request), std::move(done));
  }
  void Cancel(FetchId fetch) override { protocol_.Cancel(fetch); }
  void Connect(const std::string& address) override { protocol_.Connect(address); }
  void Disconnect(const std::string& address) override { protocol_.Disconnect(address); }
  TransportStats stats() const override { return protocol_.stats(); }
  std::string Describe() const override { return "loopback"; }
  void Stop() override;

 private:
  absl::StatusOr<std::unique_ptr<Link>> MakeLink(const std::string& address) override;
  std::shared_ptr<LoopbackEnd> MakeEnd() {
    return std::make_shared<LoopbackEnd>(LoopbackEnd{protocol_.inbox(), &protocol_, nullptr});
  }
  void Run();
  void WaitUntil(TimePoint until);
  void Wake() {
    MutexLock lock(&mutex_);
    woken_ = true;
    wake_.NotifyOne();
  }

  const std::shared_ptr<State> state_;
  std::string address_;
  Protocol protocol_;
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  CondVar wake_;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

absl::StatusOr<std::unique_ptr<Link>> LoopbackNetwork::LoopbackTransport::MakeLink(
    const std::string& address) {
  const auto here = MakeEnd();
  std::shared_ptr<LoopbackEnd> there;
  const bool found = state_->Visit(address, [&](LoopbackTransport& peer) {
    there = peer.MakeEnd();
    there->inbox->Post([state = state_, here, there, name = address_] {
      there->protocol->OnAccepted(std::make_unique<LoopbackLink>(state, there, here), name);
    });
  });
  if (!found) return absl::UnavailableError("no transport listens at " + address);
  return std::make_unique<LoopbackLink>(state_, here, there);
}

void LoopbackNetwork::LoopbackTransport::WaitUntil(TimePoint until) {
  MutexLock lock(&mutex_);
  while (!woken_ && Clock::Real().Now() < until) {
    if (until == TimePoint::max()) {
      wake_.Wait(&mutex_);
    } else {
      wake_.WaitUntil(&mutex_, until);
    }
  }
  woken_ = false;
}

void LoopbackNetwork::LoopbackTransport::Run() {
  while (!stopping_.load()) {
    if (protocol_.Step() || !protocol_.inbox()->Sleep()) continue;
    WaitUntil(protocol_.NextTimer());
    protocol_.inbox()->Awake();
  }
  protocol_.Shutdown();
}

void LoopbackNetwork::LoopbackTransport::Stop() {
  if (stopping_.exchange(true)) return thread_.Join();
  if (!address_.empty()) state_->Unbind(address_);
  Wake();
  thread_.Join();
}

LoopbackNetwork::LoopbackNetwork() : state_(std::make_shared<State>()) {}
LoopbackNetwork::~LoopbackNetwork() = default;

void LoopbackNetwork::SetTap(Tap tap) { state_->SetTap(std::move(tap)); }

absl::StatusOr<std::unique_ptr<Transport>> LoopbackNetwork::Open(TransportOptions options,
                                                                 FragmentSource* source) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  const std::string listen = options.listen;
  auto transport = std::make_unique<LoopbackTransport>(state_, std::move(options), source);
  CRUMB_RETURN_IF_ERROR(transport->Start(listen));
  return transport;
}

}  // namespace crumb::transport
