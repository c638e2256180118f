// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/histories/node.h"

#include <fstream>
#include <utility>

#include "common/hex.h"
#include "common/sha256.h"
#include "storage/store/open_tiered_store.h"
#include "tests/histories/failure.h"

namespace crumb::histories {
namespace {

constexpr uint64_t kSlabBytes = uint64_t{1} << 20;
constexpr size_t kCallersQueueMax = 1024;
constexpr size_t kKeyspacesMax = 64;

storage::StoreOptions StoreOptionsOf(const Profile& profile) {
  storage::StoreOptions options;
  options.host.bytes_max = ByteSize{profile.host_bytes};
  options.host.slab_bytes = ByteSize{kSlabBytes};
  options.ssd.path = "the fake disk";
  options.ssd.io_threads = 2;
  options.ssd.write_queue_pages_max = profile.write_queue;
  options.ssd.read_queue_pages_max = profile.read_queue;
  options.ssd.admission = profile.second_hit ? "second_hit" : "all";
  options.device.blank_percent_min = profile.blank_percent;
  options.device.demotions_max = 4;
  return options;
}

template <typename T>
T OrFail(absl::StatusOr<T> result, const char* what) {
  if (!result.ok()) Fail("node-starts", "{}: {}", what, result.status().ToString());
  return *std::move(result);
}

}  // namespace

std::string TenantName(int tenant) { return std::string(1, static_cast<char>('a' + tenant)); }

std::string WriteTenants(const std::string& folder) {
  std::string path = folder + "/tenants.json";
  std::ofstream file(path);
  file << R"({"tenants": [)";
  for (int tenant = 0; tenant < 3; ++tenant) {
    const std::string name = TenantName(tenant);
    file << (tenant == 0 ? "" : ", ") << R"({"name": ")" << name << R"(", "token_sha256": ")"
         << HexEncode(Sha256("token of " + name)) << '"';
    if (tenant == 2) file << R"(, "quota_bytes": )" << kQuotaBytes;
    file << "}";
  }
  file << "]}\n";
  return path;
}

server::Limits NodeLimits() {
  server::Limits limits;
  limits.commit_queue = 8;
  limits.control_queue = 8;
  limits.durable_waits_max = 16;
  limits.notices_max = 32;
  return limits;
}

server::SessionLimits NodeSessionLimits() {
  server::SessionLimits limits;
  limits.sessions_max = 10;
  limits.engines_max = 6;
  limits.staging_bytes_max = ByteSize{uint64_t{256} << 10};
  limits.staging_total_bytes_max = ByteSize{uint64_t{1} << 20};
  limits.reservations_max = 4;
  limits.lease_pages_max = 24;
  limits.leases_max = 8;
  return limits;
}

server::PoolOptions NodePoolOptions() {
  server::PoolOptions options;
  options.pools_max = 4;
  options.handles_max = 3;
  options.slots_max = 60;
  options.keep_for = std::chrono::minutes(1);
  return options;
}

Node::Node(const Profile& profile, Disk& disk, const std::string& tenants_file,
           storage::DeletionEpochs epochs, std::unique_ptr<storage::HandedOverMemory> handed_over)
    : limits(NodeLimits()),
      session_limits(NodeSessionLimits()),
      metrics(4),
      events({4, static_cast<size_t>(limits.durable_waits_max)}, metrics) {
  storage::StoreEvents store_events;
  store_events.durable = [this](const KeyspaceId& keyspace, const PageKey& key) {
    events.SettleWaits(keyspace, key);
  };
  store_events.page = [this](const storage::PageEvent& event) { events.Publish(event); };
  store_events.slab_gone = [this](uint32_t slab) { NotifySlabGone(slab); };
  storage::StoreStart start;
  start.epochs = epochs;
  start.slabs_of_tenants = profile.own_slabs;
  start.handed_over = std::move(handed_over);
  if (start.handed_over != nullptr && !profile.own_slabs) start.handed_over->image.tenants.clear();
  store = OrFail(storage::OpenTieredStore(
                     StoreOptionsOf(profile), Clock::Real(), std::move(store_events),
                     [&](storage::FragmentTierEvents tier) { return disk.Open(std::move(tier)); },
                     std::move(start)),
                 "the store");
  events.SetStore(store.get());
  tenants = OrFail(server::TenantTable::Open({.file = tenants_file},
                                             [] { return std::chrono::system_clock::now(); }),
                   "the tenants");
  using Registry = server::KeyspaceRegistry;
  keyspaces = OrFail(
      Registry::Open(*store, "a secret of the test", metrics.tokens, kKeyspacesMax,
                     profile.own_slabs ? Registry::Slabs::kOfEachTenant : Registry::Slabs::kOfAll),
      "the keyspaces");
  sessions = std::make_unique<server::SessionTable>(session_limits, *store, metrics);
  pools = std::make_unique<server::DevicePools>(NodePoolOptions(), store->devices(), Clock::Real(),
                                                metrics);
  sessions->SetMemory(pools.get());
  commits = std::make_unique<Executor>(Executor::Options{"crumb-commit",
                                                         static_cast<int>(limits.commit_threads),
                                                         static_cast<size_t>(limits.commit_queue)});
  control = std::make_unique<Executor>(
      Executor::Options{"crumb-control", 1, static_cast<size_t>(limits.control_queue)});
  callers = std::make_unique<Executor>(Executor::Options{"grpc", 2, kCallersQueueMax});
  listener = std::make_unique<Executor>(Executor::Options{"crumb-sessions", 1, kCallersQueueMax});
}

Node::~Node() { Stop(Duration::zero()); }

void Node::Stop(Duration grace) {
  if (std::exchange(stopped_, true)) return;
  callers->Stop();
  listener->Stop();
  commits->Stop();
  control->Stop();
  store->Stop(grace).IgnoreError();
  events.SetStore(nullptr);
}

std::unique_ptr<storage::HandedOverMemory> Node::HandOver() {
  Stop(Duration::zero());
  absl::StatusOr<storage::HandedOverMemory> memory = store->HandOver();
  return std::make_unique<storage::HandedOverMemory>(OrFail(std::move(memory), "handing over"));
}

server::CallContext Node::ContextOf(int tenant) {
  return {limits,     Clock::Real(), *store,        *keyspaces,
          *sessions,  events,        metrics,       *commits,
          *control,   nullptr,       tenants.get(), {tenants->Find(TenantName(tenant))},
          pools.get()};
}

void Node::NotifySlabGone(uint32_t slab) {
  if (sessions == nullptr) return;
  for (const auto& session : sessions->List()) {
    const auto slabs = session->slabs();
    if (slabs != nullptr && !slabs->Forget(slab)) continue;
    const auto notices = session->notices();
    if (notices != nullptr && !notices->AddSlabGone(slab)) metrics.notices_dropped.Add();
  }
}

}  // namespace crumb::histories
