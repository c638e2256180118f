// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/transport/raw_peer.h"

#include "common/crc32c.h"
#include "tests/common/eventually.h"
#include "tests/transport/fetch_calls.h"

namespace crumb::transport {

RawPeer::RawPeer(const std::string& address) {
  TransportOptions options;
  options.listen = "127.0.0.1:0";
  context_ = *UcxContext::Create(options);
  ucp_worker_params_t params{};
  ucp_worker_create(context_->get(), &params, &worker_);
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = 1;
  handler.cb = &RawPeer::OnMessage;
  handler.arg = this;
  ucp_worker_set_am_recv_handler(worker_, &handler);
  const SocketAddress to = *SocketAddress::Parse(address);
  ucp_ep_params_t endpoint{};
  endpoint.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR |
                        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  endpoint.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  endpoint.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  endpoint.err_handler.cb = [](void* arg, ucp_ep_h, ucs_status_t) {
    static_cast<RawPeer*>(arg)->down_ = true;
  };
  endpoint.err_handler.arg = this;
  endpoint.sockaddr = {to.get(), to.size};
  ucp_ep_create(worker_, &endpoint, &endpoint_);
}

RawPeer::~RawPeer() {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t closing = ucp_ep_close_nbx(endpoint_, &param);
  if (UCS_PTR_IS_PTR(closing)) {
    Eventually([&] {
      ucp_worker_progress(worker_);
      return ucp_request_check_status(closing) != UCS_INPROGRESS;
    });
    ucp_request_free(closing);
  }
  Eventually([&] {
    ucp_worker_progress(worker_);
    return sending_ == 0;
  });
  ucp_worker_destroy(worker_);
}

void RawPeer::Progress() { ucp_worker_progress(worker_); }

void RawPeer::Flush() {
  Eventually([&] {
    Progress();
    return sending_ == 0 || down_;
  });
}

bool RawPeer::Hello(transport::Hello hello) {
  hello.connection = 77;
  FrameHeader header;
  header.type = FrameType::kHello;
  Send(header, EncodeHello(hello), true, true);
  return Eventually([&] {
           Progress();
           return response_.has_value() || down_;
         }) &&
         response_.has_value();
}

void RawPeer::Send(FrameHeader header, const std::vector<std::byte>& body, bool seal, bool reply) {
  if (seal && header.type != FrameType::kData) header.body_sum = Crc32c(body);
  FrameHeaderBytes bytes = EncodeFrameHeader(header);
  if (!seal) bytes[20] ^= std::byte{1};
  SendRaw({bytes.begin(), bytes.end()}, body, reply);
}

void RawPeer::SendFetch(FetchId id, const FetchBody& fetch) {
  FrameHeader header;
  header.type = FrameType::kFetch;
  header.connection = theirs();
  header.fetch = id;
  Send(header, EncodeFetch(fetch), true, false);
}

void RawPeer::SendRaw(std::vector<std::byte> header, std::vector<std::byte> body, bool reply) {
  if (down_) return;
  auto* message = new Message{this, std::move(header), std::move(body)};
  ++sending_;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  param.flags = reply ? UCP_AM_SEND_FLAG_REPLY : 0;
  param.cb.send = &RawPeer::OnSent;
  param.user_data = message;
  const ucs_status_ptr_t request =
      ucp_am_send_nbx(endpoint_, 1, message->header.data(), message->header.size(),
                      message->body.data(), message->body.size(), &param);
  if (UCS_PTR_IS_PTR(request)) return;
  --sending_;
  delete message;
}

void RawPeer::OnSent(void* request, ucs_status_t, void* arg) {
  auto* message = static_cast<Message*>(arg);
  --message->peer->sending_;
  delete message;
  ucp_request_free(request);
}

ucs_status_t RawPeer::OnMessage(void* arg, const void* header, size_t header_size, void* data,
                                size_t size, const ucp_am_recv_param_t*) {
  const auto decoded = DecodeFrameHeader({static_cast<const std::byte*>(header), header_size});
  if (decoded.ok() && decoded->type == FrameType::kHello) {
    const auto hello = DecodeHello({static_cast<const std::byte*>(data), size});
    if (hello.ok()) static_cast<RawPeer*>(arg)->response_ = *hello;
  }
  return UCS_OK;
}

}  // namespace crumb::transport
