// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "bench/codec_workload.h"
#include "bench/replay_workload.h"
#include "bench/simulate_workload.h"
#include "nlohmann/json.hpp"

// Results of the codec and replay workloads as JSON and as tables.
namespace crumb::bench {

nlohmann::json CodecJson(const std::vector<CodecRow>& rows);
std::string CodecText(const std::vector<CodecRow>& rows);

// A single row is the object itself, several are its `rows`.
nlohmann::json ReplayJson(const ReplayOptions& options, const std::vector<ReplayRow>& rows);
std::string ReplayText(const std::vector<ReplayRow>& rows);

nlohmann::json SimulateJson(const SimulateOptions& options, const std::vector<SimulateRow>& rows);
std::string SimulateText(const std::vector<SimulateRow>& rows);

}  // namespace crumb::bench
