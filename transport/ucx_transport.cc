// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/ucx_transport.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "common/errno_status.h"
#include "common/status_macros.h"
#include "common/thread.h"
#include "common/unique_fd.h"
#include "transport/poll_time.h"
#include "transport/protocol.h"
#include "transport/ucx_status.h"
#include "transport/ucx_worker.h"

namespace crumb::transport {
namespace {

// Between calls of progress while endpoints are being closed.
constexpr int kSettleMs = 1;

class UcxMemory final : public RegisteredMemory {
 public:
  UcxMemory(std::shared_ptr<UcxContext> context, ucp_mem_h handle)
      : context_(std::move(context)), handle_(handle) {}
  ~UcxMemory() override { ucp_mem_unmap(context_->get(), handle_); }

 private:
  const std::shared_ptr<UcxContext> context_;
  const ucp_mem_h handle_;
};

class UcxTransport final : public Transport, private LinkMaker {
 public:
  UcxTransport(const TransportOptions& options, FragmentSource* source, FrameVersions speaks)
      : options_(options),
        protocol_(
            options, source, *this, Clock::Real(), [this] { Wake(); }, speaks),
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
  absl::StatusOr<std::unique_ptr<RegisteredMemory>> Register(std::span<std::byte> memory) override;
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
  PollTime poll_;  // the thread's
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

absl::StatusOr<std::unique_ptr<RegisteredMemory>> UcxTransport::Register(
    std::span<std::byte> memory) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = memory.data();
  params.length = memory.size();
  ucp_mem_h handle = nullptr;
  CRUMB_RETURN_IF_ERROR(FromUcs(ucp_mem_map(context_->get(), &params, &handle),
                                "register " + std::to_string(memory.size()) + " bytes"));
  return std::make_unique<UcxMemory>(context_, handle);
}

void UcxTransport::Stop() {
  if (!stopping_.exchange(true)) Wake();
  thread_.Join();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> OpenUcxTransport(TransportOptions options,
                                                            FragmentSource* source,
                                                            FrameVersions speaks) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  auto transport = std::make_unique<UcxTransport>(options, source, speaks);
  CRUMB_RETURN_IF_ERROR(transport->Start());
  return transport;
}

}  // namespace crumb::transport
