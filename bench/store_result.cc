// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/store_result.h"

#include "fmt/format.h"
#include "tools/text_table.h"

namespace crumb::bench {
namespace {

using nlohmann::json;

double PercentOfLimit(const StoreRow& row) {
  return row.limit_gb_per_s == 0 ? 0 : 100 * row.timed.gb_per_s / row.limit_gb_per_s;
}

// What was not measured, or does not apply, is null: every row has every figure's name.
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
  return table.ToString() + notes +
         fmt::format(
             "limits of this run: memory read {:.1f}, memory copy {:.1f}, loopback TCP "
             "{:.1f} GB/s\n",
             result.memory_read_gb_per_s, result.memory_copy_gb_per_s,
             result.loopback_tcp_gb_per_s);
}

}  // namespace crumb::bench
