// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/admin/status_page.h"

#include <algorithm>
#include <array>
#include <ctime>

#include "common/hex.h"
#include "common/printable.h"
#include "common/wire_enums.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

constexpr int kBarsMax = 90;
constexpr double kChartWidth = 900;
constexpr double kChartHeight = 120;
constexpr int kRefusedMax = 20;
constexpr size_t kKeyspacesMax = 100;  // limit of the page; /status.json has all

constexpr char kHead[] = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="10">
<link rel="icon" href="data:,"><title>crumbd</title>
<style>
:root{--ink:#1a1d21;--paper:#fafaf8;--card:#fff;--line:#dcdcd6;--dim:#63686f;--host:#1f7a5c;--ssd:#3b6fb6;
--device:#8a4fb0;--remote:#b7791f;--saved:#1f7a5c;--bad:#b3261e;--warn:#8a6100}
@media(prefers-color-scheme:dark){:root{--ink:#e6e6e3;--paper:#15171a;--card:#1d2024;--line:#33373d;
--dim:#9aa0a8;--host:#4cc19a;--ssd:#7aa9ec;--device:#c18ae6;--remote:#e0ac5a;--saved:#4cc19a;--bad:#ff8a80;--warn:#f0c060}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:70rem;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.45 system-ui,sans-serif}
h1{font-size:1.3rem;margin:0}h2{font-size:1rem;margin:0 0 .6rem}
p{margin:.2rem 0;color:var(--dim);overflow-wrap:anywhere}a{color:var(--ssd)}
section{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.9rem;margin:.9rem 0;min-width:0}
.big{font-size:1.8rem;font-weight:600;color:var(--ink);font-variant-numeric:tabular-nums}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:0 .9rem}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-top:1px solid var(--line);vertical-align:top}
th{color:var(--dim);font-weight:500;border-top:0;white-space:nowrap}td.n,th.n{text-align:right}
td.t{overflow-wrap:anywhere;min-width:7rem}code{font:.85em ui-monospace,monospace}
svg{display:block;width:100%;height:7.5rem;background:var(--paper);border-radius:.25rem}
.key i{display:inline-block;width:.7em;height:.7em;margin:0 .3em 0 .8em;border-radius:2px}
.host{fill:var(--host);background:var(--host)}.ssd{fill:var(--ssd);background:var(--ssd)}
.device{fill:var(--device);background:var(--device)}.remote{fill:var(--remote);background:var(--remote)}
.saved{fill:var(--saved)}.error,.off{color:var(--bad)}.warning{color:var(--warn)}
</style></head><body>
)";

// Text as it may stand in an element or a quoted attribute, made visible and bounded.
std::string Escaped(std::string_view text) {
  constexpr size_t kTextBytesMax = 1024;
  std::string escaped;
  for (const char c : Printable(text, kTextBytesMax)) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string Bytes(double bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 1, kUnits[unit]);
}

std::string Percent(double part, double whole) {
  return whole > 0 ? fmt::format("{:.1f} %", 100 * part / whole) : "-";
}

std::string Span(double seconds) {
  if (seconds < 120) return fmt::format("{:.0f} s", seconds);
  if (seconds < 7200) return fmt::format("{:.0f} min", seconds / 60);
  if (seconds < 172800) return fmt::format("{:.1f} h", seconds / 3600);
  return fmt::format("{:.1f} d", seconds / 86400);
}

constexpr std::array kHitTiers = {TokenTier::kHost, TokenTier::kSsd, TokenTier::kDevice,
                                  TokenTier::kRemote};

double Tokens(const HistorySample& sample, TokenTier tier) {
  return static_cast<double>(sample.lookup_tokens[static_cast<size_t>(tier)]);
}

double AllTokens(const HistorySample& sample) {
  double all = 0;
  for (int tier = 0; tier < kTokenTierCount; ++tier) {
    all += Tokens(sample, static_cast<TokenTier>(tier));
  }
  return all;
}

// A chart is bars over time; bar i stands for the time from sample edges[i] to edges[i + 1].
std::vector<size_t> BarEdges(size_t samples) {
  const size_t bars = std::min<size_t>(kBarsMax, samples - 1);
  std::vector<size_t> edges;
  for (size_t i = 0; i <= bars; ++i) edges.push_back(bars == 0 ? 0 : i * (samples - 1) / bars);
  return edges;
}

// Rectangles of `heights` on top of `bases`, both parts of 1.
std::string BarPath(const char* style, const std::vector<double>& bases,
                    const std::vector<double>& heights) {
  std::string path;
  const double width = kChartWidth / static_cast<double>(heights.size());
  for (size_t i = 0; i < heights.size(); ++i) {
    if (heights[i] <= 0) continue;
    path += fmt::format("M{:.1f} {:.1f}h{:.1f}v{:.1f}h{:.1f}z", static_cast<double>(i) * width,
                        kChartHeight * (1 - bases[i]), width * 0.9, -kChartHeight * heights[i],
                        -width * 0.9);
  }
  return fmt::format("<path class=\"{}\" d=\"{}\"/>", style, path);
}

std::string Chart(const std::string& label, const std::string& paths) {
  return fmt::format(
      "<svg viewBox=\"0 0 {} {}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}\">{}"
      "</svg>",
      kChartWidth, kChartHeight, label, paths);
}

std::string HitChart(const std::vector<HistorySample>& history) {
  const std::vector<size_t> edges = BarEdges(history.size());
  std::vector<double> bases(edges.size() - 1, 0);
  std::string paths;
  for (const TokenTier tier : kHitTiers) {
    std::vector<double> heights;
    for (size_t i = 0; i + 1 < edges.size(); ++i) {
      const HistorySample& from = history[edges[i]];
      const HistorySample& to = history[edges[i + 1]];
      const double all = AllTokens(to) - AllTokens(from);
      heights.push_back(all > 0 ? (Tokens(to, tier) - Tokens(from, tier)) / all : 0);
    }
    paths += BarPath(TokenTierName(tier), bases, heights);
    for (size_t i = 0; i < bases.size(); ++i) bases[i] += heights[i];
  }
  return Chart("hit rate over time", paths);
}

std::string SavedChart(const std::vector<HistorySample>& history, double most) {
  const std::vector<size_t> edges = BarEdges(history.size());
  std::vector<double> heights;
  for (size_t i = 1; i < edges.size(); ++i) {
    heights.push_back(most > 0 ? static_cast<double>(history[edges[i]].saved_bytes) / most : 0);
  }
  return Chart("bytes saved over time",
               BarPath("saved", std::vector<double>(heights.size(), 0), heights));
}

std::string Charts(const StatusView& view) {
  const std::vector<HistorySample>& history = view.history;
  if (history.empty()) return "";
  const HistorySample& first = history.front();
  const HistorySample& last = history.back();
  const double span = std::chrono::duration<double>(last.when - first.when).count();
  double hits = 0;
  std::string legend;
  for (const TokenTier tier : kHitTiers) {
    hits += Tokens(last, tier) - Tokens(first, tier);
    legend += fmt::format("<i class=\"{0}\"></i>{0}", TokenTierName(tier));
  }
  uint64_t most = 0;
  for (const HistorySample& sample : history) most = std::max(most, sample.saved_bytes);
  return fmt::format(
      "<div class=\"row\"><section><h2>Hit rate</h2><p><span class=\"big\" "
      "id=\"hit-rate\">{}</span>"
      " of {:.0f} tokens, last {}</p>{}<p class=\"key\">0 to 100 %{}</p></section>"
      "<section><h2>Bytes saved</h2><p><span class=\"big\" id=\"saved\">{}</span> less than in BF16"
      "</p>{}<p>0 to {}, last {}</p></section></div>\n",
      Percent(hits, AllTokens(last) - AllTokens(first)), AllTokens(last) - AllTokens(first),
      Span(span), HitChart(history), legend, Bytes(static_cast<double>(last.saved_bytes)),
      SavedChart(history, static_cast<double>(most)), Bytes(static_cast<double>(most)), Span(span));
}

std::string Tiers(const v1::StatsResponse& stats) {
  std::string rows;
  for (const auto& tier : stats.tiers()) {
    const auto resident = static_cast<double>(tier.resident_bytes());
    const auto logical = static_cast<double>(tier.resident_logical_bytes());
    rows += fmt::format(
        "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>"
        "<td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"t {}\">{}</td></tr>",
        TierName(static_cast<Tier>(tier.tier())), Bytes(static_cast<double>(tier.capacity_bytes())),
        Bytes(resident), Percent(resident, static_cast<double>(tier.capacity_bytes())),
        Bytes(logical), tier.pages(), tier.state() == "active" ? "on" : "off",
        Escaped(tier.state()));
  }
  return fmt::format(
      "<section><h2>Tiers</h2><div class=\"wide\"><table><tr><th>tier</th><th class=\"n\">capacity"
      "</th><th class=\"n\">used</th><th class=\"n\">fill</th><th class=\"n\">as BF16</th>"
      "<th class=\"n\">pages</th><th>state</th></tr>{}</table></div></section>\n",
      rows);
}

std::string Nodes(const v1::ListNodesResponse& nodes) {
  std::string rows;
  std::string notes;
  if (!nodes.trouble().empty()) {
    notes += fmt::format("<p class=\"warning\">{}</p>", Escaped(nodes.trouble()));
  }
  const int refused = nodes.refused_size();
  for (int i = 0; i < std::min(refused, kRefusedMax); ++i) {
    notes += fmt::format("<p class=\"warning\">refused: {}</p>", Escaped(nodes.refused(i)));
  }
  if (refused > kRefusedMax) {
    notes += fmt::format("<p class=\"warning\">{} more are refused</p>", refused - kRefusedMax);
  }
  for (const auto& node : nodes.nodes()) {
    rows += fmt::format(
        "<tr><td class=\"t\"><code>{}</code>{}</td><td class=\"t\">{}</td><td>{}</td></tr>",
        Escaped(node.id()), node.self() ? " (this one)" : "", Escaped(node.address()),
        Escaped(node.version()));
  }
  return fmt::format(
      "<section><h2>Nodes</h2><div class=\"wide\"><table><tr><th>id</th><th>address</th>"
      "<th>version</th></tr>{}</table></div>{}</section>\n",
      rows, notes);
}

std::string Keyspaces(const v1::StatsResponse& stats) {
  const auto count = static_cast<size_t>(stats.keyspaces_size());
  std::string rows;
  for (size_t i = 0; i < std::min(count, kKeyspacesMax); ++i) {
    const auto& keyspace = stats.keyspaces(static_cast<int>(i));
    const std::string& id = keyspace.keyspace();
    const bool bf16 = keyspace.state() == v1::KEYSPACE_STATE_BF16;
    rows += fmt::format(
        "<tr><td class=\"t\">{}</td><td><code>{}</code></td><td class=\"n\">{}</td>"
        "<td class=\"t {}\">{}{}{}</td></tr>",
        Escaped(keyspace.model()),
        HexEncode({reinterpret_cast<const uint8_t*>(id.data()), std::min<size_t>(id.size(), 6)}),
        keyspace.generation(), bf16 ? "warning" : "on", bf16 ? "bf16" : "active",
        keyspace.state_reason().empty() ? "" : ": ", Escaped(keyspace.state_reason()));
  }
  const std::string more =
      count > kKeyspacesMax
          ? fmt::format("<p>{} more in <a href=\"/status.json\">status.json</a></p>",
                        count - kKeyspacesMax)
          : "";
  return fmt::format(
      "<section><h2>Keyspaces</h2><div class=\"wide\"><table><tr><th>model</th><th>id</th>"
      "<th class=\"n\">generation</th><th>state</th></tr>{}</table></div>{}{}</section>\n",
      rows, count == 0 ? "<p>none yet</p>" : "", more);
}

std::string Problems(const StatusView& view) {
  std::string rows;
  for (auto problem = view.problems.rbegin(); problem != view.problems.rend(); ++problem) {
    const std::time_t when = std::chrono::system_clock::to_time_t(problem->when);
    std::tm utc{};
    ::gmtime_r(&when, &utc);
    char text[32];
    std::strftime(text, sizeof(text), "%F %T", &utc);
    const char* severity = problem->severity == Severity::kError ? "error" : "warning";
    rows += fmt::format("<tr><td>{}</td><td class=\"{}\">{}</td><td class=\"t\">{}</td></tr>", text,
                        severity, severity, Escaped(problem->text));
  }
  return fmt::format(
      "<section><h2>Recent warnings and errors</h2>{}</section>\n",
      rows.empty() ? "<p>none</p>"
                   : "<div class=\"wide\"><table><tr><th>UTC</th><th></th><th>what</th></tr>" +
                         rows + "</table></div>");
}

}  // namespace

std::string StatusPage(const StatusView& view) {
  const v1::StatsResponse& stats = view.stats;
  return kHead +
         fmt::format(
             "<h1>crumbd {}</h1><p>node <code>{}</code>, up {}; {} sessions, {} leases, {} "
             "reservations</p>\n",
             Escaped(stats.version()), Escaped(stats.node_id()), Span(stats.uptime_seconds()),
             stats.sessions(), stats.leases(), stats.reservations()) +
         Charts(view) + Tiers(stats) + Nodes(view.nodes) + Keyspaces(stats) + Problems(view) +
         "<p><a href=\"/status.json\">status.json</a> <a href=\"/metrics\">metrics</a> "
         "<a href=\"/readyz\">readyz</a> <a href=\"/healthz\">healthz</a></p>\n</body></html>\n";
}

}  // namespace crumb::server
