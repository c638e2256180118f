// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "bench/quality_workload.h"
#include "nlohmann/json.hpp"

// Results of the quality workload as JSON, as tables and as a plot.
namespace crumb::bench {

nlohmann::json QualityJson(const QualityResult& result);
std::string QualityText(const QualityResult& result);
// KL against bits of the largest context, an SVG document. bf16, whose KL is rounding, is left out.
std::string QualityPlot(const QualityResult& result);

}  // namespace crumb::bench
