// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/mapping.h"
#include "common/roster.h"
#include "common/unique_fd.h"
#include "crumb/v1/cache_service.pb.h"
#include "crumb/v1/session.pb.h"
#include "tests/histories/disk.h"
#include "tests/histories/history.h"
#include "tests/histories/model.h"
#include "tests/histories/node.h"
#include "tests/histories/scheduler.h"

namespace crumb::histories {

// The page that a step's argument names.
uint32_t PageOf(uint32_t choice);

// A slab as a worker has it.
struct SlabView {
  UniqueFd fd;
  Mapping mapping;
};

// One session of a worker. Lives on, closed, while leases or slots of it are in use.
struct View {
  std::shared_ptr<server::Session> session;
  UniqueFd socket;         // the worker's end: slabs come over it
  UniqueFd crumbd_socket;  // the node's
  std::shared_ptr<server::SlabGate> gate;
  std::shared_ptr<server::NoticeQueue> notices;
  Mapping staging;
  struct Reserved {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };
  std::vector<Reserved> reserved;
  std::map<uint32_t, std::shared_ptr<SlabView>> slabs;
  uint64_t requests = 0;
  int tenant = 0;
  uint64_t node = 0;  // the node that opened it
  bool open = true;   // the worker receives responses
};

using SlotName = std::pair<std::string, uint64_t>;  // pool and slot

// A device's memory: the content of each slot, and which processes use it. It outlives crumbd.
struct DeviceSlot {
  // kCommitting: its commit has no response yet; a process does not let go of such a slot.
  enum class Use : uint8_t { kBlank, kCommitting, kPage, kLeased };
  struct User {
    int worker = 0;
    Use use = Use::kBlank;
    uint64_t content = 0;  // the content that the process expects; kBlank: none
    std::shared_ptr<View> view;
    uint64_t lease = 0;
  };
  uint64_t content = 0;
  std::vector<User> users;
};

// A lease that a worker knows it holds, and the pages that it reads there.
struct HeldLease {
  uint64_t lease = 0;
  int keyspace = 0;
  std::shared_ptr<View> view;
  Model::Since since;
  v1::AcquireRequest request;  // the request of the response
  struct Tile {
    std::shared_ptr<SlabView> slab;
    uint64_t offset = 0;
    PageKey key;
    int layer = 0;
    int head = 0;
    uint64_t content = 0;
  };
  std::vector<Tile> tiles;
};

// A worker's view of the device pool that it takes part in.
struct PoolView {
  std::string id;  // empty: none
  std::string device;
  std::shared_ptr<const UniqueFd> roster;
  RosterMark mark;
  std::shared_ptr<View> view;  // through which it takes part
  std::vector<uint32_t> handles;
  bool left = false;
};

struct Worker {
  int index = 0;
  int tenant = 0;
  uint64_t life = 0;                         // grows when the process dies
  std::shared_ptr<View> view;                // null: no session
  std::vector<std::shared_ptr<View>> views;  // all of this process's, of the node that runs
  std::vector<HeldLease> leases;
  PoolView pool;
};

// A node, its disk and its workers: runs a history and checks the model's rules after each
// step. A broken rule ends the process (failure.h).
class World {
 public:
  struct Counts {
    uint64_t steps = 0;
    uint64_t calls = 0;
    uint64_t hits = 0;  // pages
    uint64_t device_hits = 0;
    uint64_t commits = 0;  // stored
    uint64_t durable_checked = 0;
    uint64_t switches = 0;
  };

  World(const History& history, const std::string& tenants_file, bool trace);
  ~World();

  void Run();
  const Counts& counts() const { return counts_; }

 private:
  template <typename Request, typename Response>
  struct Call {
    Request request;
    Response response;
  };
  using StatusFunction = std::function<void(const absl::Status&)>;

  void RunStep(const Step& step);

  // world.cc: the node, sessions, the machine.
  void StartNode(std::unique_ptr<storage::HandedOverMemory> handed_over);
  void OpenKeyspaces();
  void CheckKeyspaces();
  void Crash();
  void Takeover();
  void LoseNode();
  void OpenSession(Worker& worker);
  // Opens one if there is none.
  bool HasSession(Worker& worker);
  void Disconnect(Worker& worker);
  void Kill(Worker& worker);
  void Machine(const Step& step);
  // Runs a call on one of the node's callers.
  void OnCaller(std::function<void()> call);
  void OnListener(std::function<void()> call);
  // A Done that must be called exactly once.
  server::Done Expect(StatusFunction then);
  server::CallContext ContextOf(const Worker& worker) { return node_->ContextOf(worker.tenant); }
  static int KeyspaceOf(const Worker& worker, uint32_t choice) {
    return 2 * worker.tenant + static_cast<int>(choice % 2);
  }

  // pages.cc: calls about pages in host memory.
  void Reserve(Worker& worker, const Step& step);
  void Commit(Worker& worker, const Step& step);
  void CommitContents(Worker& worker, int keyspace, std::vector<View::Reserved> pieces,
                      std::vector<uint64_t> contents, uint32_t damage, StatusFunction then);
  void CommitTwice(Worker& worker, const Step& step);
  void Abort(Worker& worker, const Step& step);
  void Put(Worker& worker, const Step& step);
  void Acquire(Worker& worker, const Step& step, bool given_up);
  void NoteAcquired(Worker& worker, const std::shared_ptr<View>& view, int keyspace,
                    const Model::Since& since, const v1::AcquireRequest& request,
                    const v1::AcquireResponse& response);
  std::shared_ptr<SlabView> SlabOf(View& view, uint32_t slab);
  void ReadGrants(View& view);
  void HoldHostFragments(HeldLease* held, const v1::AcquireRequest& request,
                         const v1::AcquireResponse& response);
  void HoldDeviceFragments(Worker& worker, const HeldLease& held, const v1::AcquireRequest& request,
                           const v1::AcquireResponse& response);
  void Join(Worker& worker, const Step& step);
  void Release(Worker& worker, const Step& step);
  void Lookup(Worker& worker, const Step& step);
  void Prefetch(Worker& worker, const Step& step);
  void Pin(Worker& worker, const Step& step, bool pin);
  void Delete(Worker& worker, const Step& step);
  void Drop(Worker& worker, const Step& step);
  void SetState(Worker& worker, const Step& step);
  void Flush(Worker& worker);
  std::string KeysOf(int keyspace, uint32_t first, uint32_t count) const;
  uint64_t NewContent(int keyspace, uint64_t page, const TileRange& range, bool valid);

  // pools.cc: device pools, and the notices of session streams.
  void Notices(Worker& worker);
  void CopyDown(Worker& worker, const std::string& pool, const storage::DemotionWork& work);
  // Acts that need a pool, a handle or a blank slot that is not there are steps towards it.
  void PoolJoin(Worker& worker, const Step& step);
  void Rejoin(Worker& worker);
  void PoolOffer(Worker& worker, const Step& step);
  static bool InPool(const Worker& worker);
  bool UsesSlots(const Worker& worker) const;
  void NoteHandle(Worker& worker, uint64_t slot);
  void PoolReserve(Worker& worker, const Step& step);
  void PoolCommit(Worker& worker, const Step& step);
  void PoolRelease(Worker& worker, const Step& step);
  void PoolLeave(Worker& worker);
  void PoolReclaim(Worker& worker, const Step& step);
  uint64_t SlotBytes() const { return kAllTiles.tiles() * kTileBytes; }
  uint64_t HandleBytes() const { return SlotBytes() * history_.profile.pool_slots; }
  void RemoveUsers(const std::function<bool(const DeviceSlot::User&)>& which);
  std::vector<SlotName> SlotsUsedBy(const Worker& worker, DeviceSlot::Use use) const;

  // checks.cc
  void CheckStep();
  void CheckLeases() const;
  void CheckDevices() const;
  void CheckBudgets();
  void CheckDurable();
  storage::AcquireResult AcquireNow(const storage::AcquireRequest& request);
  void CheckHoard() const;
  void End();
  void CheckAllGivenBack();
  static size_t Descriptors();

  const History& history_;
  const std::string tenants_file_;
  const bool trace_;
  Scheduler scheduler_;
  Disk disk_;
  Model model_;
  std::unique_ptr<Node> node_;
  uint64_t nodes_ = 0;              // started so far
  storage::DeletionEpochs epochs_;  // epochs of the last node, as in the file of a crumbd
  std::array<Worker, kWorkers> workers_;
  std::map<SlotName, DeviceSlot> device_;
  // Descriptors of slabs that a tenant's process keeps without a right to read or map them.
  std::vector<std::pair<int, UniqueFd>> hoard_;
  uint64_t pending_ = 0;  // calls that have no response yet
  bool crashed_ = false;  // a node was left as it was
  Counts counts_;
};

}  // namespace crumb::histories
