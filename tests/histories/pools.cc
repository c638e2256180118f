// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <utility>

#include "server/calls/device_calls.h"
#include "server/calls/lease_calls.h"
#include "server/calls/staging_calls.h"
#include "storage/coverage.h"
#include "tests/histories/failure.h"
#include "tests/histories/world.h"

namespace crumb::histories {
namespace {

using Use = DeviceSlot::Use;

// Two devices, which every worker can use.
std::string DeviceOf(uint32_t choice) { return std::string(16, choice % 2 == 0 ? 'd' : 'e'); }

// crumbd keeps descriptors of device memory and never uses them.
std::vector<UniqueFd> AnyDescriptor() {
  std::vector<UniqueFd> fds;
  fds.emplace_back(::open("/dev/null", O_RDWR | O_CLOEXEC));
  return fds;
}

}  // namespace

void World::RemoveUsers(const std::function<bool(const DeviceSlot::User&)>& which) {
  // Destroyed last: the last reference to a view locks mutexes when it goes, and fibers that run
  // meanwhile may add users.
  std::vector<DeviceSlot::User> removed;
  for (auto& [name, slot] : device_) {
    const auto end =
        std::stable_partition(slot.users.begin(), slot.users.end(), std::not_fn(which));
    removed.insert(removed.end(), std::make_move_iterator(end),
                   std::make_move_iterator(slot.users.end()));
    slot.users.erase(end, slot.users.end());
  }
}

std::vector<SlotName> World::SlotsUsedBy(const Worker& worker, Use use) const {
  std::vector<SlotName> names;
  for (const auto& [name, slot] : device_) {
    for (const DeviceSlot::User& user : slot.users) {
      const bool of_pool = user.view == worker.pool.view && name.first == worker.pool.id;
      if (user.worker == worker.index && user.use == use && of_pool) names.push_back(name);
    }
  }
  return names;
}

void World::Notices(Worker& worker) {
  if (worker.view == nullptr) return;
  const auto view = worker.view;
  while (auto notice = view->notices->Take()) {
    if (const auto* durable = std::get_if<server::NoticeQueue::Durable>(&*notice)) {
      for (const PageKey& key : durable->keys) model_.Durable(durable->keyspace, key);
    } else if (const auto* gone = std::get_if<server::NoticeQueue::SlabGone>(&*notice)) {
      if (view->gate != nullptr) ReadGrants(*view);
      const auto slab = view->slabs.find(gone->slab);
      if (slab == view->slabs.end()) continue;
      for (const HeldLease& lease : worker.leases) {
        for (const HeldLease::Tile& tile : lease.tiles) {
          if (tile.slab != slab->second) continue;
          Fail("slab-gone-unused", "slab {} is said to be gone, and has leased pages", gone->slab);
        }
      }
      view->slabs.erase(slab);
    } else if (auto* demotions = std::get_if<server::NoticeQueue::Demotions>(&*notice)) {
      const std::string pool(demotions->pool.view());
      for (const storage::DemotionWork& work : demotions->work) CopyDown(worker, pool, work);
    }
  }
}

// A page that leaves a device: the worker copies it to staging memory, commits it there, and says
// that it has done so.
void World::CopyDown(Worker& worker, const std::string& pool, const storage::DemotionWork& work) {
  const auto view = worker.view;
  if (worker.pool.id != pool || worker.pool.view != view || worker.pool.left) return;
  const uint64_t content = device_[{pool, work.slot}].content;
  int keyspace = 0;
  while (model_.IdOf(keyspace) != work.header->keyspace) ++keyspace;
  model_.CheckContent(content, keyspace, work.header->key, {});
  const auto done = [this, view, pool, slot = work.slot, tenant = worker.tenant] {
    OnCaller([view, pool, slot, context = node_->ContextOf(tenant)] {
      v1::ReleaseRequest request;
      request.set_pool(pool);
      request.add_demoted(slot);
      v1::ReleaseResponse response;
      server::Release(context, *view->session, request, &response).IgnoreError();
    });
  };
  const auto piece_at = std::find_if(
      view->reserved.begin(), view->reserved.end(), [](const View::Reserved& reserved) {
        return reserved.bytes == FragmentBytes(kAllTiles.tiles(), kTileBytes);
      });
  if (piece_at == view->reserved.end()) return done();  // no room: the page is lost
  const View::Reserved piece = *piece_at;
  view->reserved.erase(piece_at);
  CommitContents(worker, keyspace, {piece}, {content}, UINT32_MAX,
                 [view, done](const absl::Status&) {
                   if (view->open) done();
                 });
}

bool World::InPool(const Worker& worker) {
  return worker.view != nullptr && !worker.pool.id.empty() && worker.pool.view == worker.view &&
         !worker.pool.left;
}

// A process fetches the handle of a slot that it did not know.
void World::NoteHandle(Worker& worker, uint64_t slot) {
  const auto handle = static_cast<uint32_t>(slot / history_.profile.pool_slots);
  std::vector<uint32_t>& handles = worker.pool.handles;
  if (std::find(handles.begin(), handles.end(), handle) == handles.end()) {
    handles.push_back(handle);
  }
}

bool World::UsesSlots(const Worker& worker) const {
  return std::any_of(device_.begin(), device_.end(), [&](const auto& entry) {
    return std::any_of(entry.second.users.begin(), entry.second.users.end(),
                       [&](const DeviceSlot::User& user) { return user.worker == worker.index; });
  });
}

void World::PoolJoin(Worker& worker, const Step& step) {
  if (!HasSession(worker)) return;
  PoolView& pool = worker.pool;
  if (!pool.id.empty() && pool.view == worker.view && !pool.left) return;
  if (!pool.id.empty() && pool.view != worker.view) return Rejoin(worker);
  const auto view = worker.view;
  // One that has left and uses slots still can take part again in that pool only.
  const std::string again = UsesSlots(worker) ? pool.id : "";
  const std::string wanted = again.empty() ? DeviceOf(step.a) : pool.device;
  OnListener([this, &worker, view, again, device = wanted] {
    v1::PoolRequest request;
    request.mutable_join()->set_device(device);
    request.mutable_join()->set_slot_bytes(SlotBytes());
    request.mutable_join()->set_handle_bytes(HandleBytes());
    request.mutable_join()->set_pool(again);
    server::PoolReply reply = node_->pools->Handle(view->session, request, {});
    if (worker.view == view) Notices(worker);  // copies requested of it before are not its work now
    if (reply.response.code() != 0 || worker.view != view || InPool(worker)) return;
    if (!again.empty()) {
      worker.pool.left = worker.pool.id != again;
      return;
    }
    if (UsesSlots(worker)) return;  // it has slots of another pool by now
    PoolView joined;
    joined.id = reply.response.pool();
    joined.device = device;
    joined.roster = reply.fds.front();
    joined.mark = RosterMark::Take(joined.roster->get()).value();
    joined.view = view;
    joined.handles.assign(reply.response.handles().begin(), reply.response.handles().end());
    std::swap(worker.pool, joined);  // the pool before is destroyed once it is out of the worker
  });
}

// The process has lost its connection, or its crumbd, and has another: it takes part in its pool
// again and reports the slots that it uses.
void World::Rejoin(Worker& worker) {
  const auto view = worker.view;
  const auto old = worker.pool.view;
  const bool same_node = old->node == nodes_;
  OnListener([this, &worker, view, old, same_node, id = worker.pool.id, device = worker.pool.device,
              context = ContextOf(worker)] {
    const auto lives = [&] { return worker.view == view && worker.pool.id == id; };
    if (!lives() || worker.pool.view != old) return;
    const auto join = [&](uint64_t mark) {
      v1::PoolRequest request;
      request.mutable_join()->set_device(device);
      request.mutable_join()->set_slot_bytes(SlotBytes());
      request.mutable_join()->set_handle_bytes(HandleBytes());
      request.mutable_join()->set_pool(id);
      request.mutable_join()->set_roster_mark(mark);
      std::vector<UniqueFd> fds;
      fds.emplace_back(::fcntl(worker.pool.roster->get(), F_DUPFD_CLOEXEC, 0));
      return node_->pools->Handle(view->session, request, std::move(fds)).response.code() == 0;
    };
    if (!join(0) || !lives()) return;
    if (same_node) {
      v1::ReleaseRequest kept;
      kept.set_pool(id);
      kept.set_all_but_slots(true);
      for (const auto& [name, slot] : device_) {
        for (const DeviceSlot::User& user : slot.users) {
          const bool its = user.worker == worker.index && user.view == old;
          if (its && user.use != Use::kLeased && name.first == id) kept.add_slots(name.second);
        }
      }
      worker.pool.view = view;
      v1::ReleaseResponse response;
      server::Release(context, *old->session, kept, &response).IgnoreError();
      return;
    }
    for (const uint32_t handle : std::vector<uint32_t>(worker.pool.handles)) {
      v1::PoolRequest offer;
      offer.mutable_offer()->set_pool(id);
      offer.mutable_offer()->set_number(handle);
      const int code = node_->pools->Handle(view->session, offer, AnyDescriptor()).response.code();
      if (!lives()) return;
      // Pools that came meanwhile may have taken the tenant's part: the process tries again later.
      const auto there = static_cast<int>(absl::StatusCode::kAlreadyExists);
      if (code != 0 && code != there) return;
    }
    std::vector<std::pair<uint64_t, uint64_t>> used;  // slot and content, 0 for a blank one
    for (const auto& [name, slot] : device_) {
      for (const DeviceSlot::User& user : slot.users) {
        const bool its = user.worker == worker.index && user.view->node != nodes_;
        if (!its || name.first != id) continue;
        // A page whose commit has no response yet may be claimed as the page that was written.
        used.push_back({name.second, user.use == Use::kBlank ? 0 : slot.content});
      }
    }
    std::vector<std::shared_ptr<View>> left;  // destroyed last, as in RemoveUsers
    for (const auto& [slot, content] : used) {
      v1::ClaimSlotsRequest claim;
      claim.set_pool(id);
      claim.add_slots(slot);
      claim.add_headers(content == 0 ? "" : server::ToBytes(model_.HeaderOf(content)));
      if (content != 0) {
        claim.set_keyspace(std::string(model_.IdOf(model_.at(content).keyspace).view()));
      }
      v1::ClaimSlotsResponse response;
      const absl::Status status = server::ClaimSlots(context, *view->session, claim, &response);
      if (!lives()) return;
      if (!status.ok()) break;  // the pool is no earlier one's: nothing of it is known here
      if (!response.claimed(0)) Fail("claims", "a process cannot claim slot {} that it uses", slot);
      for (DeviceSlot::User& user : device_[{id, slot}].users) {
        if (user.worker != worker.index || user.view->node == nodes_) continue;
        left.push_back(std::exchange(user.view, view));
        user.lease = 0;
        if (user.use != Use::kBlank) user.use = Use::kPage;
      }
    }
    worker.pool.view = view;
    join(worker.pool.mark.byte());
  });
}

void World::PoolOffer(Worker& worker, const Step& step) {
  if (!InPool(worker)) return PoolJoin(worker, step);
  const auto view = worker.view;
  OnListener([this, &worker, view, id = worker.pool.id] {
    v1::PoolRequest request;
    request.mutable_offer()->set_pool(id);
    const server::PoolReply reply = node_->pools->Handle(view->session, request, AnyDescriptor());
    if (reply.response.code() != 0 || worker.view != view || worker.pool.id != id) return;
    worker.pool.handles.push_back(reply.response.handles(0));
  });
}

void World::PoolReserve(Worker& worker, const Step& step) {
  if (!InPool(worker) || worker.pool.handles.empty()) return PoolOffer(worker, step);
  const auto view = worker.view;
  OnCaller([this, &worker, view, id = worker.pool.id, count = 1 + step.a % 3,
            context = ContextOf(worker)] {
    v1::ReserveRequest request;
    request.set_pool(id);
    request.set_count(count);
    v1::ReserveResponse response;
    const absl::Status status = server::Reserve(context, *view->session, request, &response);
    if (!status.ok() || worker.view != view || worker.pool.id != id) return;
    for (const uint64_t number : response.slots()) {
      DeviceSlot& slot = device_[{id, number}];
      if (!slot.users.empty()) {
        Fail("slots-have-one-holder", "slot {} was given to worker {}, and worker {} uses it",
             number, worker.index, slot.users.front().worker);
      }
      slot.users.push_back({.worker = worker.index, .use = Use::kBlank, .view = view});
      NoteHandle(worker, number);
    }
  });
}

void World::PoolCommit(Worker& worker, const Step& step) {
  const std::vector<SlotName> blank =
      InPool(worker) ? SlotsUsedBy(worker, Use::kBlank) : std::vector<SlotName>();
  if (blank.empty()) return PoolReserve(worker, step);
  const auto view = worker.view;
  const SlotName& name = blank[step.a / 2 % blank.size()];
  const int keyspace = KeyspaceOf(worker, step.a);
  const uint64_t content = NewContent(keyspace, PageOf(step.b), kAllTiles, /*valid=*/true);
  DeviceSlot& slot = device_[name];
  slot.content = content;
  slot.users.front().use = Use::kCommitting;
  slot.users.front().content = content;
  const Model::CommitId commit = model_.BeginCommit(content, /*durable=*/false);
  const auto done = Expect([](const absl::Status&) {});
  OnCaller(
      [this, &worker, view, name, keyspace, content, commit, done, context = ContextOf(worker)] {
        v1::CommitRequest request;
        request.set_keyspace(std::string(model_.IdOf(keyspace).view()));
        request.set_pool(name.first);
        request.add_slots(name.second);
        request.add_headers(server::ToBytes(model_.HeaderOf(content)));
        v1::CommitResponse response;
        absl::Status status;
        server::Commit(context, *view->session, request, &response,
                       [&](absl::Status result) { status = std::move(result); });
        const bool stored = status.ok() && response.outcomes(0) == v1::COMMIT_OUTCOME_STORED;
        model_.EndCommit(commit, stored);
        for (DeviceSlot::User& user : device_[name].users) {
          if (user.worker != worker.index || user.use != Use::kCommitting) continue;
          user.use = stored ? Use::kPage : Use::kBlank;
        }
        done(status);
      });
}

void World::PoolRelease(Worker& worker, const Step& step) {
  const auto view = worker.pool.view;
  if (view == nullptr || view->node != nodes_) return;
  std::vector<SlotName> names = SlotsUsedBy(worker, Use::kPage);
  if (step.b % 3 == 0 || names.empty()) names = SlotsUsedBy(worker, Use::kBlank);
  if (names.empty()) return;
  const size_t count = std::min<size_t>(names.size(), 1 + step.a % 3);
  names.resize(count);
  for (const SlotName& name : names) {
    std::erase_if(device_[name].users, [&](const DeviceSlot::User& user) {
      return user.worker == worker.index && user.view == view && user.use != Use::kLeased;
    });
  }
  OnCaller([names, view, context = ContextOf(worker)] {
    v1::ReleaseRequest request;
    request.set_pool(names.front().first);
    for (const SlotName& name : names) request.add_slots(name.second);
    v1::ReleaseResponse response;
    server::Release(context, *view->session, request, &response).IgnoreError();
  });
}

void World::PoolLeave(Worker& worker) {
  if (!InPool(worker)) return;
  const auto view = worker.view;
  worker.pool.left = true;
  OnListener([this, view, id = worker.pool.id] {
    v1::PoolRequest request;
    request.mutable_leave()->set_pool(id);
    node_->pools->Handle(view->session, request, {});
  });
}

void World::PoolReclaim(Worker& worker, const Step& step) {
  const auto view = worker.view;
  if (view == nullptr) return;
  OnListener([this, view, device = DeviceOf(step.a)] {
    v1::PoolRequest request;
    request.mutable_reclaim()->set_device(device);
    request.mutable_reclaim()->set_bytes(uint64_t{1} << 40);
    node_->pools->Handle(view->session, request, {});
  });
}

void World::HoldDeviceFragments(Worker& worker, const HeldLease& held,
                                const v1::AcquireRequest& request,
                                const v1::AcquireResponse& response) {
  const v1::DeviceFragments& fragments = response.device_fragments();
  for (int i = 0; i < fragments.pages_size(); ++i) {
    const std::string& pool = request.pools(static_cast<int>(fragments.pools(i)));
    DeviceSlot& slot = device_[{pool, fragments.slots(i)}];
    PageKey key;
    std::memcpy(&key, request.keys().data() + fragments.pages(i) * sizeof(key), sizeof(key));
    model_.CheckContent(slot.content, held.keyspace, key, held.since);
    slot.users.push_back({.worker = worker.index,
                          .use = Use::kLeased,
                          .content = slot.content,
                          .view = held.view,
                          .lease = held.lease});
    NoteHandle(worker, fragments.slots(i));
    ++counts_.device_hits;
  }
}

}  // namespace crumb::histories
