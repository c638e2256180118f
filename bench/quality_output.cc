// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_output.h"

#include <cmath>

#include "bench/svg_plot.h"
#include "fmt/format.h"
#include "tools/text_table.h"

namespace crumb::bench {
namespace {

using nlohmann::json;

void AddRatio(json& out, const std::string& name, const Interval& ratio) {
  if (ratio.value == 0.0) return;
  out[name] = ratio.value;
  out[name + "_low"] = ratio.low;
  out[name + "_high"] = ratio.high;
}

// A clip ratio as it was written, .96 rather than .9599999785.
double Rounded(float value) { return std::round(double{value} * 1e6) / 1e6; }

json BinsJson(const std::vector<RecallBin>& bins) {
  json out = json::array();
  for (const RecallBin& bin : bins) {
    out.push_back({{"from", bin.from},
                   {"to", bin.to},
                   {"passkeys", bin.count},
                   {"recall", bin.recall.mean},
                   {"recall_error", bin.recall.error}});
  }
  return out;
}

json RowJson(const QualityRow& row) {
  json out = {{"method", row.method},
              {"context", row.context},
              {"bits", row.bits},
              {"bits_with_windows", row.bits_with_windows},
              {"kl", row.kl.mean},
              {"kl_error", row.kl.error},
              {"kl_prefill", row.kl_prefill.mean},
              {"kl_prefill_error", row.kl_prefill.error},
              {"ppl", row.perplexity.mean},
              {"ppl_error", row.perplexity.error},
              {"top1", row.top1.mean},
              {"top1_error", row.top1.error}};
  if (row.clip_k > 0) out["clip_k"] = Rounded(row.clip_k);
  if (row.clip_v > 0) out["clip_v"] = Rounded(row.clip_v);
  AddRatio(out, "kl_over_oscar", row.kl_over_oscar);
  AddRatio(out, "kl_over_oscar_best_clip", row.kl_over_best_oscar);
  AddRatio(out, "kl_over_crumb_context", row.kl_over_long_calibration);
  if (!row.has_passkeys) return out;
  out["passkey"] = row.passkey.recall.mean;
  out["passkey_error"] = row.passkey.recall.error;
  out["passkey_below_bf16"] = row.passkey.below_bf16.value;
  out["passkey_below_bf16_low"] = row.passkey.below_bf16.low;
  out["passkey_below_bf16_high"] = row.passkey.below_bf16.high;
  out["passkey_answer_nll"] = row.passkey.answer_nll.mean;
  out["passkey_answer_nll_error"] = row.passkey.answer_nll.error;
  out["passkey_by_depth"] = BinsJson(row.passkey.by_depth);
  out["passkey_by_distance"] = BinsJson(row.passkey.by_distance);
  return out;
}

std::string PlusMinus(const Estimate& estimate, int decimals) {
  return fmt::format("{:.{}f} +- {:.{}f}", estimate.mean, decimals, estimate.error, decimals);
}

std::string IntervalText(const Interval& interval) {
  if (interval.value == 0.0) return "-";
  return fmt::format("{:.3f} [{:.3f}, {:.3f}]", interval.value, interval.low, interval.high);
}

std::string ContextTable(const QualityResult& result, int context) {
  tools::TextTable table({"method", "bits", "KL", "KL prefill", "ppl", "top-1", "KL / oscar, 95 %",
                          "KL / best oscar, 95 %"});
  for (const QualityRow& row : result.rows) {
    if (row.context != context) continue;
    table.AddRow({row.method, fmt::format("{:.3f}", row.bits), PlusMinus(row.kl, 4),
                  fmt::format("{:.4f}", row.kl_prefill.mean), PlusMinus(row.perplexity, 3),
                  PlusMinus(row.top1, 3), IntervalText(row.kl_over_oscar),
                  IntervalText(row.kl_over_best_oscar)});
  }
  return table.ToString();
}

std::string PasskeyTable(const QualityResult& result) {
  tools::TextTable table(
      {"method", "recall", "below bf16, points, 95 %", "answer NLL", "recall by distance"});
  for (const QualityRow& row : result.rows) {
    if (!row.has_passkeys) continue;
    std::string bins;
    for (const RecallBin& bin : row.passkey.by_distance) {
      if (bin.count > 0) bins += fmt::format("{:.3f} ", bin.recall.mean);
    }
    const Interval& lost = row.passkey.below_bf16;
    table.AddRow(
        {row.method, PlusMinus(row.passkey.recall, 4),
         fmt::format("{:.2f} [{:.2f}, {:.2f}]", 100 * lost.value, 100 * lost.low, 100 * lost.high),
         PlusMinus(row.passkey.answer_nll, 4), bins});
  }
  return table.ToString();
}

}  // namespace

json QualityJson(const QualityResult& result) {
  json out = {{"workload", "quality"},
              {"device", result.device},
              {"sequences", result.sequences},
              {"contexts", result.contexts},
              {"exact_ppl", result.exact_perplexity},
              {"prefill_block", result.prefill_block},
              {"passkeys", result.passkeys},
              {"passkey_documents", result.passkey_documents},
              {"passkeys_together", result.passkeys_together},
              {"calibration_shared_bytes", result.shared_bytes},
              {"interrupted", result.interrupted},
              {"rows", json::array()}};
  for (const QualityRow& row : result.rows) out["rows"].push_back(RowJson(row));
  return out;
}

std::string QualityText(const QualityResult& result) {
  std::string text;
  for (size_t i = 0; i < result.contexts.size(); ++i) {
    text += fmt::format(
        "{}{} sequences of {} tokens, perplexity {:.3f} with exact keys and values\n\n",
        text.empty() ? "" : "\n", result.sequences, result.contexts[i], result.exact_perplexity[i]);
    text += ContextTable(result, result.contexts[i]);
  }
  if (result.passkeys == 0) return text;
  text += fmt::format("\n{} passkeys in {} texts of up to {} tokens, {}\n\n", result.passkeys,
                      result.passkey_documents, result.contexts.back(),
                      result.passkeys_together ? "all of a text's together" : "one at a time");
  return text + PasskeyTable(result);
}

std::string QualityPlot(const QualityResult& result) {
  std::vector<PlotPoint> points;
  for (const QualityRow& row : result.rows) {
    if (row.context != result.contexts.back() || row.bits >= 16.0) continue;
    points.push_back({.label = row.method,
                      .x = row.bits,
                      .y = row.kl.mean,
                      .y_low = row.kl.mean - row.kl.error,
                      .y_high = row.kl.mean + row.kl.error});
  }
  return ScatterSvg({.title = fmt::format("KL divergence against BF16 history, {} tokens",
                                          result.contexts.back()),
                     .x_axis = "bits per element of history",
                     .y_axis = "KL, nats per token"},
                    points);
}

}  // namespace crumb::bench
