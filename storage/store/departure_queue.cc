// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/departure_queue.h"

#include <algorithm>

#include "common/tenant_budget.h"

namespace crumb::storage {

uint64_t DepartureQueue::CostOf(const Departure& departure) {
  return std::max<uint64_t>(departure.meta.bytes, kBatchBytesMax / kBatchFragmentsMax);
}

const std::string& DepartureQueue::NameOf(const std::string& tenant) const {
  static const std::string all;
  return options_.part_max_percent < 100 ? tenant : all;
}

uint64_t DepartureQueue::RoomBytes(const std::string& tenant) const {
  const uint64_t bytes_left = options_.bytes_max - std::min(options_.bytes_max, bytes_);
  if (size_ >= options_.fragments_max) return 0;
  const auto found = tenants_.find(NameOf(tenant));
  if (found == tenants_.end()) return bytes_left;
  const Tenant& own = found->second;
  const uint64_t fragments_part =
      TenantPart(options_.fragments_max, size_ - own.waiting.size(), options_.part_max_percent);
  if (own.waiting.size() >= fragments_part) return 0;
  const uint64_t bytes_part =
      TenantPart(options_.bytes_max, bytes_ - own.bytes, options_.part_max_percent);
  return std::min(bytes_left, bytes_part - std::min(bytes_part, own.bytes));
}

bool DepartureQueue::Push(const std::string& tenant, const Departure& departure) {
  if (departure.meta.bytes > RoomBytes(tenant)) return false;
  const auto [entry, added] = tenants_.try_emplace(NameOf(tenant));
  Tenant& own = entry->second;
  own.waiting.push_back({end_++, departure});
  own.bytes += departure.meta.bytes;
  ++size_;
  bytes_ += departure.meta.bytes;
  if (added) {
    own.cost = cost_;
    Wait(entry);
  }
  return true;
}

void DepartureQueue::Wait(Tenants::iterator tenant) {
  const uint64_t front = tenant->second.waiting.front().number;
  turns_.emplace(std::pair(tenant->second.cost, front), tenant);
  fronts_.insert(front);
}

void DepartureQueue::TakeBatch(std::vector<Departure>* batch) {
  batch->clear();
  uint64_t bytes = 0;
  const auto full = [&] { return batch->size() >= kBatchFragmentsMax || bytes >= kBatchBytesMax; };
  while (!turns_.empty() && !full()) {
    const auto tenant = turns_.begin()->second;
    Tenant& own = tenant->second;
    fronts_.erase(own.waiting.front().number);
    turns_.erase(turns_.begin());
    // The tenant goes on until it is another one's turn.
    const uint64_t others_cost = turns_.empty() ? UINT64_MAX : turns_.begin()->first.first;
    do {
      cost_ = own.cost;
      const Departure& next = own.waiting.front().departure;
      own.cost += CostOf(next);
      own.bytes -= next.meta.bytes;
      bytes_ -= next.meta.bytes;
      bytes += next.meta.bytes;
      --size_;
      batch->push_back(next);
      own.waiting.pop_front();
    } while (!own.waiting.empty() && own.cost < others_cost && !full());
    if (own.waiting.empty()) {
      tenants_.erase(tenant);
    } else {
      Wait(tenant);
    }
  }
}

std::vector<Departure> DepartureQueue::TakeAll() {
  std::vector<Departure> all;
  std::vector<Departure> batch;
  while (!empty()) {
    TakeBatch(&batch);
    all.insert(all.end(), batch.begin(), batch.end());
  }
  return all;
}

bool DepartureQueue::HasBefore(const std::string& tenant, uint64_t end) const {
  const auto found = tenants_.find(NameOf(tenant));
  return found != tenants_.end() && found->second.waiting.front().number < end;
}

}  // namespace crumb::storage
