// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "server/calls/keyspace_calls.h"
#include "server/calls/lease_calls.h"
#include "tests/histories/failure.h"
#include "tests/histories/world.h"

namespace crumb::histories {
namespace {

// Longer than anything waits: limits.wait_max, device_pools.keep_for, a slow disk's queue.
constexpr Duration kLongTime = std::chrono::minutes(5);
constexpr int kChecksOfPools = 4;
// Pages that are requested after each crash.
constexpr size_t kDurableChecksMax = 12;
constexpr int kBusyRetries = 5;
constexpr Duration kBusyPause = std::chrono::minutes(1);

// Read, not mapped: the file of a slab that was given up may have been cut off.
std::vector<std::byte> ContentOf(int file) {
  std::vector<std::byte> bytes(size_t{1} << 20);
  const ssize_t count = ::pread(file, bytes.data(), bytes.size(), 0);
  bytes.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
  return bytes;
}

}  // namespace

void World::CheckStep() {
  CheckLeases();
  CheckDevices();
  CheckBudgets();
}

// Leased pages keep the content that they had when they were leased.
void World::CheckLeases() const {
  for (const Worker& worker : workers_) {
    for (const HeldLease& lease : worker.leases) {
      for (const HeldLease::Tile& tile : lease.tiles) {
        uint64_t content;
        std::memcpy(&content, tile.slab->mapping.data() + tile.offset, sizeof(content));
        if (content == tile.content) continue;
        Fail("leases-hold", "a page that worker {} leased was overwritten", worker.index);
      }
    }
  }
}

void World::CheckDevices() const {
  for (const auto& [name, slot] : device_) {
    for (const DeviceSlot::User& user : slot.users) {
      if (user.use == DeviceSlot::Use::kLeased && user.content != slot.content) {
        Fail("leases-hold", "device slot {} that worker {} leased was overwritten", name.second,
             user.worker);
      }
      const bool alone = slot.users.size() == 1;
      if (user.use == DeviceSlot::Use::kBlank && !alone) {
        Fail("slots-have-one-holder", "device slot {} is blank in two hands", name.second);
      }
    }
  }
}

void World::CheckBudgets() {
  const storage::StoreStats stats = node_->store->Stats();
  if (stats.host.resident_bytes > stats.host.capacity_bytes) {
    Fail("budgets", "{} bytes of {} of host memory", stats.host.resident_bytes,
         stats.host.capacity_bytes);
  }
  if (disk_.fragments() > history_.profile.disk_fragments) {
    Fail("budgets", "{} fragments on a disk of {}", disk_.fragments(),
         history_.profile.disk_fragments);
  }
  const server::SessionTable::Totals totals = node_->sessions->totals();
  const server::SessionLimits& limits = node_->session_limits;
  const auto engines = static_cast<uint64_t>(totals.engines);
  const bool within =
      totals.sessions <= static_cast<size_t>(limits.sessions_max) &&
      totals.engines <= static_cast<size_t>(limits.engines_max) &&
      totals.leases <= engines * static_cast<uint64_t>(limits.leases_max) &&
      totals.leased_pages <= engines * static_cast<uint64_t>(limits.lease_pages_max) &&
      totals.staging_bytes <= limits.staging_total_bytes_max.value;
  if (!within) {
    Fail("budgets", "{} sessions, {} engines, {} leases of {} pages, {} bytes of staging memory",
         totals.sessions, totals.engines, totals.leases, totals.leased_pages, totals.staging_bytes);
  }
  const server::DevicePools::Totals pools = node_->pools->totals();
  if (pools.pools > static_cast<size_t>(NodePoolOptions().pools_max)) {
    Fail("budgets", "{} device pools", pools.pools);
  }
}

storage::AcquireResult World::AcquireNow(const storage::AcquireRequest& request) {
  bool completed = false;
  storage::AcquireResult result;
  node_->store->Acquire(request, [&](absl::StatusOr<storage::AcquireResult> found) {
    if (found.ok()) result = *std::move(found);
    completed = true;
  });
  while (!completed) scheduler_.Sleep(std::chrono::milliseconds(1));
  return result;
}

// Checks after a restart with a healthy disk that pages reported as durable are served.
void World::CheckDurable() {
  const Disk::Faults faults = std::exchange(disk_.faults, Disk::Faults());
  size_t checked = 0;
  for (const Model::Content& page : model_.DurablePages()) {
    if (++checked > kDurableChecksMax) break;
    const auto keyspace = node_->keyspaces->Find(model_.IdOf(page.keyspace));
    if (keyspace->generation.load() > page.generation) continue;  // dropped, not acknowledged
    storage::AcquireRequest request;
    request.keyspace = keyspace->id;
    request.generation = keyspace->generation.load();
    request.keys = {page.key};
    request.range = page.range;
    request.deadline = TimePoint::max();
    storage::AcquireResult result = AcquireNow(request);
    // A slab that was another tenant's may have to change hands first.
    for (int i = 0; i < kBusyRetries && result.miss_reason == MissReason::kBusy; ++i) {
      scheduler_.Sleep(kBusyPause);
      result = AcquireNow(request);
    }
    const bool lost = !disk_.Covers({keyspace->id, page.key}, page.generation, page.range);
    // Memory of a few chunks may have none for each size of a page's fragments and of its parent's.
    const bool too_small =
        result.miss_reason == MissReason::kBusy && disk_.HasSeveralSizes({keyspace->id, page.key});
    if (result.hit_pages == 0 && !lost && !too_small) {
      Fail("durable-is-served", "a durable page of keyspace {} is a miss of reason {}",
           page.keyspace, static_cast<int>(result.miss_reason));
    }
    if (result.hit_pages == 0 && lost && disk_.losses({keyspace->id, page.key}) == 0) {
      Fail("durable-stays", "a durable page of keyspace {} is gone after a crash", page.keyspace);
    }
    if (result.lease != 0) node_->store->Release(result.lease);
    ++counts_.durable_checked;
  }
  disk_.faults = faults;
}

// A process that keeps a descriptor of memory sees in it nothing of another tenant.
void World::CheckHoard() const {
  for (const auto& [tenant, descriptor] : hoard_) {
    const std::string path = fmt::format("/proc/self/fd/{}", descriptor.get());
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (file.valid()) model_.CheckMemory(ContentOf(file.get()), tenant);
  }
  if (!history_.profile.own_slabs) return;
  for (const Worker& worker : workers_) {
    for (const auto& view : worker.views) {
      for (const auto& [number, slab] : view->slabs) {
        model_.CheckMemory(ContentOf(slab->fd.get()), worker.tenant);
      }
    }
  }
}

// Ends every process and checks that nothing is left of their leases, slots and memory.
void World::End() {
  CheckHoard();
  disk_.faults = Disk::Faults();
  for (Worker& worker : workers_) Kill(worker);
  scheduler_.Settle();
  scheduler_.Sleep(kLongTime);
  scheduler_.Settle();
  if (pending_ > 0) Fail("completed", "{} calls were never completed", pending_);
  for (int i = 0; i < kChecksOfPools; ++i) {
    OnListener([this] { node_->pools->Check(); });
    scheduler_.Settle();
    scheduler_.Sleep(kLongTime);
  }
  CheckAllGivenBack();
  hoard_.clear();
  node_->Stop(std::chrono::seconds(1));
  node_.reset();
}

size_t World::Descriptors() {
  DIR* const folder = ::opendir("/proc/self/fd");
  size_t count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

void World::CheckAllGivenBack() {
  const server::SessionTable::Totals totals = node_->sessions->totals();
  if (totals.sessions + totals.engines + totals.leases + totals.leased_pages + totals.reservations +
          totals.staging_bytes !=
      0) {
    Fail("given-back",
         "without processes there are {} sessions, {} engines, {} leases of {} pages, {} "
         "reservations, {} bytes of staging memory",
         totals.sessions, totals.engines, totals.leases, totals.leased_pages, totals.reservations,
         totals.staging_bytes);
  }
  const storage::StoreStats stats = node_->store->Stats();
  if (stats.leases + stats.leased_slots + stats.pools.held_slots != 0) {
    Fail("given-back", "without processes there are {} leases of {} slots, {} held device slots",
         stats.leases, stats.leased_slots, stats.pools.held_slots);
  }
  if (node_->pools->totals().pools != 0) {
    Fail("given-back", "{} device pools are left", node_->pools->totals().pools);
  }
  for (int keyspace = 0; keyspace < kKeyspaces; ++keyspace) {
    v1::DropKeyspaceRequest request;
    request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
    v1::DropKeyspaceResponse response;
    server::DropKeyspace(node_->ContextOf(TenantOf(keyspace)), request, &response,
                         Expect([](const absl::Status& status) {
                           if (!status.ok()) Fail("drops", "{}", status.ToString());
                         }));
    scheduler_.Settle();
  }
  const storage::StoreStats empty = node_->store->Stats();
  if (empty.host.pages + empty.host.resident_bytes + disk_.fragments() != 0) {
    Fail("given-back",
         "after every drop there are {} pages of {} bytes in host memory, {} "
         "fragments on disk",
         empty.host.pages, empty.host.resident_bytes, disk_.fragments());
  }
}

}  // namespace crumb::histories
