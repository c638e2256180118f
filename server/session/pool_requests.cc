// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/pool_requests.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <chrono>
#include <string_view>
#include <utility>
#include <vector>

namespace crumb::server {
namespace {

// A PoolResponse whose first field, the code, is 0.
constexpr std::string_view kNoError("\x08\0", 2);
// How long a response with descriptors waits for processes of the same user or tenant to read
// theirs.
constexpr Duration kReadPatience = std::chrono::seconds(1);

// Fails if the process does not read its replies. kResourceExhausted: it, and others of its user
// or tenant, leave too many descriptors unread; an error is sent instead if nothing was.
absl::Status SendReply(UnreadDescriptors& unread, const std::string& owner, const SharedFd& socket,
                       const PoolReply& reply) {
  std::vector<int> fds;
  for (const SharedFd& fd : reply.fds) fds.push_back(fd->get());
  std::string bytes = reply.response.SerializeAsString();
  // A reply without content; a message without content would be the end of the connection.
  if (bytes.empty()) bytes = kNoError;
  bool begun = false;
  const absl::Status sent =
      unread.SendPatiently(owner, socket, std::move(bytes), fds, kReadPatience, &begun);
  if (begun || !absl::IsResourceExhausted(sent)) return sent;
  v1::PoolResponse refusal;
  refusal.set_code(static_cast<uint32_t>(sent.code()));
  refusal.set_error(std::string(sent.message()));
  SendFdMessage(socket->get(), refusal.SerializeAsString(), {}).IgnoreError();
  return sent;
}

}  // namespace

bool PoolRequests::Serve(const std::shared_ptr<Session>& session,
                         const std::shared_ptr<std::atomic<bool>>& busy, const SharedFd& socket,
                         const std::string& owner, FdMessage& message) const {
  v1::PoolRequest request;
  if (!request.ParseFromString(message.bytes)) return false;
  // Descriptors in responses that no process reads count against crumbd's user in the kernel.
  int unread = 0;
  if (::ioctl(socket->get(), SIOCOUTQ, &unread) != 0 || unread > 0) return false;
  if (busy->exchange(true)) return false;
  const auto received = std::make_shared<std::vector<UniqueFd>>(std::move(message.fds));
  message.fds.clear();
  const auto serve = [unread = unread_, plane = plane_, session, request, received, busy, socket,
                      owner, &metrics = metrics_] {
    const PoolReply reply = plane->Handle(session, request, std::move(*received));
    busy->store(false);
    const absl::Status sent = SendReply(*unread, owner, socket, reply);
    if (absl::IsResourceExhausted(sent)) metrics.Reject(Rejection::kUnreadDescriptors);
    if (!sent.ok()) ::shutdown(socket->get(), SHUT_RDWR);
  };
  if (tasks_->Submit(owner, serve, received->size())) return true;
  message.fds = std::move(*received);
  return false;
}

}  // namespace crumb::server
