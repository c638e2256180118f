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

// A peer written on UCX's active messages alone, which sends whatever it is told to. Moves only
// when one of its functions is called.
class RawPeer {
 public:
  explicit RawPeer(const std::string& address);
  ~RawPeer();
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;

  // Says hello and waits for the answer; false: none came.
  bool Hello(transport::Hello hello = {});
  const transport::Hello& hello() const { return *answer_; }
  uint64_t theirs() const { return answer_ ? answer_->connection : 0; }

  // A frame; with `seal`, header and body sums are right.
  void Send(FrameHeader header, const std::vector<std::byte>& body, bool seal, bool reply);
  void SendFetch(FetchId id, const FetchBody& fetch);
  void SendRaw(std::vector<std::byte> header, std::vector<std::byte> body, bool reply = false);
  void Progress();
  // Until all is sent, or the peer has hung up.
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
  std::optional<transport::Hello> answer_;
};

}  // namespace crumb::transport
