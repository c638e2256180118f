// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/ucx_transport.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <limits>
#include <utility>
#include <vector>

#include "common/crc32c.h"
#include "common/errno_status.h"
#include "common/status_macros.h"
#include "common/thread.h"
#include "common/unique_fd.h"
#include "transport/progress_thread.h"
#include "transport/protocol.h"
#include "transport/ucx_context.h"
#include "transport/ucx_worker.h"

namespace crumb::transport {
namespace {

// Milliseconds between calls of progress while endpoints are being closed.
constexpr int kSettleMs = 1;

class UcxTransport final : public Transport, private LinkMaker {
 public:
  UcxTransport(const TransportOptions& options, FragmentSource* source, FrameVersions supported)
      : options_(options),
        protocol_(
            options, source, *this, Clock::Real(), [this] { Wake(); }, supported),
        poll_(options.poll_for) {}
  ~UcxTransport() override { Stop(); }

  absl::Status Start();

  std::string address() const override { return address_; }
  absl::StatusOr<FetchId> Fetch(const std::string& address, FetchRequest request,
                                FetchDone done) override {
    return protocol_.Fetch(address, std::move(request), std::move(done));
  }
  void Cancel(FetchId fetch) override { protocol_.Cancel(fetch); }
  void Connect(const std::string& address) override { protocol_.Connect(address); }
  void Disconnect(const std::string& address) override { protocol_.Disconnect(address); }
  TransportStats stats() const override { return protocol_.stats(); }
  std::string Describe() const override { return context_->description(); }
  void Stop() override;

 private:
  absl::StatusOr<std::unique_ptr<Link>> MakeLink(const std::string& address) override {
    return worker_->MakeLink(address);
  }
  void Wake() {
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
  }
  absl::Status Watch(int fd);
  void Run();
  void Sleep();

  const TransportOptions options_;
  Protocol protocol_;
  std::shared_ptr<UcxContext> context_;
  std::unique_ptr<UcxWorker> worker_;
  std::string address_;
  UniqueFd wake_;
  UniqueFd epoll_;
  std::atomic<bool> stopping_{false};
  PollTime poll_;  // used by the progress thread only
  Thread thread_;
};

absl::Status UcxTransport::Watch(int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, "epoll_ctl");
}

absl::Status UcxTransport::Start() {
  wake_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!wake_.valid() || !epoll_.valid()) return ErrnoStatus(errno, "eventfd or epoll");
  CRUMB_ASSIGN_OR_RETURN(context_, UcxContext::Create(options_));
  CRUMB_ASSIGN_OR_RETURN(worker_, UcxWorker::Create(context_, options_, protocol_));
  address_ = worker_->address();
  CRUMB_RETURN_IF_ERROR(Watch(wake_.get()));
  CRUMB_RETURN_IF_ERROR(Watch(worker_->event_fd()));
  thread_ = Thread("crumb-transport", [this] { Run(); });
  return absl::OkStatus();
}

void UcxTransport::Run() {
  TimePoint busy_until{};
  while (!stopping_.load(std::memory_order_relaxed)) {
    const bool moved = worker_->Progress();
    if (protocol_.Step() || moved) {
      busy_until = Clock::Real().Now() + poll_.now();
    } else if (!protocol_.Expecting() || Clock::Real().Now() >= busy_until) {
      Sleep();
    }
  }
  protocol_.Shutdown();
  worker_.reset();
}

void UcxTransport::Sleep() {
  if (!protocol_.inbox()->Sleep()) return;
  const bool expecting = protocol_.Expecting();
  const TimePoint began = Clock::Real().Now();
  if (worker_->Arm()) {
    int timeout_ms = -1;
    if (const TimePoint next = protocol_.NextTimer(); next != TimePoint::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::Real().Now());
      timeout_ms =
          static_cast<int>(std::clamp<int64_t>(left.count(), 0, std::numeric_limits<int>::max()));
    }
    if (worker_->settling())
      timeout_ms = timeout_ms < 0 ? kSettleMs : std::min(timeout_ms, kSettleMs);
    epoll_event events[2];
    ::epoll_wait(epoll_.get(), events, 2, timeout_ms);
    uint64_t ignored = 0;
    (void)!::read(wake_.get(), &ignored, sizeof(ignored));
  }
  protocol_.inbox()->Awake();
  if (expecting) poll_.NoteSleep(Clock::Real().Now() - began);
}

void UcxTransport::Stop() {
  if (!stopping_.exchange(true)) Wake();
  thread_.Join();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> OpenUcxTransport(TransportOptions options,
                                                            FragmentSource* source,
                                                            FrameVersions supported) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  auto transport = std::make_unique<UcxTransport>(options, source, supported);
  CRUMB_RETURN_IF_ERROR(transport->Start());
  return transport;
}

namespace {

// The self-test fetches kRounds times kPages pages of one fragment, and waits kPatience for each
// round: with the tiles of head_dim 128 these are 19 MB.
constexpr uint32_t kTileBytes = 4608;
constexpr TileRange kRange = {{0, 32}, {0, 8}};
constexpr size_t kPages = 4;
constexpr int kRounds = 4;
constexpr Duration kPatience = std::chrono::seconds(10);

// Serves the same fragment for every page.
class OneFragment final : public FragmentSource {
 public:
  OneFragment() : bytes_(FragmentBytes(kRange.tiles(), kTileBytes)) {
    FragmentHeader header;
    header.tile_bytes = kTileBytes;
    header.range = kRange;
    const auto tiles = std::span(bytes_).first(FragmentTilesBytes(kRange.tiles(), kTileBytes));
    for (size_t i = 0; i < tiles.size(); ++i)
      tiles[i] = static_cast<std::byte>(i * 2654435761u >> 24);
    for (size_t at = 0; at < tiles.size(); at += kTileBytes) {
      header.tile_sums.push_back(Crc32c(tiles.subspan(at, kTileBytes)));
    }
    EncodeFragmentHeader(header, std::span(bytes_).subspan(tiles.size()));
  }
  void Acquire(SourceRequest request, Reply reply) override {
    const SourceFragment fragment = {bytes_, kRange, kTileBytes};
    SourceResponse response;
    response.pages.resize(request.pages.size(), {PageStatus::kHit, {fragment}});
    reply(std::move(response));
  }

 private:
  std::vector<std::byte> bytes_;
};

absl::Status FetchOnce(Transport& from, const std::string& address,
                       const std::shared_ptr<std::vector<std::byte>>& room) {
  FetchRequest request;
  const size_t page_bytes = room->size() / kPages;
  for (size_t page = 0; page < kPages; ++page) {
    request.pages.push_back({{}, kRange, kTileBytes, {room->data() + page * page_bytes, 0, 0}});
  }
  request.memory = room;
  request.deadline = Clock::Real().Now() + kPatience;
  const auto ended = std::make_shared<std::promise<FetchResponse>>();
  CRUMB_RETURN_IF_ERROR(
      from.Fetch(address, std::move(request),
                 [ended](FetchResponse response) { ended->set_value(std::move(response)); })
          .status());
  const FetchResponse response = ended->get_future().get();
  for (const PageResponse& page : response.pages) {
    if (page.status == PageStatus::kHit) continue;
    return absl::UnavailableError(std::string("the self-test of the transport failed: page ") +
                                  PageStatusName(page.status) + ", " +
                                  std::string(response.detail.message()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SelfTest> RunSelfTest(const TransportOptions& options) {
  TransportOptions own = options;
  own.listen = options.listen.substr(0, options.listen.rfind(':')) + ":0";
  OneFragment source;
  CRUMB_ASSIGN_OR_RETURN(const auto server, OpenUcxTransport(own, &source));
  CRUMB_ASSIGN_OR_RETURN(const auto client, OpenUcxTransport(own, nullptr));
  const auto room = std::make_shared<std::vector<std::byte>>(
      kPages * FragmentTilesBytes(kRange.tiles(), kTileBytes));
  CRUMB_RETURN_IF_ERROR(FetchOnce(*client, server->address(), room));  // connects; not timed
  const TimePoint begin = Clock::Real().Now();
  for (int round = 0; round < kRounds; ++round) {
    CRUMB_RETURN_IF_ERROR(FetchOnce(*client, server->address(), room));
  }
  const std::chrono::duration<double> took = Clock::Real().Now() - begin;
  return SelfTest{client->Describe(),
                  static_cast<double>(kRounds * room->size()) / took.count() * 1e-9};
}

}  // namespace crumb::transport
