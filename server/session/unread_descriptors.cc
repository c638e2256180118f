// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/unread_descriptors.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "common/fd_channel.h"
#include "common/status_macros.h"

namespace crumb::server {
namespace {

// A message of one byte takes 832 bytes of a socket's buffer, which has 208 KiB by default.
constexpr size_t kMessagesWanted = 64;
constexpr size_t kFdsPerMessageWanted = 16;
// Percentage of the budget, without the parts of other owners, that one owner may have unread.
constexpr int64_t kPartPercent = 50;
// Between two tries to send to a process that has to read first.
constexpr Duration kRetry = std::chrono::milliseconds(1);

uint64_t TotalOf(uint64_t total) {
  if (total > 0) return total;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 512;
  return std::max<uint64_t>(limit.rlim_cur / 2, 1);
}

bool HasUnread(int socket) {
  int bytes = 0;
  return ::ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

}  // namespace

UnreadDescriptors::UnreadDescriptors(uint64_t total, Drop drop)
    : drop_(std::move(drop)), budget_(TotalOf(total), kPartPercent) {}

size_t UnreadDescriptors::BatchOf(size_t count) const {
  const size_t wanted =
      std::clamp(count / kMessagesWanted + 1, kFdsPerMessageWanted, kFdsPerMessageMax);
  // Several owners can have a message each on their way.
  return std::clamp<size_t>(budget_.total() / 16, 1, wanted);
}

absl::Status UnreadDescriptors::Take(const std::string& owner, const Socket& socket,
                                     uint64_t count) {
  Sweep();
  MutexLock lock(&mutex_);
  TenantBudget::Taken taken = budget_.Take(owner, count);
  if (taken == TenantBudget::Taken::kPartFull && budget_.used_by(owner) == 0 &&
      budget_.used() + count <= budget_.total()) {
    budget_.Add(owner, count);  // one message of each owner may be larger than its part
    taken = TenantBudget::Taken::kYes;
  }
  if (taken != TenantBudget::Taken::kYes) {
    return TenantBudget::Error(taken, "sessions.unread_descriptors_max");
  }
  Unread& unread = unread_[socket.get()];
  unread.owner = owner;
  unread.socket = socket;
  unread.descriptors += count;
  ++unread.sending;
  return absl::OkStatus();
}

void UnreadDescriptors::Sent(const Socket& socket, uint64_t not_sent) {
  Unread done;
  {
    MutexLock lock(&mutex_);
    const auto found = unread_.find(socket.get());
    Unread& unread = found->second;
    --unread.sending;
    unread.descriptors -= not_sent;
    budget_.Give(unread.owner, not_sent);
    if (!cleared_ || unread.sending > 0) return;
    budget_.Give(unread.owner, unread.descriptors);
    done = std::move(unread);
    unread_.erase(found);
  }
  drop_(done.owner, std::move(done.socket));
}

void UnreadDescriptors::Sweep() {
  std::vector<Unread> read;
  {
    MutexLock lock(&mutex_);
    for (auto it = unread_.begin(); it != unread_.end();) {
      Unread& unread = it->second;
      if (unread.sending > 0 || HasUnread(unread.socket->get())) {
        ++it;
        continue;
      }
      budget_.Give(unread.owner, unread.descriptors);
      read.push_back(std::move(unread));
      it = unread_.erase(it);
    }
  }
  for (Unread& one : read) drop_(one.owner, std::move(one.socket));
}

void UnreadDescriptors::Clear() {
  std::vector<Unread> all;
  {
    MutexLock lock(&mutex_);
    cleared_ = true;
    for (auto it = unread_.begin(); it != unread_.end();) {
      if (it->second.sending > 0) {
        ++it;
        continue;
      }
      budget_.Give(it->second.owner, it->second.descriptors);
      all.push_back(std::move(it->second));
      it = unread_.erase(it);
    }
  }
  for (Unread& unread : all) drop_(unread.owner, std::move(unread.socket));
}

absl::Status UnreadDescriptors::Send(const std::string& owner, const Socket& socket,
                                     std::string bytes, std::span<const int> fds) {
  if (fds.empty()) return SendFdMessage(socket->get(), bytes, fds);
  CRUMB_RETURN_IF_ERROR(Take(owner, socket, fds.size()));
  const size_t batch = BatchOf(fds.size());
  size_t sent = 0;
  absl::Status status;
  while (sent < fds.size()) {
    const size_t count = std::min(fds.size() - sent, batch);
    status = SendFdMessage(socket->get(), bytes, fds.subspan(sent, count));
    if (!status.ok()) break;
    sent += count;
    bytes.assign(1, '\0');
  }
  Sent(socket, fds.size() - sent);
  return status;
}

absl::Status UnreadDescriptors::SendPatiently(const std::string& owner, const Socket& socket,
                                              std::string bytes, std::span<const int> fds,
                                              Duration patience, bool* begun) {
  const TimePoint until = Clock::Real().Now() + patience;
  const size_t batch = BatchOf(fds.size());
  size_t sent = 0;
  do {
    const size_t count = std::min(fds.size() - sent, batch);
    absl::Status status = Send(owner, socket, bytes, fds.subspan(sent, count));
    while (absl::IsResourceExhausted(status) && Clock::Real().Now() < until) {
      std::this_thread::sleep_for(kRetry);
      status = Send(owner, socket, bytes, fds.subspan(sent, count));
    }
    CRUMB_RETURN_IF_ERROR(status);
    *begun = true;
    sent += count;
    bytes.assign(1, '\0');
  } while (sent < fds.size());
  return absl::OkStatus();
}

}  // namespace crumb::server
