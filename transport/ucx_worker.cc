// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/ucx_worker.h"

#include <cstring>

#include "common/clock.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "transport/ucx_context.h"

namespace crumb::transport {
namespace {

// The number of the active message that carries frames.
constexpr unsigned kMessageId = 1;
// Calls of ucp_worker_progress before events are delivered and the protocol runs.
constexpr int kProgressMax = 64;
// UCX closes the sockets of an endpoint some calls of progress after the close has ended; for this
// time the thread does not sleep longer than kSettleMs.
constexpr Duration kSettle = std::chrono::milliseconds(20);
// The longest time that Drain waits for completions.
constexpr Duration kDrainMax = std::chrono::seconds(2);
// The largest frame of tiles, in bytes, that is sent eagerly: without rendezvous. Over TCP alone it
// is a segment less UCX's and the frame's headers.
constexpr size_t kEagerBytes = 8 << 10;
constexpr size_t kSegmentOverheadBytes = 512;

ucp_dt_iov_t IovOf(const void* data, size_t size) {
  return {const_cast<void*>(data), size};  // UCX's type is not const
}

// The data of a request: one piece as contiguous bytes, several as a list. `pieces` must outlive
// the request.
struct Payload {
  void* buffer = nullptr;
  size_t count = 0;
  ucp_datatype_t type = ucp_dt_make_contig(1);

  explicit Payload(const std::vector<ucp_dt_iov_t>& pieces) {
    if (pieces.size() == 1) {
      buffer = pieces[0].buffer;
      count = pieces[0].length;
    } else if (pieces.size() > 1) {
      buffer = const_cast<ucp_dt_iov_t*>(pieces.data());
      count = pieces.size();
      type = ucp_dt_make_iov();
    }
  }
};

}  // namespace

// The part of a link that outlives it, because requests refer to it.
struct UcxWorker::Endpoint {
  ucp_ep_h handle = nullptr;
  UcxLink* link = nullptr;  // null after the link was destroyed
  bool down = false;
};

struct UcxWorker::SendRecord {
  UcxWorker& worker;
  std::shared_ptr<Endpoint> endpoint;
  OutgoingFrame frame;
  FrameHeaderBytes header{};
  std::vector<ucp_dt_iov_t> pieces;
  std::shared_ptr<const void> keep;
  std::function<void()> sent;
};

struct UcxWorker::PullRecord {
  UcxWorker& worker;
  std::vector<ucp_dt_iov_t> pieces;
  Arrival::Pulled pulled;
};

class UcxWorker::UcxLink final : public Link {
 public:
  UcxLink(UcxWorker& worker, std::shared_ptr<Endpoint> endpoint)
      : worker_(worker), endpoint_(std::move(endpoint)) {
    endpoint_->link = this;
  }
  ~UcxLink() override {
    endpoint_->link = nullptr;
    worker_.endpoints_.erase(endpoint_->handle);
    worker_.Close(endpoint_->handle);
  }

  void Send(OutgoingFrame frame, std::shared_ptr<const void> keep,
            std::function<void()> sent) override;

 private:
  UcxWorker& worker_;
  const std::shared_ptr<Endpoint> endpoint_;
};

class UcxWorker::UcxArrival final : public Arrival {
 public:
  UcxArrival(UcxWorker& worker, void* data, size_t size, bool rendezvous)
      : worker_(worker), data_(data), size_(size), rendezvous_(rendezvous) {}

  size_t size() const override { return size_; }
  const std::byte* data() const override {
    static constexpr std::byte kNothing{};
    if (rendezvous_) return nullptr;
    return size_ == 0 ? &kNothing : static_cast<const std::byte*>(data_);
  }
  void Pull(std::vector<std::span<std::byte>> places, Pulled pulled) override;

 private:
  UcxWorker& worker_;
  void* const data_;  // UCX's descriptor of the data if it is sent by rendezvous
  const size_t size_;
  const bool rendezvous_;
};

void UcxWorker::UcxLink::Send(OutgoingFrame frame, std::shared_ptr<const void> keep,
                              std::function<void()> sent) {
  auto* record = new SendRecord{worker_, endpoint_,       std::move(frame), {},
                                {},      std::move(keep), std::move(sent)};
  worker_.sends_.insert(record);
  record->header = EncodeFrameHeader(record->frame.header);
  size_t bytes = record->frame.body.size();
  if (bytes > 0) record->pieces.push_back(IovOf(record->frame.body.data(), bytes));
  for (const auto piece : record->frame.tiles) {
    record->pieces.push_back(IovOf(piece.data(), piece.size()));
    bytes += piece.size();
  }
  const Payload payload(record->pieces);
  const bool tiles = record->frame.header.type == FrameType::kData;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags =
      tiles && bytes > worker_.eager_bytes_max_ ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
  // Only a hello must identify its endpoint; later frames carry the number of their connection.
  if (record->frame.header.type == FrameType::kHello) param.flags |= UCP_AM_SEND_FLAG_REPLY;
  param.datatype = payload.type;
  param.cb.send = &UcxWorker::OnSent;
  param.user_data = record;
  const ucs_status_ptr_t request =
      ucp_am_send_nbx(endpoint_->handle, kMessageId, record->header.data(), record->header.size(),
                      payload.buffer, payload.count, &param);
  if (!UCS_PTR_IS_PTR(request)) worker_.FinishSend(record, UCS_PTR_RAW_STATUS(request));
}

void UcxWorker::UcxArrival::Pull(std::vector<std::span<std::byte>> places, Pulled pulled) {
  auto* record = new PullRecord{worker_, {}, std::move(pulled)};
  worker_.pulls_.insert(record);
  for (const auto place : places) record->pieces.push_back(IovOf(place.data(), place.size()));
  const Payload payload(record->pieces);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  param.datatype = payload.type;
  param.cb.recv_am = &UcxWorker::OnPulled;
  param.user_data = record;
  const ucs_status_ptr_t request =
      ucp_am_recv_data_nbx(worker_.worker_, data_, payload.buffer, payload.count, &param);
  if (!UCS_PTR_IS_PTR(request)) worker_.FinishPull(record, UCS_PTR_RAW_STATUS(request));
}

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Create(std::shared_ptr<UcxContext> context,
                                                             const TransportOptions& options,
                                                             LinkEvents& events) {
  std::unique_ptr<UcxWorker> worker(new UcxWorker(events));
  worker->context_ = std::move(context);
  CRUMB_RETURN_IF_ERROR(worker->Open(options));
  return worker;
}

absl::Status UcxWorker::Open(const TransportOptions& options) {
  const bool tcp_only = options.ucx_tls.size() == 1 && options.ucx_tls[0] == "tcp";
  eager_bytes_max_ = tcp_only ? options.segment_bytes.value - kSegmentOverheadBytes : kEagerBytes;
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // one thread makes it, another drives it
  CRUMB_RETURN_IF_ERROR(
      FromUcs(ucp_worker_create(context_->get(), &params, &worker_), "UCX worker"));
  CRUMB_RETURN_IF_ERROR(FromUcs(ucp_worker_get_efd(worker_, &event_fd_), "UCX event descriptor"));
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessageId;
  handler.cb = &UcxWorker::OnMessage;
  handler.arg = this;
  CRUMB_RETURN_IF_ERROR(
      FromUcs(ucp_worker_set_am_recv_handler(worker_, &handler), "UCX message handler"));
  return options.listen.empty() ? absl::OkStatus() : Listen(options.listen);
}

absl::Status UcxWorker::Listen(const std::string& listen) {
  CRUMB_ASSIGN_OR_RETURN(const SocketAddress address, SocketAddress::Parse(listen));
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = {address.get(), address.size};
  params.conn_handler = {&UcxWorker::OnRequest, this};
  CRUMB_RETURN_IF_ERROR(
      FromUcs(ucp_listener_create(worker_, &params, &listener_), "listen at " + listen));
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  CRUMB_RETURN_IF_ERROR(FromUcs(ucp_listener_query(listener_, &attributes), "UCX listener"));
  SocketAddress bound;
  bound.storage = attributes.sockaddr;
  address_ = bound.ToString();
  return absl::OkStatus();
}

UcxWorker::~UcxWorker() {
  for (const ucp_conn_request_h request : requests_) ucp_listener_reject(listener_, request);
  requests_.clear();
  if (listener_ != nullptr) ucp_listener_destroy(listener_);
  listener_ = nullptr;
  if (worker_ == nullptr) return;
  Drain();
  ucp_worker_destroy(worker_);
  while (!sends_.empty()) FinishSend(*sends_.begin(), UCS_ERR_CANCELED);
  while (!pulls_.empty()) FinishPull(*pulls_.begin(), UCS_ERR_CANCELED);
}

void UcxWorker::Drain() {
  const TimePoint end = Clock::Real().Now() + kDrainMax;
  while (closing_ + sends_.size() + pulls_.size() > 0 && Clock::Real().Now() < end) {
    ucp_worker_progress(worker_);
  }
}

bool UcxWorker::Progress() {
  bool did = false;
  for (int i = 0; i < kProgressMax && ucp_worker_progress(worker_) != 0; ++i) did = true;
  return DeliverEvents() || did;
}

bool UcxWorker::Arm() { return ucp_worker_arm(worker_) != UCS_ERR_BUSY; }

bool UcxWorker::settling() const { return closing_ > 0 || Clock::Real().Now() < settle_until_; }

bool UcxWorker::DeliverEvents() {
  if (requests_.empty() && downs_.empty()) return false;
  for (const ucp_conn_request_h request : std::exchange(requests_, {})) Accept(request);
  for (const auto& [endpoint, status] : std::exchange(downs_, {})) {
    if (endpoint->link != nullptr) events_.OnDown(endpoint->link, status);
  }
  return true;
}

absl::StatusOr<std::unique_ptr<Link>> UcxWorker::Adopt(ucp_ep_params_t params,
                                                       const std::string& what) {
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {&UcxWorker::OnEndpointError, this};
  auto endpoint = std::make_shared<Endpoint>();
  CRUMB_RETURN_IF_ERROR(FromUcs(ucp_ep_create(worker_, &params, &endpoint->handle), what));
  endpoints_.emplace(endpoint->handle, endpoint);
  return std::make_unique<UcxLink>(*this, std::move(endpoint));
}

absl::StatusOr<std::unique_ptr<Link>> UcxWorker::MakeLink(const std::string& address) {
  CRUMB_ASSIGN_OR_RETURN(const SocketAddress parsed, SocketAddress::Parse(address));
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = {parsed.get(), parsed.size};
  return Adopt(params, "connect to " + address);
}

void UcxWorker::Accept(ucp_conn_request_h request) {
  ucp_conn_request_attr_t attributes{};
  attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
  SocketAddress peer;
  if (ucp_conn_request_query(request, &attributes) == UCS_OK) {
    peer.storage = attributes.client_address;
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  absl::StatusOr<std::unique_ptr<Link>> link = Adopt(params, "accept " + peer.ToString());
  if (!link.ok()) return LogWarning("{}", std::string(link.status().message()));
  events_.OnAccepted(*std::move(link), peer.ToString());
}

void UcxWorker::Close(ucp_ep_h endpoint) {
  settle_until_ = Clock::Real().Now() + kSettle;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = &UcxWorker::OnClosed;
  param.user_data = this;
  if (UCS_PTR_IS_PTR(ucp_ep_close_nbx(endpoint, &param))) ++closing_;
}

void UcxWorker::FinishSend(SendRecord* record, ucs_status_t status) {
  sends_.erase(record);
  const std::unique_ptr<SendRecord> owned(record);
  owned->keep.reset();
  if (owned->endpoint->link == nullptr) return;
  if (status != UCS_OK) return ReportDown(owned->endpoint, status);
  if (owned->sent) owned->sent();
}

void UcxWorker::FinishPull(PullRecord* record, ucs_status_t status) {
  pulls_.erase(record);
  const std::unique_ptr<PullRecord> owned(record);
  owned->pulled(FromUcs(status, "transfer"));
}

void UcxWorker::ReportDown(const std::shared_ptr<Endpoint>& endpoint, ucs_status_t status) {
  if (std::exchange(endpoint->down, true)) return;
  downs_.emplace_back(endpoint, FromUcs(status, "connection"));
}

void UcxWorker::OnRequest(ucp_conn_request_h request, void* arg) {
  static_cast<UcxWorker*>(arg)->requests_.push_back(request);
}

void UcxWorker::OnEndpointError(void* arg, ucp_ep_h endpoint, ucs_status_t status) {
  auto* worker = static_cast<UcxWorker*>(arg);
  const auto found = worker->endpoints_.find(endpoint);
  if (found != worker->endpoints_.end()) worker->ReportDown(found->second, status);
}

void UcxWorker::OnSent(void* request, ucs_status_t status, void* arg) {
  auto* record = static_cast<SendRecord*>(arg);
  ucp_request_free(request);
  record->worker.FinishSend(record, status);
}

void UcxWorker::OnPulled(void* request, ucs_status_t status, size_t, void* arg) {
  auto* record = static_cast<PullRecord*>(arg);
  ucp_request_free(request);
  record->worker.FinishPull(record, status);
}

void UcxWorker::OnClosed(void* request, ucs_status_t, void* arg) {
  ucp_request_free(request);
  --static_cast<UcxWorker*>(arg)->closing_;
}

ucs_status_t UcxWorker::OnMessage(void* arg, const void* header, size_t header_size, void* data,
                                  size_t size, const ucp_am_recv_param_t* param) {
  auto* worker = static_cast<UcxWorker*>(arg);
  UcxLink* link = nullptr;
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0) {
    const auto found = worker->endpoints_.find(param->reply_ep);
    if (found != worker->endpoints_.end()) link = found->second->link;
  }
  UcxArrival arrival(*worker, data, size, (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0);
  worker->events_.OnFrame(link, {static_cast<const std::byte*>(header), header_size}, arrival);
  return UCS_OK;  // eager bytes have been processed; UCX drops a rendezvous that was not begun
}

}  // namespace crumb::transport
