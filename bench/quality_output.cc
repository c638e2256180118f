// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_output.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "fmt/format.h"
#include "tools/text_table.h"

namespace crumb::bench {
namespace {

constexpr double kWidth = 720, kHeight = 440;
constexpr double kLeft = 78, kRight = 24, kTop = 44, kBottom = 56;
constexpr double kLabelHeight = 14, kLabelWidth = 7.2;  // pixels of one character
constexpr int kLabelPlaces = 40;
constexpr std::array<const char*, 6> kColours = {"#1b6ca8", "#c0392b", "#2e7d32",
                                                 "#8e44ad", "#b9770e", "#34495e"};

std::string Escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

struct Box {
  double left, top, right, bottom;
  bool Meets(const Box& other) const {
    return left < other.right && other.left < right && top < other.bottom && other.top < bottom;
  }
};

class Scatter {
 public:
  explicit Scatter(const std::vector<PlotPoint>& points) {
    for (const PlotPoint& point : points) {
      if (point.y > 0) points_.push_back(point);
    }
    double least = 1.0, most = 1e-9;
    for (const PlotPoint& point : points_) {
      x_max_ = std::max(x_max_, point.x);
      least = std::min(least, point.y_low > 0 ? point.y_low : point.y);
      most = std::max({most, point.y, point.y_high});
    }
    x_max_ = std::ceil(x_max_ + 0.5);
    low_ = static_cast<int>(std::floor(std::log10(least)));
    high_ = std::max(low_ + 1, static_cast<int>(std::ceil(std::log10(most))));
  }

  std::string Draw(const PlotText& text) {
    out_ = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
        "height=\"{1}\" font-family=\"sans-serif\" font-size=\"12\">\n"
        "<rect width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n",
        kWidth, kHeight);
    Text(kWidth / 2, 22, "middle", "#222222", text.title, "font-size=\"15\"");
    Axes(text);
    for (size_t i = 0; i < points_.size(); ++i) Mark(points_[i], kColours[i % kColours.size()]);
    for (size_t i = 0; i < points_.size(); ++i) Label(points_[i], kColours[i % kColours.size()]);
    return out_ + "</svg>\n";
  }

 private:
  double X(double x) const { return kLeft + (kWidth - kLeft - kRight) * x / x_max_; }
  double Y(double y) const {
    const double part = (std::log10(y) - low_) / (high_ - low_);
    return kHeight - kBottom - (kHeight - kTop - kBottom) * std::clamp(part, 0.0, 1.0);
  }

  void Line(double x1, double y1, double x2, double y2, const char* colour) {
    out_ += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\"/>\n", x1, y1,
        x2, y2, colour);
  }
  void Text(double x, double y, const char* anchor, const char* colour, const std::string& text,
            const std::string& more = "") {
    out_ +=
        fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" fill=\"{}\" {}>{}</text>\n",
                    x, y, anchor, colour, more, Escape(text));
  }

  void Axes(const PlotText& text) {
    const double bottom = kHeight - kBottom;
    const int step = std::max(1, static_cast<int>(x_max_ / 8));
    for (int x = 0; x <= x_max_; x += step) {
      Line(X(x), kTop, X(x), bottom, "#eeeeee");
      Text(X(x), bottom + 18, "middle", "#444444", fmt::format("{}", x));
    }
    for (int power = low_; power <= high_; ++power) {
      const double y = Y(std::pow(10.0, power));
      Line(kLeft, y, kWidth - kRight, y, "#dddddd");
      Text(kLeft - 8, y + 4, "end", "#444444", fmt::format("{:g}", std::pow(10.0, power)));
    }
    Line(kLeft, bottom, kWidth - kRight, bottom, "#444444");
    Line(kLeft, kTop, kLeft, bottom, "#444444");
    Text((kLeft + kWidth - kRight) / 2, kHeight - 14, "middle", "#222222", text.x_axis);
    Text(18, (kTop + bottom) / 2, "middle", "#222222", text.y_axis,
         fmt::format("transform=\"rotate(-90 18 {:.1f})\"", (kTop + bottom) / 2));
  }

  void Mark(const PlotPoint& point, const char* colour) {
    if (point.y_high > point.y_low && point.y_low > 0) {
      Line(X(point.x), Y(point.y_low), X(point.x), Y(point.y_high), colour);
    }
    out_ += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4.5\" fill=\"{}\"/>\n", X(point.x),
                        Y(point.y), colour);
    taken_.push_back({X(point.x) - 5, Y(point.y) - 5, X(point.x) + 5, Y(point.y) + 5});
  }

  // Places a label right or left of its point, and moves it up or down until it covers nothing.
  void Label(const PlotPoint& point, const char* colour) {
    const double width = kLabelWidth * static_cast<double>(point.label.size());
    for (int i = 0; i < kLabelPlaces; ++i) {
      const bool left = i % 2 == 1;
      const double shift = (i / 2 % 2 == 0 ? 1 : -1) * ((i / 2 + 1) / 2) * kLabelHeight / 2;
      const double x = left ? X(point.x) - 10 : X(point.x) + 10, y = Y(point.y) + shift;
      const Box box = {left ? x - width : x, y - kLabelHeight / 2, left ? x : x + width,
                       y + kLabelHeight / 2};
      const bool inside = box.left > kLeft && box.right < kWidth - kRight;
      const bool free = std::none_of(taken_.begin(), taken_.end(),
                                     [&](const Box& other) { return box.Meets(other); });
      if ((!inside || !free) && i + 1 < kLabelPlaces) continue;
      taken_.push_back(box);
      return Text(x, y + 4, left ? "end" : "start", colour, point.label);
    }
  }

  std::vector<PlotPoint> points_;
  double x_max_ = 1.0;
  int low_ = -1;  // exponents of ten at the ends of the y axis
  int high_ = 0;
  std::vector<Box> taken_;
  std::string out_;
};

}  // namespace

std::string ScatterSvg(const PlotText& text, const std::vector<PlotPoint>& points) {
  return Scatter(points).Draw(text);
}

namespace {

using nlohmann::json;

void AddRatio(json& out, const std::string& name, const Interval& ratio) {
  if (ratio.value == 0.0) return;
  out[name] = ratio.value;
  out[name + "_low"] = ratio.low;
  out[name + "_high"] = ratio.high;
}

// Returns a clip ratio as it was written: .96 rather than .9599999785.
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
