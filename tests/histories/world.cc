// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/histories/world.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cstdio>
#include <utility>

#include "server/calls/keyspace_calls.h"
#include "tests/histories/failure.h"

namespace crumb::histories {
namespace {

constexpr uint64_t kStagingBytes = uint64_t{160} << 10;  // four fragments of all tiles
constexpr size_t kNoticesMax = 32;
constexpr uint64_t kGrowthBytes = uint64_t{2} << 20;
constexpr Duration kTimes[] = {std::chrono::milliseconds(1), std::chrono::milliseconds(100),
                               std::chrono::seconds(6), std::chrono::minutes(2),
                               std::chrono::hours(30)};
constexpr int64_t kLatenciesUs[] = {1, 20, 500, 200'000};

std::string EngineOf(int tenant) { return std::string(16, static_cast<char>('0' + tenant)); }

}  // namespace

World::World(const History& history, const std::string& tenants_file, bool trace)
    : history_(history),
      tenants_file_(tenants_file),
      trace_(trace),
      scheduler_({.seed = history.schedule,
                  .preemption = history.profile.preemption,
                  .deadlocked =
                      [](const std::string& waits) { Fail("no-deadlock", "deadlock:{}", waits); }}),
      disk_(history.profile.disk_fragments),
      model_(disk_) {
  for (uint32_t i = 0; i < kWorkers; ++i) {
    workers_[i].index = static_cast<int>(i);
    workers_[i].tenant = static_cast<int>(i % kTenants);
  }
}

World::~World() = default;

void World::Run() {
  const size_t descriptors = Descriptors();
  scheduler_.Install();
  StartNode(nullptr);
  OpenKeyspaces();
  for (const Step& step : history_.steps) {
    if (trace_) std::fprintf(stderr, "  %s\n", step.ToString().c_str());
    RunStep(step);
    scheduler_.Yield(static_cast<int>(step.pause));
    CheckStep();
    ++counts_.steps;
  }
  End();
  if (!crashed_ && Descriptors() != descriptors) {
    Fail("given-back", "{} descriptors are open at the end, {} were at the start", Descriptors(),
         descriptors);
  }
  counts_.switches = scheduler_.switches();
  scheduler_.Uninstall();
}

void World::RunStep(const Step& step) {
  Worker& worker = workers_[step.worker % kWorkers];
  switch (step.act) {
    case Act::kOpenSession:
      return OpenSession(worker);
    case Act::kDisconnect:
      return Disconnect(worker);
    case Act::kKill:
      return Kill(worker);
    case Act::kReserve:
      return Reserve(worker, step);
    case Act::kCommit:
      return Commit(worker, step);
    case Act::kCommitTwice:
      return CommitTwice(worker, step);
    case Act::kAbort:
      return Abort(worker, step);
    case Act::kPut:
      return Put(worker, step);
    case Act::kAcquire:
      return Acquire(worker, step, /*given_up=*/false);
    case Act::kJoin:
      return Join(worker, step);
    case Act::kRelease:
      return Release(worker, step);
    case Act::kGiveUp:
      return Acquire(worker, step, /*given_up=*/true);
    case Act::kLookup:
      return Lookup(worker, step);
    case Act::kPrefetch:
      return Prefetch(worker, step);
    case Act::kPin:
      return Pin(worker, step, /*pin=*/true);
    case Act::kUnpin:
      return Pin(worker, step, /*pin=*/false);
    case Act::kDelete:
      return Delete(worker, step);
    case Act::kDrop:
      return Drop(worker, step);
    case Act::kSetState:
      return SetState(worker, step);
    case Act::kFlush:
      return Flush(worker);
    case Act::kNotices:
      return Notices(worker);
    case Act::kPoolJoin:
      return PoolJoin(worker, step);
    case Act::kPoolOffer:
      return PoolOffer(worker, step);
    case Act::kPoolReserve:
      return PoolReserve(worker, step);
    case Act::kPoolCommit:
      return PoolCommit(worker, step);
    case Act::kPoolRelease:
      return PoolRelease(worker, step);
    case Act::kPoolLeave:
      return PoolLeave(worker);
    case Act::kPoolReclaim:
      return PoolReclaim(worker, step);
    case Act::kPoolCheck:
      return OnListener([this] { node_->pools->Check(); });
    default:
      return Machine(step);
  }
}

void World::Machine(const Step& step) {
  switch (step.act) {
    case Act::kDiskFull:
      disk_.faults.full = step.a % 2 == 0;
      return;
    case Act::kDiskWriteErrors:
      disk_.faults.write_fails = step.a % 2 == 0;
      return;
    case Act::kDiskReadErrors:
      disk_.faults.read_fails = step.a % 2 == 0;
      return;
    case Act::kDiskRecordErrors:
      disk_.faults.records_fail = step.a % 2 == 0;
      return;
    case Act::kDiskDamage:
      disk_.Damage(step.a);
      return;
    case Act::kDiskSpeed:
      disk_.faults.latency_us = kLatenciesUs[step.a % std::size(kLatenciesUs)];
      return;
    case Act::kTime:
      scheduler_.Sleep(kTimes[step.a % std::size(kTimes)]);
      // The daemon does this now and then, on a thread of its own.
      OnListener([this] { node_->store->GrowHost(kGrowthBytes).IgnoreError(); });
      return;
    case Act::kSettle:
      scheduler_.Settle();
      return;
    case Act::kCrash:
      return Crash();
    default:
      return Takeover();
  }
}

void World::OnCaller(std::function<void()> call) {
  ++counts_.calls;
  node_->callers->Submit(std::move(call));  // refused by a node that stops
}

void World::OnListener(std::function<void()> call) { node_->listener->Submit(std::move(call)); }

server::Done World::Expect(StatusFunction then) {
  ++pending_;
  const auto replies = std::make_shared<int>(0);
  return [this, replies, then = std::move(then)](const absl::Status& status) {
    if (++*replies > 1) Fail("completed-once", "a call was completed twice");
    --pending_;
    then(status);
  };
}

void World::StartNode(std::unique_ptr<storage::HandedOverMemory> handed_over) {
  ++nodes_;
  if (handed_over == nullptr) epochs_ = {epochs_.current + 1, epochs_.current};
  node_ = std::make_unique<Node>(history_.profile, disk_, tenants_file_, epochs_,
                                 std::move(handed_over));
}

void World::OpenKeyspaces() {
  for (int keyspace = 0; keyspace < kKeyspaces; ++keyspace) {
    v1::OpenKeyspaceRequest request;
    (*request.mutable_fields())["model"] = keyspace % 2 == 0 ? "even" : "odd";
    request.set_layers(kLayers);
    request.set_kv_heads(kHeads);
    request.set_head_dim(256);
    request.set_group_size(128);
    v1::OpenKeyspaceResponse response;
    server::OpenKeyspace(node_->ContextOf(TenantOf(keyspace)), request, &response,
                         Expect([](const absl::Status& status) {
                           if (!status.ok()) Fail("keyspaces-open", "{}", status.ToString());
                         }));
    while (pending_ > 0) scheduler_.Sleep(std::chrono::milliseconds(1));
    model_.SetKeyspace(keyspace, KeyspaceId::FromBytes(response.keyspace()).value());
  }
}

// Checks after a restart that acknowledged keyspaces are known.
void World::CheckKeyspaces() {
  for (int keyspace = 0; keyspace < kKeyspaces; ++keyspace) {
    const auto found = node_->keyspaces->Find(model_.IdOf(keyspace));
    if (found == nullptr) Fail("keyspaces-stay", "keyspace {} is not known any more", keyspace);
    if (found->generation.load() < model_.acknowledged_generation(keyspace)) {
      Fail("drops-stay", "keyspace {} has generation {} after a restart, {} was acknowledged",
           keyspace, found->generation.load(), model_.acknowledged_generation(keyspace));
    }
  }
}

// Kills the node: none of its threads runs again, nothing is destroyed, the disk keeps its content.
void World::Crash() {
  scheduler_.KillOthers();
  crashed_ = true;
  static_cast<void>(node_.release());
  pending_ = 0;
  model_.NodeDied();
  LoseNode();
  StartNode(nullptr);
  CheckKeyspaces();
  CheckDurable();
}

void World::Takeover() {
  // crumbd lets calls in progress end before it stops; those that wait for longer are ended then.
  constexpr int kGraceMs = 10'000;
  for (int ms = 0; pending_ > 0 && ms < kGraceMs; ++ms) {
    scheduler_.Sleep(std::chrono::milliseconds(1));
  }
  auto memory = node_->HandOver();
  if (pending_ > 0) Fail("completed", "{} calls of a node that stopped got no response", pending_);
  LoseNode();
  node_.reset();
  StartNode(std::move(memory));
  CheckKeyspaces();
}

// Breaks the workers' connections; their mappings and leases stay.
void World::LoseNode() {
  for (Worker& worker : workers_) {
    if (worker.view != nullptr) worker.view->open = false;
    worker.view = nullptr;
    worker.views.clear();
  }
}

void World::OpenSession(Worker& worker) {
  if (worker.view != nullptr) return;
  auto session = node_->sessions->Open({.process_name = "worker",
                                        .engine = EngineOf(worker.tenant),
                                        .uid = 1000,
                                        .staging_bytes = kStagingBytes,
                                        .tenant = TenantName(worker.tenant)});
  if (!session.ok()) return;
  auto view = std::make_shared<View>();
  view->session = *session;
  view->node = nodes_;
  view->tenant = worker.tenant;
  if (history_.profile.own_slabs) {
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets) != 0) {
      Fail("descriptors", "no more sockets");
    }
    view->socket.Reset(sockets[0]);
    view->crumbd_socket.Reset(sockets[1]);
    view->gate =
        std::make_shared<server::SlabGate>(sockets[1], node_->store->slabs().front().bytes);
    view->session->SetSlabs(view->gate);
  }
  view->notices = std::make_shared<server::NoticeQueue>(kNoticesMax, [this, &worker] {
    if (history_.profile.reads_notices) OnCaller([this, &worker] { Notices(worker); });
  });
  view->session->OpenNotices(view->notices);
  const auto staging = view->session->staging();
  view->staging = Mapping::Of(staging->fd(), staging->size(), Mapping::Access::kReadWrite).value();
  worker.views.push_back(view);
  worker.view = std::move(view);
}

bool World::HasSession(Worker& worker) {
  if (worker.view == nullptr) OpenSession(worker);
  return worker.view != nullptr;
}

void World::Disconnect(Worker& worker) {
  if (worker.view == nullptr) return;
  const std::shared_ptr<View> view = std::exchange(worker.view, nullptr);
  view->open = false;
  OnListener([this, view] {
    if (view->gate != nullptr) view->gate->Close();
    view->session->CloseNotices();
    node_->sessions->NoteStreamEnd(*view->session);
    node_->sessions->Disconnect(view->session);
  });
}

void World::Kill(Worker& worker) {
  const auto views = std::exchange(worker.views, {});
  worker.view = nullptr;
  ++worker.life;
  // All at once: no response that arrives while the node registers the first session may find an
  // open one.
  for (const auto& view : views) {
    view->open = false;
    view->slabs.clear();
    view->socket.Reset();
  }
  {
    // Destroyed at the end of the block: the last reference to a view locks mutexes when it goes,
    // so other fibers run meanwhile. They find every session closed and no container half changed.
    const std::vector<HeldLease> leases = std::exchange(worker.leases, {});
    const PoolView pool = std::exchange(worker.pool, PoolView());
    RemoveUsers([&](const DeviceSlot::User& user) { return user.worker == worker.index; });
  }
  for (const auto& view : views) {
    OnListener([this, view] {
      if (view->gate != nullptr) view->gate->Close();
      view->session->CloseNotices();
      node_->sessions->End(view->session);
    });
  }
}

}  // namespace crumb::histories
