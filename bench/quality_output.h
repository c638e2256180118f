// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "bench/quality_workload.h"
#include "nlohmann/json.hpp"

// The results of the quality workload as JSON, as tables and as a plot.
namespace crumb::bench {

// A labelled point with the ends of its error bar.
struct PlotPoint {
  std::string label;
  double x = 0.0;
  double y = 0.0;
  double y_low = 0.0;
  double y_high = 0.0;
};

struct PlotText {
  std::string title;
  std::string x_axis;
  std::string y_axis;
};

// Returns a scatter plot as an SVG document; x is linear from 0 and y logarithmic. Points with y <=
// 0 are omitted. Labels are escaped.
std::string ScatterSvg(const PlotText& text, const std::vector<PlotPoint>& points);

// Return the result as JSON and as tables.
nlohmann::json QualityJson(const QualityResult& result);
std::string QualityText(const QualityResult& result);
// Returns a plot of KL against bits at the largest context as an SVG document. bf16, whose KL is
// only rounding, is omitted.
std::string QualityPlot(const QualityResult& result);

}  // namespace crumb::bench
