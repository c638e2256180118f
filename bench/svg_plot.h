// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace crumb::bench {

// One labelled point with the ends of its error bar.
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

// A scatter plot as an SVG document: x linear from 0, y logarithmic. Points with y <= 0 are left
// out. Labels are escaped.
std::string ScatterSvg(const PlotText& text, const std::vector<PlotPoint>& points);

}  // namespace crumb::bench
