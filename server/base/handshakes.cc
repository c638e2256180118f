// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/handshakes.h"

namespace crumb::server {

void Handshakes::Add(uint64_t number, unsigned user, TimePoint now) {
  connections_[number] = {user, now};
  users_[user].insert(number);
}

void Handshakes::Remove(uint64_t number) {
  const auto found = connections_.find(number);
  if (found == connections_.end()) return;
  const auto user = users_.find(found->second.user);
  user->second.erase(number);
  if (user->second.empty()) users_.erase(user);
  connections_.erase(found);
}

std::optional<uint64_t> Handshakes::Late(TimePoint now) const {
  if (NextLate() > now) return std::nullopt;
  return connections_.begin()->first;
}

std::optional<uint64_t> Handshakes::ToClose(TimePoint now) const {
  if (NextToClose() > now) return std::nullopt;
  return OldestOfTheLargestUser();
}

TimePoint Handshakes::NextLate() const {
  if (connections_.empty()) return TimePoint::max();
  return connections_.begin()->second.since + timeout_;
}

TimePoint Handshakes::NextToClose() const {
  const uint64_t number = OldestOfTheLargestUser();
  return number == 0 ? TimePoint::max() : connections_.at(number).since + grace_;
}

uint64_t Handshakes::OldestOfTheLargestUser() const {
  size_t most = 0;
  uint64_t oldest = 0;
  for (const auto& [user, numbers] : users_) {
    const uint64_t first = *numbers.begin();
    if (numbers.size() < most || (numbers.size() == most && first > oldest)) continue;
    most = numbers.size();
    oldest = first;
  }
  return oldest;
}

}  // namespace crumb::server
