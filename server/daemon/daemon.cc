// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/daemon.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <utility>

#include "common/atomic_file.h"
#include "common/executor.h"
#include "common/logging.h"
#include "common/recent_log.h"
#include "common/status_macros.h"
#include "server/admin/admin_server.h"
#include "server/admin/exporter.h"
#include "server/admin/history.h"
#include "server/admin/status_json.h"
#include "server/admin/status_page.h"
#include "server/base/certificate_watch.h"
#include "server/base/heap_trimmer.h"
#include "server/base/listen_check.h"
#include "server/base/periodic_thread.h"
#include "server/calls/call_context.h"
#include "server/calls/call_sockets.h"
#include "server/calls/keyspace_calls.h"
#include "server/calls/page_calls.h"
#include "server/calls/prefetch_budget.h"
#include "server/calls/status_calls.h"
#include "server/cluster/cluster.h"
#include "server/daemon/descriptor_check.h"
#include "server/daemon/host_growth.h"
#include "server/daemon/memory_check.h"
#include "server/daemon/node_records.h"
#include "server/daemon/version.h"
#include "server/device/device_pools.h"
#include "server/events/event_hub.h"
#include "server/keyspaces/keyspace_registry.h"
#include "server/service/grpc_server.h"
#include "server/session/fd_listener.h"
#include "server/tenants/tenant_table.h"

namespace crumb::server {
namespace {

constexpr Duration kGrowthInterval = std::chrono::milliseconds(250);  // pause between growths
constexpr Duration kHeapTrimInterval = std::chrono::seconds(10);      // pause between heap checks
constexpr uint64_t kHeapTrimBytesMin = uint64_t{32} << 20;  // freed heap that is worth a trim

uint64_t FreeHostBytes() { return MemoryRoom(ReadMemoryFacts("")); }

class RunningDaemon : public Daemon {
 public:
  RunningDaemon(const Options& options, const ProtocolVersions& versions)
      : options_(options),
        protocol_versions_(versions),
        started_(Clock::Real().Now()),
        metrics_(static_cast<size_t>(options.limits.model_labels_max),
                 options.tenants.budget_percent()),
        events_(EventBoundsOf(options.limits, options.tenants.budget_percent()), metrics_),
        prefetches_({static_cast<size_t>(options.limits.prefetches_max),
                     static_cast<size_t>(options.limits.tenant_prefetches_max)}),
        certificates_(options.listen.tls.Certificates(), options.listen.tls.expiry_warning,
                      [] { return CertificateWatch::Instant::clock::now(); }) {}

  ~RunningDaemon() override {
    const absl::Status stopped = Stop();
    if (!stopped.ok()) LogError("stopping: {}", stopped.ToString());
  }

  absl::Status Open(const OpenStore& open_store,
                    std::unique_ptr<storage::HandedOverMemory> handed_over) {
    TakeGrpcLog();
    CRUMB_RETURN_IF_ERROR(CheckListeners(options_));
    CRUMB_ASSIGN_OR_RETURN(const auto needs, CheckMemory(options_.store.host, ReadMemoryFacts("")));
    for (const std::string& line : needs) LogInfo("{}", line);
    CRUMB_ASSIGN_OR_RETURN(const auto descriptors, CheckDescriptors(DescriptorNeedsOf(options_)));
    for (const std::string& line : descriptors) LogInfo("{}", line);
    std::remove(options_.listen.endpoints_file.c_str());  // a crumbd that was killed left it
    CRUMB_RETURN_IF_ERROR(StartAdmin());  // first: it reports that crumbd is not ready yet
    CRUMB_RETURN_IF_ERROR(RecoverStore(open_store, std::move(handed_over)));
    CRUMB_RETURN_IF_ERROR(OpenContext());
    CRUMB_RETURN_IF_ERROR(StartServing());
    return WriteEndpoints();
  }

  Endpoints endpoints() const override {
    return {options_.listen.unix_socket, options_.listen.fd_socket,
            grpc_ == nullptr ? "" : grpc_->tcp_address(),
            admin_ == nullptr ? "" : admin_->address()};
  }

  void Reload(bool always) override {
    certificates_.Look();
    if (tenants_ == nullptr) return;
    const absl::Status read = tenants_->Reload(always);
    if (!read.ok()) LogError("the tenants stay as they were: {}", read.ToString());
  }

  absl::Status Stop() override { return Stop(options_.stop_grace); }

  absl::Status Stop(Duration write_grace) {
    if (std::exchange(stopped_, true)) return absl::OkStatus();
    ready_.store(false);
    if (endpoints_written_) std::remove(options_.listen.endpoints_file.c_str());
    if (grpc_ != nullptr) grpc_->SetServing(false);
    if (store_ != nullptr) store_->EndWaits();
    if (calls_ != nullptr) calls_->Stop();
    if (staging_calls_ != nullptr) staging_calls_->Stop();
    if (grpc_ != nullptr) grpc_->Stop(options_.stop_grace);
    fd_listener_.reset();  // its calls wake it, so they end first
    if (cluster_ != nullptr) cluster_->Stop();
    if (commits_ != nullptr) commits_->Stop();
    if (control_ != nullptr) control_->Stop();
    if (large_calls_ != nullptr) large_calls_->Stop();
    growth_.reset();
    keyspace_upkeep_.reset();
    heap_upkeep_.reset();
    absl::Status stopped = store_ == nullptr ? absl::OkStatus() : store_->Stop(write_grace);
    events_.SetStore(nullptr);
    admin_.reset();
    history_.reset();
    LogInfo("stopped");
    return stopped;
  }

  absl::StatusOr<storage::HandedOverMemory> HandOver() override {
    if (store_ == nullptr) return absl::FailedPreconditionError("crumbd has no store");
    const absl::Status stopped = Stop(Duration::zero());  // the successor writes the queue
    if (!stopped.ok()) LogWarning("stopping for a successor: {}", stopped.ToString());
    return store_->HandOver();
  }

 private:
  absl::Status StartAdmin() {
    if (options_.admin.listen.empty()) return absl::OkStatus();
    CRUMB_ASSIGN_OR_RETURN(
        admin_, AdminServer::Start(options_.admin,
                                   {[this] { return ready_.load(); }, [this] { return Metrics(); },
                                    [this] { return Status(); }, [this] { return Page(); }},
                                   metrics_.admin_closed));
    return absl::OkStatus();
  }

  absl::Status RecoverStore(const OpenStore& open_store,
                            std::unique_ptr<storage::HandedOverMemory> handed_over) {
    storage::StoreEvents events;
    events.durable = [this](const KeyspaceId& keyspace, const PageKey& key) {
      events_.SettleWaits(keyspace, key);
    };
    events.slab_gone = [this](uint32_t slab) { NotifySlabGone(slab); };
    events.page = [this](const storage::PageEvent& event) { events_.Publish(event); };
    storage::StoreStart start;
    start.host_bytes = FreeHostBytes();
    if (options_.tenants.enabled()) {
      start.tenant_part_max_percent = options_.tenants.part_max_percent;
    }
    start.slabs_of_tenants = options_.tenants.own_slabs();
    start.free_memory = [] { return FreeMemory(ReadMemoryFacts("")); };
    CRUMB_ASSIGN_OR_RETURN(epochs_, NextEpochs(EpochsFile(), handed_over != nullptr));
    start.epochs = epochs_;
    start.handed_over = std::move(handed_over);
    // Slabs are shared by all tenants here, even those that one tenant had.
    if (start.handed_over != nullptr && !options_.tenants.own_slabs()) {
      start.handed_over->image.tenants.clear();
    }
    CRUMB_ASSIGN_OR_RETURN(
        store_, open_store(options_.store, Clock::Real(), std::move(events), std::move(start)));
    events_.SetStore(store_.get());
    const storage::StoreStats stats = store_->Stats();
    LogInfo(
        "store is open: host {} bytes, ssd {} bytes ({}); {} pages recovered, {} discarded in "
        "{:.3f} s",
        stats.host.capacity_bytes, stats.ssd.capacity_bytes, stats.ssd.state, stats.recovered_pages,
        stats.discarded_pages, stats.recovery_seconds);
    return absl::OkStatus();
  }

  // Opens and starts all that calls need, in the order of their dependencies.
  absl::Status OpenContext() {
    certificates_.Look();
    if (options_.tenants.own_slabs()) CRUMB_RETURN_IF_ERROR(CheckOwnSlabs());
    CRUMB_RETURN_IF_ERROR(OpenKeyspaces());
    CRUMB_RETURN_IF_ERROR(OpenNode());
    sessions_ = std::make_unique<SessionTable>(options_.sessions, *store_, metrics_,
                                               options_.tenants.budget_percent());
    pools_ = std::make_unique<DevicePools>(options_.device_pools, store_->devices(), Clock::Real(),
                                           metrics_);
    sessions_->SetMemory(pools_.get());
    StartExecutors();
    CRUMB_RETURN_IF_ERROR(OpenCluster());
    CRUMB_RETURN_IF_ERROR(OpenTenants());
    context_ = MakeContext();
    return absl::OkStatus();
  }

  absl::Status OpenKeyspaces() {
    CRUMB_ASSIGN_OR_RETURN(std::string secret, TenantSecret(*store_, options_.cluster.secret_file));
    CRUMB_ASSIGN_OR_RETURN(
        keyspaces_,
        KeyspaceRegistry::Open(*store_, std::move(secret), metrics_.tokens,
                               static_cast<size_t>(options_.limits.keyspaces_max),
                               options_.tenants.own_slabs() ? KeyspaceRegistry::Slabs::kOfEachTenant
                                                            : KeyspaceRegistry::Slabs::kOfAll,
                               options_.tenants.budget_percent()));
    return absl::OkStatus();
  }

  absl::Status OpenNode() {
    CRUMB_ASSIGN_OR_RETURN(node_.id, NodeId(*store_));
    node_.version = kVersion;
    node_.address =
        options_.listen.tcp.empty() ? "unix:" + options_.listen.unix_socket : options_.listen.tcp;
    node_.started = started_;
    return absl::OkStatus();
  }

  std::unique_ptr<Executor> NewExecutor(const char* name, int64_t threads, int64_t queue) const {
    // With tenants one thread more than one tenant may use.
    const int64_t spare = options_.tenants.enabled() ? 1 : 0;
    return std::make_unique<Executor>(Executor::Options{name, static_cast<int>(threads + spare),
                                                        static_cast<size_t>(queue),
                                                        options_.tenants.budget_percent()});
  }

  void StartExecutors() {
    const Limits& limits = options_.limits;
    commits_ = NewExecutor("crumb-commit", limits.commit_threads, limits.commit_queue);
    control_ = NewExecutor("crumb-control", 1, limits.control_queue);
    if (!options_.tenants.enabled()) return;
    large_calls_ = NewExecutor("crumb-large", limits.large_call_threads, limits.large_call_queue);
  }

  absl::Status OpenTenants() {
    if (!options_.tenants.enabled()) return absl::OkStatus();
    CRUMB_ASSIGN_OR_RETURN(tenants_, TenantTable::Open(options_.tenants, [] {
                             return Tenant::Instant::clock::now();
                           }));
    if (!options_.listen.tcp.empty() && !options_.listen.tls.enabled()) {
      LogWarning("tenants' tokens cross listen.tcp in plaintext: set listen.tls");
    }
    quotas_ = std::make_unique<TenantQuotas>(Clock::Real(), [this](const std::string& tenant) {
      return BytesOfTenant(*keyspaces_, *store_, tenant);
    });
    return absl::OkStatus();
  }

  std::unique_ptr<CallContext> MakeContext() {
    return std::make_unique<CallContext>(
        CallContext{.limits = options_.limits,
                    .clock = Clock::Real(),
                    .store = *store_,
                    .keyspaces = *keyspaces_,
                    .sessions = *sessions_,
                    .events = events_,
                    .metrics = metrics_,
                    .commits = *commits_,
                    .control = *control_,
                    .cluster = cluster_.get(),
                    .tenants = tenants_.get(),
                    .caller = {},
                    .pools = pools_.get(),
                    .prefetches = &prefetches_,
                    .quotas = quotas_.get(),
                    .part_max_percent = options_.tenants.budget_percent(),
                    .large_calls = large_calls_.get()});
  }

  absl::Status CheckOwnSlabs() {
    const absl::Status usable = store_->SetTenant(KeyspaceId(), "");
    if (!usable.ok()) {
      return absl::FailedPreconditionError("tenants.shared_memory cannot be own here: " +
                                           std::string(usable.message()));
    }
    return absl::OkStatus();
  }

  absl::Status OpenCluster() {
    if (!options_.cluster.enabled()) return absl::OkStatus();
    const storage::StoreStats stats = store_->Stats();
    CRUMB_ASSIGN_OR_RETURN(
        cluster_,
        Cluster::Open(
            {.options = options_.cluster,
             .transport = options_.transport,
             .tls = options_.listen.tls,
             .node_id = node_.id,
             .version = kVersion,
             .versions = protocol_versions_,
             .capacity_bytes = options_.store.host.bytes_max.value + stats.ssd.capacity_bytes,
             .keys_max = static_cast<size_t>(options_.limits.acquire_keys_max),
             .control_queue = static_cast<size_t>(options_.limits.control_queue),
             .clock = Clock::Real(),
             .store = *store_,
             .keyspaces = *keyspaces_,
             .state_changed = [this](const KeyspaceId& id) { NotifyState(id); }}));
    return absl::OkStatus();
  }

  void NotifyState(const KeyspaceId& id) {
    const auto keyspace = keyspaces_->Find(id);
    if (keyspace == nullptr) return;
    NotifySessions(*context_, {id, keyspace->state.load(), keyspaces_->ReasonOf(id).reason,
                               keyspace->generation.load()});
  }

  // A session that does not receive the notice keeps the memory mapped until it ends.
  void NotifySlabGone(uint32_t slab) {
    if (sessions_ == nullptr) return;
    for (const auto& session : sessions_->List()) {
      const auto slabs = session->slabs();
      if (slabs != nullptr && !slabs->Forget(slab)) continue;
      const auto notices = session->notices();
      if (notices != nullptr && !notices->AddSlabGone(slab)) metrics_.notices_dropped.Add();
    }
  }

  std::string EpochsFile() const { return options_.listen.socket_dir + "/crumbd.epochs"; }

  absl::Status StartServing() {
    CRUMB_ASSIGN_OR_RETURN(const RandomId epoch, RandomId::Make());
    // A start that failed before this one leaves the file as it was.
    CRUMB_RETURN_IF_ERROR(WriteEpochs(EpochsFile(), epochs_));
    CRUMB_ASSIGN_OR_RETURN(grpc_, GrpcServer::Start(options_.listen, *context_, node_));
    // The node receives drops that it missed before it accepts sessions.
    if (cluster_ != nullptr) CRUMB_RETURN_IF_ERROR(cluster_->Join(grpc_->tcp_address()));
    // A tenant's token comes with each call, and may be withdrawn.
    if (tenants_ == nullptr) {
      CRUMB_ASSIGN_OR_RETURN(calls_, CallSockets::Start(*context_, {}));
      CRUMB_ASSIGN_OR_RETURN(
          staging_calls_, CallSockets::Start(*context_, {.thread = "crumb-puts", .copies = true}));
    }
    CRUMB_ASSIGN_OR_RETURN(
        fd_listener_,
        FdListener::Start({.path = options_.listen.fd_socket,
                           .limits = options_.sessions,
                           .epoch = epoch.slot(),
                           .tenants = {.table = tenants_.get(),
                                       .shared_memory = options_.tenants.shared_memory != "off",
                                       .own_slabs = options_.tenants.own_slabs()},
                           .pools = pools_.get(),
                           .calls = calls_.get(),
                           .staging_calls = staging_calls_.get()},
                          *sessions_, *store_, metrics_));
    history_ = std::make_unique<History>(
        History::Options{options_.admin.history_interval,
                         static_cast<size_t>(options_.admin.history_samples_max)},
        [this] { return Sample(); });
    growth_ = std::make_unique<HostGrowth>(*store_, FreeHostBytes, kGrowthInterval);
    StartUpkeep();
    grpc_->SetServing(true);
    ready_.store(true);
    const Endpoints places = endpoints();
    LogInfo("crumbd {} node {} serves at {}, sessions at {}, tcp {}, admin {}", kVersion, node_.id,
            places.unix_socket, places.fd_socket, places.tcp.empty() ? "off" : places.tcp,
            places.admin.empty() ? "off" : places.admin);
    return absl::OkStatus();
  }

  // Ends keyspaces that were not used for limits.keyspace_idle_max, so that they do not use up
  // limits.keyspaces_max for ever, and gives freed memory back.
  void StartUpkeep() {
    keyspace_upkeep_ = std::make_unique<PeriodicThread>(
        "crumb-keyspaces",
        std::clamp<Duration>(options_.limits.keyspace_idle_max / 16, std::chrono::seconds(1),
                             std::chrono::hours(1)),
        [this] {
          metrics_.keyspaces_ended.Add(
              keyspaces_->EndUnused({options_.limits.keyspace_idle_max, Clock::Real().Now(),
                                     std::chrono::system_clock::now(), cluster_ != nullptr}));
        });
    heap_upkeep_ = std::make_unique<PeriodicThread>(
        "crumb-heap", kHeapTrimInterval,
        [trimmer = HeapTrimmer(kHeapTrimBytesMin)]() mutable { trimmer.TrimIfWorthwhile(); });
  }

  std::string EndpointsJson() const {
    const Endpoints places = endpoints();
    return JsonObject({{"unix", places.unix_socket},
                       {"fd_socket", places.fd_socket},
                       {"tcp", places.tcp},
                       {"admin", places.admin},
                       {"pid", std::to_string(::getpid())}});
  }

  absl::Status WriteEndpoints() {
    const absl::Status written =
        WriteAtomically(options_.listen.endpoints_file,
                        [&](std::ostream& file) { file << EndpointsJson() << "\n"; });
    if (!written.ok()) {
      return absl::FailedPreconditionError("listen.endpoints_file: " +
                                           std::string(written.message()));
    }
    endpoints_written_ = true;
    return absl::OkStatus();
  }

  // Empty until everything is there; the admin server ends before anything goes.
  std::string Metrics() const {
    if (!ready_.load()) return "";
    const auto keyspaces = keyspaces_->List();
    const auto bf16 =
        static_cast<size_t>(std::count_if(keyspaces.begin(), keyspaces.end(), [](const auto& k) {
          return k->state.load() == KeyspaceState::kBf16;
        }));
    return ExportText({.metrics = metrics_,
                       .store = store_->Stats(),
                       .sessions = sessions_->totals(),
                       .requested_pages = metrics_.requested_pages.Read(Clock::Real().Now()),
                       .active_keyspaces = keyspaces.size() - bf16,
                       .bf16_keyspaces = bf16,
                       .commit_queue = commits_->queued(),
                       .control_queue = control_->queued(),
                       .large_call_queue = large_calls_ == nullptr ? 0 : large_calls_->queued(),
                       .watchers = events_.watchers(),
                       .version = kVersion,
                       .cluster = cluster_ == nullptr ? ClusterScrape() : ScrapeOf(*cluster_),
                       .tenants = TenantPart(),
                       .certificates = certificates_.Read(),
                       .tls_handshake_failures = TlsHandshakeFailures(),
                       .heap = ReadHeapBytes()});
  }

  TenantScrape TenantPart() const {
    if (tenants_ == nullptr) return {};
    return ScrapeOf(*tenants_, metrics_.reported, [this](const std::string& tenant) {
      return BytesOfTenant(*keyspaces_, *store_, tenant);
    });
  }

  HistorySample Sample() const {
    return SampleOf(Clock::Real().Now(), metrics_.tokens, store_->Stats());
  }

  std::string Page() const {
    if (!ready_.load()) return "";
    StatusView view;
    FillStats(*context_, node_, &view.stats);
    FillNodes(*context_, node_, &view.nodes);
    view.history = history_->Samples();
    view.history.push_back(Sample());
    view.problems = RecentLog::Process().Problems();
    return StatusPage(view);
  }

  std::string Status() const {
    if (!ready_.load()) return "";
    v1::StatsResponse stats;
    FillStats(*context_, node_, &stats);
    return StatusJson(stats, EndpointsJson());
  }

  const Options options_;
  const ProtocolVersions protocol_versions_;
  const TimePoint started_;
  std::atomic<bool> ready_{false};
  bool stopped_ = false;
  bool endpoints_written_ = false;
  NodeInfo node_;

  // Each member uses only those above it.
  ServerMetrics metrics_;
  EventHub events_;
  PrefetchBudget prefetches_;
  CertificateWatch certificates_;
  std::unique_ptr<storage::TieredStore> store_;
  std::unique_ptr<HostGrowth> growth_;
  std::unique_ptr<KeyspaceRegistry> keyspaces_;
  std::unique_ptr<PeriodicThread> keyspace_upkeep_;
  std::unique_ptr<PeriodicThread> heap_upkeep_;
  std::unique_ptr<SessionTable> sessions_;
  std::unique_ptr<DevicePools> pools_;
  std::unique_ptr<Executor> commits_;
  std::unique_ptr<Executor> control_;
  std::unique_ptr<Executor> large_calls_;  // null without tenants_
  std::unique_ptr<Cluster> cluster_;       // null: this node is alone
  std::unique_ptr<TenantTable> tenants_;   // null: callers need no token
  storage::DeletionEpochs epochs_;
  std::unique_ptr<TenantQuotas> quotas_;  // null without tenants_
  std::unique_ptr<CallContext> context_;
  // Null: calls go over gRPC alone.
  std::unique_ptr<CallSockets> calls_;
  std::unique_ptr<CallSockets> staging_calls_;
  std::unique_ptr<FdListener> fd_listener_;
  std::unique_ptr<GrpcServer> grpc_;
  std::unique_ptr<History> history_;
  std::unique_ptr<AdminServer> admin_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(
    const Options& options, const OpenStore& open_store,
    std::unique_ptr<storage::HandedOverMemory> handed_over, const ProtocolVersions& versions) {
  auto daemon = std::make_unique<RunningDaemon>(options, versions);
  CRUMB_RETURN_IF_ERROR(daemon->Open(open_store, std::move(handed_over)));
  return daemon;
}

}  // namespace crumb::server
