// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/workload_output.h"

#include <sys/sysinfo.h>
#include <sys/utsname.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <thread>

#include "commit.h"
#include "fmt/chrono.h"
#include "fmt/format.h"
#include "tools/text_table.h"

namespace crumb::bench {
namespace {

std::string CpuModel() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

nlohmann::json Machine() {
  utsname names{};
  ::uname(&names);
  struct sysinfo memory {};
  ::sysinfo(&memory);
  return {{"cpu", CpuModel()},
          {"cores", std::thread::hardware_concurrency()},
          {"memory_bytes", static_cast<uint64_t>(memory.totalram) * memory.mem_unit},
          {"kernel", std::string(names.sysname) + " " + names.release}};
}

}  // namespace

nlohmann::json RunInfo(int argc, const char* const* argv) {
  std::string command = "crumb-bench";  // excludes the path, which differs between machines
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  return {{"machine", Machine()},
          {"commit", kCommit},
          {"command", command},
          {"time", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))}};
}

namespace {

using nlohmann::json;

std::string OrDash(double value, int decimals) {
  return value == 0 ? "-" : fmt::format("{:.{}f}", value, decimals);
}

json ReplayRowJson(const ReplayRow& row) {
  return {{"policy", row.policy},
          {"capacity_gb", row.capacity_gb},
          {"capacity_blocks", row.capacity_blocks},
          {"requests", row.requests},
          {"blocks", row.blocks},
          {"hits", row.hits},
          {"hit_rate", row.hit_rate},
          {"evictions", row.evictions},
          {"seconds", row.seconds},
          {"policy_bytes", row.policy_bytes}};
}

}  // namespace

json CodecJson(const std::vector<CodecRow>& rows) {
  json out = {{"workload", "codec"}, {"limit", "memory read, one core"}, {"rows", json::array()}};
  for (const CodecRow& row : rows) {
    json each = {{"isa", row.isa},
                 {"operation", row.operation},
                 {"gb_per_s", row.gb_per_s},
                 {"percent_of_limit", 100 * row.read_fraction}};
    if (row.microseconds > 0) each["us"] = row.microseconds;
    if (row.context > 0) {
      each.update({{"format", row.format},
                   {"context", row.context},
                   {"heads_per_kv_head", row.heads_per_kv_head}});
    }
    if (row.time_over_bf16 > 0) each["time_over_bf16"] = row.time_over_bf16;
    out["rows"].push_back(std::move(each));
  }
  return out;
}

std::string CodecText(const std::vector<CodecRow>& rows) {
  tools::TextTable table({"isa", "operation", "format", "context", "heads/KV", "us", "GB/s",
                          "% of read", "time/BF16"});
  for (const CodecRow& row : rows) {
    table.AddRow({row.isa, row.operation, row.format, OrDash(row.context, 0),
                  OrDash(row.heads_per_kv_head, 0), OrDash(row.microseconds, 2),
                  OrDash(row.gb_per_s, 2), OrDash(100 * row.read_fraction, 0),
                  OrDash(row.time_over_bf16, 2)});
  }
  return table.ToString();
}

json ReplayJson(const ReplayOptions& options, const std::vector<ReplayRow>& rows) {
  json out = {{"workload", "replay"},
              {"model", options.model},
              {"format", options.format == kernels::PageFormat::kInt2 ? "int2" : "bf16"}};
  if (options.trace_path.empty()) {
    out["synthetic"] = options.synthetic;
    out["seed"] = options.seed;
  }
  if (rows.size() == 1) {
    out.update(ReplayRowJson(rows.front()));
    return out;
  }
  out["rows"] = json::array();
  for (const ReplayRow& row : rows) out["rows"].push_back(ReplayRowJson(row));
  return out;
}

std::string ReplayText(const std::vector<ReplayRow>& rows) {
  tools::TextTable table({"policy", "GB", "blocks of cache", "requests", "blocks", "hits",
                          "hit rate", "evictions", "seconds"});
  for (const ReplayRow& row : rows) {
    table.AddRow({row.policy, fmt::format("{}", row.capacity_gb),
                  fmt::format("{}", row.capacity_blocks), fmt::format("{}", row.requests),
                  fmt::format("{}", row.blocks), fmt::format("{}", row.hits),
                  fmt::format("{:.4f}", row.hit_rate), fmt::format("{}", row.evictions),
                  fmt::format("{:.2f}", row.seconds)});
  }
  return table.ToString();
}

namespace {

const char* NameOf(SimulatedPush push) {
  return push == SimulatedPush::kAlways ? "always" : "reused";
}

json JsonOf(const HitTimes& times) {
  return {{"requests", times.requests}, {"p50_s", times.p50}, {"p99_s", times.p99}};
}

}  // namespace

json SimulateJson(const SimulateOptions& options, const std::vector<SimulateRow>& rows) {
  json out = {{"workload", "simulate"},
              {"model", options.model},
              {"format", options.format == kernels::PageFormat::kInt2 ? "int2" : "bf16"},
              {"capacity_gb", options.capacity_gb},
              {"replicas", options.replicas},
              {"zones", options.network.zones},
              {"rtt_us", options.network.rtt_us},
              {"rtt_zones_us", options.network.rtt_zones_us},
              {"nic_gbit", options.network.nic_gbit},
              {"speedup", options.speedup},
              {"rows", json::array()}};
  if (options.trace_path.empty()) {
    out["synthetic"] = options.synthetic;
    out["seed"] = options.seed;
  }
  for (const SimulateRow& row : rows) {
    out["rows"].push_back({{"nodes", row.nodes},
                           {"push", NameOf(row.push)},
                           {"longest_load", row.longest_load},
                           {"referred", row.referred},
                           {"one_hop", JsonOf(row.one_hop)},
                           {"by_referral", JsonOf(row.by_referral)},
                           {"requests", row.requests},
                           {"blocks", row.blocks},
                           {"local_hits", row.local_hits},
                           {"remote_hits", row.remote_hits},
                           {"hit_rate", row.hit_rate},
                           {"alone_hit_rate", row.alone_hit_rate},
                           {"one_hit_rate", row.one_hit_rate},
                           {"pulled_gb", row.pulled_gb},
                           {"pushed_gb", row.pushed_gb},
                           {"hottest_load", row.hottest_load},
                           {"remapped_on_join", row.remapped_on_join},
                           {"remapped_on_leave", row.remapped_on_leave},
                           {"fanout_mean", row.fanout_mean},
                           {"fanout_max", row.fanout_max},
                           {"fanout_bound", row.fanout_bound},
                           {"fanout_over", row.fanout_over},
                           {"seconds", row.seconds}});
  }
  return out;
}

std::string SimulateText(const std::vector<SimulateRow>& rows) {
  tools::TextTable hits({"push", "nodes", "hit rate", "local", "remote", "alone", "one node",
                         "pulled GB", "pushed GB", "moved: +1", "-1", "queried mean", "max",
                         "bound"});
  tools::TextTable load({"push", "nodes", "hottest/mean", "one prompt/mean", "referred",
                         "one hop: requests", "p50 ms", "p99 ms", "referred: requests", "p50 ms",
                         "p99 ms"});
  const auto ms = [](double seconds) { return fmt::format("{:.2f}", 1000 * seconds); };
  for (const SimulateRow& row : rows) {
    const double blocks = static_cast<double>(std::max<size_t>(row.blocks, 1));
    const std::string nodes = fmt::format("{}", row.nodes);
    hits.AddRow({NameOf(row.push), nodes, fmt::format("{:.4f}", row.hit_rate),
                 fmt::format("{:.4f}", static_cast<double>(row.local_hits) / blocks),
                 fmt::format("{:.4f}", static_cast<double>(row.remote_hits) / blocks),
                 fmt::format("{:.4f}", row.alone_hit_rate), fmt::format("{:.4f}", row.one_hit_rate),
                 fmt::format("{:.1f}", row.pulled_gb), fmt::format("{:.1f}", row.pushed_gb),
                 fmt::format("{:.4f}", row.remapped_on_join),
                 fmt::format("{:.4f}", row.remapped_on_leave),
                 fmt::format("{:.2f}", row.fanout_mean), fmt::format("{}", row.fanout_max),
                 fmt::format("{}", row.fanout_bound)});
    load.AddRow({NameOf(row.push), nodes, fmt::format("{:.2f}", row.hottest_load),
                 fmt::format("{:.2f}", row.longest_load), fmt::format("{:.3f}", row.referred),
                 fmt::format("{}", row.one_hop.requests), ms(row.one_hop.p50), ms(row.one_hop.p99),
                 fmt::format("{}", row.by_referral.requests), ms(row.by_referral.p50),
                 ms(row.by_referral.p99)});
  }
  return hits.ToString() + "\n" + load.ToString();
}

}  // namespace crumb::bench
