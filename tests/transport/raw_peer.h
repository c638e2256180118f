// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ucp/api/ucp.h>

#include <optional>
#include <string>
#include <vector>

#include "transport/frame.h"
#include "transport/ucx_context.h"

namespace crumb::transport {

// A peer that uses UCX's active messages directly, so that a test can send any bytes. It makes
// progress only in calls of its functions.
class RawPeer {
 public:
  explicit RawPeer(const std::string& address);
  ~RawPeer();
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  // Sends a hello and waits for the reply. Returns false if there was none.
  bool Hello(transport::Hello hello = {});
  const transport::Hello& hello() const { return *response_; }
  uint64_t theirs() const { return response_ ? response_->connection : 0; }

  // Sends a frame. With `seal`, the checksums of header and body are right.
  void Send(FrameHeader header, const std::vector<std::byte>& body, bool seal, bool reply);
  void SendFetch(FetchId id, const FetchBody& fetch);
  void SendRaw(std::vector<std::byte> header, std::vector<std::byte> body, bool reply = false);
  void Progress();
  // Waits until everything is sent, or the peer has closed the connection.
  void Flush();

 private:
  struct Message {
    RawPeer* peer;
    std::vector<std::byte> header;
    std::vector<std::byte> body;
  };

  static void OnSent(void* request, ucs_status_t status, void* message);
  static ucs_status_t OnMessage(void* arg, const void* header, size_t header_size, void* data,
                                size_t size, const ucp_am_recv_param_t* param);

  std::shared_ptr<UcxContext> context_;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  bool down_ = false;
  size_t sending_ = 0;
  std::optional<transport::Hello> response_;
};

}  // namespace crumb::transport
