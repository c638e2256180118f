// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/session/staging_area.h"

#include <fcntl.h>

#include <cerrno>
#include <vector>

#include "common/errno_status.h"
#include "common/status_macros.h"

namespace crumb::server {
namespace {

uint64_t RoundUp(uint64_t bytes) {
  constexpr uint64_t kMask = StagingArea::kAlignment - 1;
  return (bytes + kMask) & ~kMask;
}

}  // namespace

absl::StatusOr<std::shared_ptr<StagingArea>> StagingArea::Create(uint64_t bytes,
                                                                 size_t reservations_max) {
  CRUMB_ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd("crumb-staging", bytes));
  // A worker that shrank the file would make crumbd fault on its mapping.
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoStatus(errno, "sealing staging memory");
  }
  CRUMB_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Of(fd.get(), bytes, Mapping::Access::kReadOnly));
  return std::shared_ptr<StagingArea>(
      new StagingArea(std::move(fd), std::move(mapping), reservations_max));
}

StagingArea::StagingArea(UniqueFd fd, Mapping mapping, size_t reservations_max)
    : fd_(std::move(fd)), mapping_(std::move(mapping)), reservations_max_(reservations_max) {
  MutexLock lock(&mutex_);
  AddFreeLocked(0, mapping_.size());
}

bool StagingArea::Reserve(uint64_t bytes, uint64_t& offset, uint64_t request) {
  if (bytes == 0 || bytes > size()) return false;
  const uint64_t room = RoundUp(bytes);
  MutexLock lock(&mutex_);
  if (reserved_.size() >= reservations_max_) return false;
  if (given_up_.contains(request)) return false;
  const auto fitting = free_by_bytes_.lower_bound({room, 0});
  if (fitting == free_by_bytes_.end()) return false;
  const uint64_t rest = fitting->first - room;
  offset = fitting->second;
  RemoveFreeLocked(free_.find(offset));
  if (rest > 0) AddFreeLocked(offset + room, rest);
  reserved_.emplace(offset, Reservation{bytes, request, false});
  if (request != 0) by_request_.emplace(request, offset);
  return true;
}

StagingArea::Reservations::iterator StagingArea::FindLocked(uint64_t offset, uint64_t request) {
  const auto found = reserved_.find(offset);
  if (found == reserved_.end() || found->second.committing) return reserved_.end();
  return request == 0 || request == found->second.request ? found : reserved_.end();
}

bool StagingArea::Abort(uint64_t offset, uint64_t request) {
  MutexLock lock(&mutex_);
  if (FindLocked(offset, request) == reserved_.end()) return false;
  FreeLocked(offset);
  return true;
}

void StagingArea::GiveUp(uint64_t request) {
  if (request == 0) return;
  MutexLock lock(&mutex_);
  std::vector<uint64_t> offsets;
  for (auto next = by_request_.lower_bound({request, 0});
       next != by_request_.end() && next->first == request; ++next) {
    if (!reserved_.at(next->second).committing) offsets.push_back(next->second);
  }
  for (const uint64_t offset : offsets) FreeLocked(offset);
  given_up_.insert(request);
  if (given_up_.size() > kGivenUpMax) given_up_.erase(given_up_.begin());
}

std::unique_ptr<StagingArea::Piece> StagingArea::Take(const std::shared_ptr<StagingArea>& area,
                                                      uint64_t offset, uint64_t request) {
  MutexLock lock(&area->mutex_);
  const auto found = area->FindLocked(offset, request);
  if (found == area->reserved_.end()) return nullptr;
  found->second.committing = true;
  return std::make_unique<Piece>(area, offset, found->second.bytes);
}

size_t StagingArea::reservations() const {
  MutexLock lock(&mutex_);
  return reserved_.size();
}

uint64_t StagingArea::free_bytes() const {
  MutexLock lock(&mutex_);
  return free_bytes_;
}

void StagingArea::Free(uint64_t offset) {
  MutexLock lock(&mutex_);
  FreeLocked(offset);
}

void StagingArea::FreeLocked(uint64_t offset) {
  const auto found = reserved_.find(offset);
  uint64_t begin = offset;
  uint64_t end = offset + RoundUp(found->second.bytes);
  by_request_.erase({found->second.request, offset});
  reserved_.erase(found);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == end) {
    end += next->second;
    next = RemoveFreeLocked(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      RemoveFreeLocked(previous);
    }
  }
  AddFreeLocked(begin, end - begin);
}

void StagingArea::AddFreeLocked(uint64_t offset, uint64_t bytes) {
  free_.emplace(offset, bytes);
  free_by_bytes_.emplace(bytes, offset);
  free_bytes_ += bytes;
}

StagingArea::FreePieces::iterator StagingArea::RemoveFreeLocked(FreePieces::iterator piece) {
  free_by_bytes_.erase({piece->second, piece->first});
  free_bytes_ -= piece->second;
  return free_.erase(piece);
}

}  // namespace crumb::server
