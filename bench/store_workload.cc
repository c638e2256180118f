// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/store_workload.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "bench/child_process.h"
#include "bench/fragment_set.h"
#include "bench/measure.h"
#include "bench/raw_limits.h"
#include "bench/servers_under_test.h"
#include "bench/store_planes.h"
#include "bench/ucx_plane.h"
#include "common/fd_channel.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "tools/text_table.h"

namespace crumb::bench {
namespace {

// Bytes of all bodies together, which exceed the last cache.
constexpr size_t kBodiesBytes = 128 << 20;
constexpr size_t kLimitBytes = 256 << 20;
constexpr Duration kLimitDuration = std::chrono::seconds(1);
constexpr size_t kManyPages = 1600;
// Bytes of the pages that get reads in turn; with the largest fragments a quarter of host memory.
constexpr size_t kResidentBytes = 384 << 20;
constexpr size_t kStreamPages = 16;
constexpr size_t kBatchPages = 32;  // batch in which a worker publishes them

bool Contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

absl::Status CheckNames(const char* what, const std::vector<std::string>& given,
                        const std::vector<std::string>& known) {
  for (const std::string& name : given) {
    if (!Contains(known, name)) {
      return absl::InvalidArgumentError(
          fmt::format("unknown {} '{}': one of {}", what, name, fmt::join(known, ", ")));
    }
  }
  return absl::OkStatus();
}

// Measures one figure after the other with one crumbd or Redis.
class Session {
 public:
  Session(const StoreWorkloadOptions& options, std::vector<int> pids, StoreResult& result)
      : options_(options), pids_(std::move(pids)), result_(result) {}

  absl::Status RunShm(client::Client& client, const FragmentSet& fragments);
  absl::Status RunPlane(const std::string& plane, StorePlane& store, const FragmentSet& fragments,
                        size_t pages_per_call);
  absl::Status MeasurePut(const std::string& plane, StorePlane& store, const FragmentSet& fragments,
                          size_t pages_per_call);
  absl::Status RunAcquire(ShmPlane& shm, const FragmentSet& fragments);
  absl::Status RunIdle();

 private:
  struct Figure {
    std::string plane;
    std::string operation;
    size_t fragment_bytes = 0;
    size_t pages_per_call = 0;
    bool moves_bytes = true;
    std::string limit;
  };

  absl::Status Measure(const Figure& figure, const TimedCall& call);
  double LimitOf(const std::string& name) const;
  absl::Status Fill(StorePlane& store, size_t first, size_t pages);
  // The first page number that no figure has written before, because a page that exists already is
  // not written again.
  size_t FreshPages() { return next_page_ += 10'000'000; }
  // The pages that get reads in turn.
  static size_t ResidentPages(const FragmentSet& fragments) {
    return std::max<size_t>(kStreamPages, kResidentBytes / fragments.fragment_bytes());
  }

  const StoreWorkloadOptions& options_;
  const std::vector<int> pids_;
  StoreResult& result_;
  size_t next_page_ = 0;
};

double Session::LimitOf(const std::string& name) const {
  if (name == "memory read") return result_.memory_read_gb_per_s;
  if (name == "memory copy") return result_.memory_copy_gb_per_s;
  return name == "loopback TCP" ? result_.loopback_tcp_gb_per_s : 0;
}

absl::Status Session::Measure(const Figure& figure, const TimedCall& call) {
  if (Interrupted()) return absl::OkStatus();
  fmt::print(stderr, "store: {} {} {}, {} a call\n", figure.plane, figure.operation,
             tools::FormatBytes(figure.fragment_bytes), figure.pages_per_call);
  TimedCallsOptions timed;
  timed.seconds = options_.seconds;
  timed.other_pids = pids_;
  if (figure.moves_bytes) timed.bytes_per_call = figure.fragment_bytes * figure.pages_per_call;
  StoreRow row;
  row.plane = figure.plane;
  row.operation = figure.operation;
  row.fragment_bytes = figure.fragment_bytes;
  row.pages_per_call = figure.pages_per_call;
  row.limit = figure.limit;
  row.limit_gb_per_s = LimitOf(figure.limit);
  CRUMB_ASSIGN_OR_RETURN(row.timed, RunTimedCalls(timed, call));
  if (row.timed.calls > 0) result_.rows.push_back(std::move(row));
  return absl::OkStatus();
}

absl::Status Session::Fill(StorePlane& store, size_t first, size_t pages) {
  for (size_t page = 0; page < pages && !Interrupted(); page += kStreamPages) {
    CRUMB_RETURN_IF_ERROR(store.Put(first + page, std::min(kStreamPages, pages - page)));
  }
  return absl::OkStatus();
}

absl::Status Session::RunPlane(const std::string& plane, StorePlane& store,
                               const FragmentSet& fragments, size_t pages_per_call) {
  const size_t resident = ResidentPages(fragments) / pages_per_call * pages_per_call;
  const bool shm = plane == "shm";
  if (Contains(options_.operations, "get")) {
    const size_t first = FreshPages();
    CRUMB_RETURN_IF_ERROR(Fill(store, first, resident));
    CRUMB_RETURN_IF_ERROR(Measure({plane, "get", fragments.tiles_bytes(), pages_per_call, true,
                                   shm ? "memory read" : "loopback TCP"},
                                  Whole([&](size_t index) {
                                    return store.Get(first + index * pages_per_call % resident,
                                                     pages_per_call);
                                  })));
  }
  if (!Contains(options_.operations, "put")) return absl::OkStatus();
  return MeasurePut(plane, store, fragments, pages_per_call);
}

absl::Status Session::MeasurePut(const std::string& plane, StorePlane& store,
                                 const FragmentSet& fragments, size_t pages_per_call) {
  const size_t first = FreshPages();
  return Measure({plane, "put", fragments.tiles_bytes(), pages_per_call, true,
                  plane == "shm" ? "memory copy" : "loopback TCP"},
                 Whole([&](size_t index) {
                   return store.Put(first + index * pages_per_call, pages_per_call);
                 }));
}

absl::Status Session::RunAcquire(ShmPlane& shm, const FragmentSet& fragments) {
  const size_t first = FreshPages();
  CRUMB_RETURN_IF_ERROR(Fill(shm, first, kManyPages));
  for (const size_t pages : {size_t{1}, kManyPages}) {
    std::vector<PageKey> keys;
    for (size_t page = 0; page < pages; ++page) keys.push_back(fragments.Key(first + page));
    CRUMB_RETURN_IF_ERROR(
        Measure({"shm", "acquire", fragments.tiles_bytes(), pages, false, ""},
                [&](size_t) { return shm.Acquire(first, keys, Duration::zero()); }));
  }
  return absl::OkStatus();
}

absl::Status Session::RunShm(client::Client& client, const FragmentSet& fragments) {
  ShmPlane shm(client, fragments);
  const bool smallest = fragments.tiles_bytes() * kManyPages < options_.host_bytes.value / 2;
  if (Contains(options_.operations, "acquire") && smallest) {
    CRUMB_RETURN_IF_ERROR(RunAcquire(shm, fragments));
  }
  CRUMB_RETURN_IF_ERROR(RunPlane("shm", shm, fragments, 1));
  if (Contains(options_.operations, "put")) {
    CRUMB_RETURN_IF_ERROR(MeasurePut("shm", shm, fragments, kBatchPages));
  }
  if (!Contains(options_.operations, "get")) return absl::OkStatus();
  const size_t resident = ResidentPages(fragments);
  const size_t first = FreshPages();
  CRUMB_RETURN_IF_ERROR(Fill(shm, first, resident));
  return Measure({"shm", "get-copy", fragments.tiles_bytes(), 1, true, "memory copy"},
                 Whole([&](size_t index) { return shm.GetCopy(first + index % resident, 1); }));
}

absl::Status Session::RunIdle() {
  fmt::print(stderr, "store: idle for {} s\n", options_.idle_seconds);
  const double before = CpuSecondsOf(pids_);
  const TimePoint begin = Clock::Real().Now();
  const auto length =
      std::chrono::duration_cast<Duration>(std::chrono::duration<double>(options_.idle_seconds));
  while (Clock::Real().Now() - begin < length && !Interrupted()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  StoreRow row;
  row.plane = "none";
  row.operation = "idle";
  row.timed.seconds = std::chrono::duration<double>(Clock::Real().Now() - begin).count();
  // The CPU clocks of other processes may run back by some microseconds.
  row.core_percent = 100 * std::max(0.0, CpuSecondsOf(pids_) - before) / row.timed.seconds;
  result_.rows.push_back(std::move(row));
  return absl::OkStatus();
}

// Returns the process that listens in a socket folder.
absl::StatusOr<int> PidOf(const std::string& socket_dir) {
  CRUMB_ASSIGN_OR_RETURN(const UniqueFd socket, ConnectFdChannel(socket_dir + "/crumbd.fd.sock"));
  CRUMB_ASSIGN_OR_RETURN(const PeerCredentials peer, CredentialsOf(socket.get()));
  return peer.pid;
}

absl::Status RunCrumbdPlanes(const StoreWorkloadOptions& options, StoreResult& result) {
  std::unique_ptr<CrumbdUnderTest> own;
  std::string socket_dir = options.socket_dir;
  int pid = 0;
  if (socket_dir.empty()) {
    CrumbdSettings settings;
    settings.program = options.crumbd;
    settings.host_bytes = options.host_bytes;
    settings.host_policy = "lru";  // get reads the pages that were written last
    CRUMB_ASSIGN_OR_RETURN(own, CrumbdUnderTest::Start(settings));
    socket_dir = own->socket_dir();
    pid = own->pid();
  } else {
    CRUMB_ASSIGN_OR_RETURN(pid, PidOf(socket_dir));
  }
  CRUMB_ASSIGN_OR_RETURN(const auto client, ConnectTo(socket_dir));
  Session session(options, {pid}, result);
  for (const size_t bytes : options.fragment_bytes) {
    FragmentSet fragments(fmt::format("{}-{}", bytes, ::getpid()), bytes, kBodiesBytes, kManyPages);
    CRUMB_RETURN_IF_ERROR(BindKeyspace(*client, fragments));
    if (Contains(options.planes, "shm")) {
      CRUMB_RETURN_IF_ERROR(session.RunShm(*client, fragments));
    }
    if (Contains(options.planes, "grpc")) {
      GrpcPlane plane(*client, fragments);
      CRUMB_RETURN_IF_ERROR(session.RunPlane("grpc", plane, fragments, 1));
      CRUMB_RETURN_IF_ERROR(session.RunPlane("grpc", plane, fragments, kStreamPages));
    }
  }
  if (!Contains(options.operations, "idle")) return absl::OkStatus();
  return session.RunIdle();
}

absl::Status RunUcx(const StoreWorkloadOptions& options, StoreResult& result) {
  for (const size_t bytes : options.fragment_bytes) {
    const size_t pages = std::max<size_t>(kStreamPages, kBodiesBytes / bytes);
    CRUMB_ASSIGN_OR_RETURN(const auto server,
                           FragmentServer::Start(options.fragment_server, bytes, pages));
    for (const size_t in_flight : {size_t{1}, kStreamPages}) {
      if (Interrupted()) return absl::OkStatus();
      StoreRow row;
      row.plane = "ucx-tcp";
      row.operation = "get";
      row.fragment_bytes = FragmentSet("size", bytes, 1, 1).tiles_bytes();
      row.pages_per_call = 1;
      row.in_flight = in_flight;
      row.limit = "loopback TCP";
      row.limit_gb_per_s = result.loopback_tcp_gb_per_s;
      fmt::print(stderr, "store: ucx-tcp get {}, {} in flight\n",
                 tools::FormatBytes(row.fragment_bytes), in_flight);
      TimedCallsOptions timed;
      timed.seconds = options.seconds;
      timed.other_pids = {server->pid()};
      timed.bytes_per_call = row.fragment_bytes;
      CRUMB_ASSIGN_OR_RETURN(row.timed,
                             RunUcxFetches(timed, server->address(), bytes, pages, in_flight));
      result.rows.push_back(std::move(row));
    }
  }
  return absl::OkStatus();
}

absl::Status RunRedis(const StoreWorkloadOptions& options, StoreResult& result) {
  std::unique_ptr<RedisUnderTest> own;
  std::string host = "127.0.0.1";
  int port = 0;
  std::vector<int> pids;
  if (options.redis == "auto") {
    CRUMB_ASSIGN_OR_RETURN(own, RedisUnderTest::Start());
    port = own->port();
    pids.push_back(own->pid());
  } else {
    const size_t colon = options.redis.rfind(':');
    host = options.redis.substr(0, colon);
    std::from_chars(options.redis.data() + colon + 1, options.redis.data() + options.redis.size(),
                    port);
  }
  Session session(options, pids, result);
  for (const size_t bytes : options.fragment_bytes) {
    FragmentSet fragments("redis", bytes, kBodiesBytes, kManyPages);
    CRUMB_ASSIGN_OR_RETURN(const auto plane, OpenRedisPlane(host, port, fragments));
    CRUMB_RETURN_IF_ERROR(session.RunPlane("redis", *plane, fragments, 1));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status StoreWorkloadOptions::Validate() const {
  CRUMB_RETURN_IF_ERROR(CheckNames("plane", planes, {"shm", "ucx-tcp", "grpc", "ssd"}));
  CRUMB_RETURN_IF_ERROR(CheckNames("operation", operations, {"acquire", "put", "get", "idle"}));
  if (!socket_dir.empty() && Contains(planes, "ssd")) {
    return absl::InvalidArgumentError(
        "plane ssd needs a crumbd with little host memory: leave --socket-dir out");
  }
  const size_t colon = redis.rfind(':');
  if (!redis.empty() && redis != "auto" && (colon == std::string::npos || colon == 0)) {
    return absl::InvalidArgumentError("--redis is HOST:PORT or auto, not '" + redis + "'");
  }
  return absl::OkStatus();
}

absl::StatusOr<StoreResult> RunStoreWorkload(const StoreWorkloadOptions& options) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  if (!options.socket_dir.empty()) CRUMB_RETURN_IF_ERROR(PidOf(options.socket_dir).status());
  StoreResult result;
  fmt::print(stderr, "store: limits of this machine\n");
  result.memory_read_gb_per_s = MemoryReadGbPerS(kLimitBytes, kLimitDuration);
  result.memory_copy_gb_per_s = MemoryCopyGbPerS(kLimitBytes, kLimitDuration);
  CRUMB_ASSIGN_OR_RETURN(result.loopback_tcp_gb_per_s, LoopbackTcpGbPerS(kLimitDuration));
  result.beside_load = options.beside_load;
  CRUMB_ASSIGN_OR_RETURN(const auto busy_loops, StartBusyLoops(options.beside_load));
  if (Contains(options.planes, "shm") || Contains(options.planes, "grpc")) {
    CRUMB_RETURN_IF_ERROR(RunCrumbdPlanes(options, result));
  }
  if (Contains(options.planes, "ucx-tcp") && Contains(options.operations, "get") &&
      !Interrupted()) {
    CRUMB_RETURN_IF_ERROR(RunUcx(options, result));
  }
  if (Contains(options.planes, "ssd") && !Interrupted()) {
    CRUMB_RETURN_IF_ERROR(RunSsdPairs(options, result));
  }
  if (!options.redis.empty() && !Interrupted()) CRUMB_RETURN_IF_ERROR(RunRedis(options, result));
  return result;
}

namespace {

using nlohmann::json;

double PercentOfLimit(const StoreRow& row) {
  return row.limit_gb_per_s == 0 ? 0 : 100 * row.timed.gb_per_s / row.limit_gb_per_s;
}

// Every row has the names of all figures; those that were not measured or do not apply are null.
json Measured(double value) { return value == 0 ? json() : json(value); }

json RowJson(const StoreRow& row) {
  json out = {{"plane", row.plane}, {"op", row.operation}};
  if (row.operation == "idle") {
    out["core_percent"] = row.core_percent;
    out["seconds"] = row.timed.seconds;
    return out;
  }
  out.update({{"size", row.fragment_bytes},
              {"pages_per_call", row.pages_per_call},
              {"in_flight", row.in_flight},
              {"calls", row.timed.calls},
              {"seconds", Measured(row.timed.seconds)},
              {"p50_us", Measured(row.timed.p50_us)},
              {"p99_us", Measured(row.timed.p99_us)},
              {"gbps", Measured(row.timed.gb_per_s)},
              {"cpu_s_per_gb", Measured(row.timed.cpu_seconds_per_gb)}});
  if (row.limit_gb_per_s > 0) {
    out.update({{"limit", row.limit},
                {"limit_gb_per_s", row.limit_gb_per_s},
                {"percent_of_limit", PercentOfLimit(row)}});
  }
  if (row.ratio_to_raw > 0) out["ratio_to_raw"] = row.ratio_to_raw;
  return out;
}

std::string OrDash(double value, const char* format) {
  return value == 0 ? "-" : fmt::format(fmt::runtime(format), value);
}

}  // namespace

json StoreJson(const StoreResult& result) {
  json out = {{"memory_read_gb_per_s", result.memory_read_gb_per_s},
              {"memory_copy_gb_per_s", result.memory_copy_gb_per_s},
              {"loopback_tcp_gb_per_s", result.loopback_tcp_gb_per_s},
              {"beside_load", result.beside_load},
              {"rows", json::array()}};
  for (const StoreRow& row : result.rows) out["rows"].push_back(RowJson(row));
  return out;
}

std::string StoreText(const StoreResult& result) {
  tools::TextTable table({"plane", "operation", "fragment", "pages/call", "in flight", "calls",
                          "p50 us", "p99 us", "GB/s", "CPU-s/GB", "limit", "% of it"});
  std::string notes;
  for (const StoreRow& row : result.rows) {
    if (row.operation == "idle") {
      notes += fmt::format("idle crumbd: {:.2f} % of a core over {:.0f} s\n", row.core_percent,
                           row.timed.seconds);
      continue;
    }
    table.AddRow({row.plane, row.operation, tools::FormatBytes(row.fragment_bytes),
                  fmt::format("{}", row.pages_per_call), fmt::format("{}", row.in_flight),
                  fmt::format("{}", row.timed.calls), OrDash(row.timed.p50_us, "{:.1f}"),
                  OrDash(row.timed.p99_us, "{:.1f}"), OrDash(row.timed.gb_per_s, "{:.2f}"),
                  OrDash(row.timed.cpu_seconds_per_gb, "{:.2f}"), row.limit,
                  OrDash(PercentOfLimit(row), "{:.0f}")});
    if (row.ratio_to_raw > 0) {
      notes += fmt::format("ssd get of {} / raw read, median of the pairs: {:.2f}\n",
                           tools::FormatBytes(row.fragment_bytes), row.ratio_to_raw);
    }
  }
  if (result.beside_load > 0) {
    notes += fmt::format("{} processes computed beside every figure\n", result.beside_load);
  }
  return table.ToString() + notes +
         fmt::format(
             "limits of this run: memory read {:.1f}, memory copy {:.1f}, loopback TCP "
             "{:.1f} GB/s\n",
             result.memory_read_gb_per_s, result.memory_copy_gb_per_s,
             result.loopback_tcp_gb_per_s);
}

}  // namespace crumb::bench
