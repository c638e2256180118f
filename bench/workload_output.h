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

// The results of the codec, replay and simulate workloads as JSON and as tables, and the
// circumstances of a measurement.
namespace crumb::bench {

// Returns the circumstances of a measurement, which every result states beside its figures: the
// machine (CPU, cores, memory, kernel), the commit of this program, the command, and the time.
nlohmann::json RunInfo(int argc, const char* const* argv);

// Return rows as JSON and as tables.
nlohmann::json CodecJson(const std::vector<CodecRow>& rows);
std::string CodecText(const std::vector<CodecRow>& rows);

// A single row becomes the object itself, several rows its member `rows`.
nlohmann::json ReplayJson(const ReplayOptions& options, const std::vector<ReplayRow>& rows);
std::string ReplayText(const std::vector<ReplayRow>& rows);

nlohmann::json SimulateJson(const SimulateOptions& options, const std::vector<SimulateRow>& rows);
std::string SimulateText(const std::vector<SimulateRow>& rows);

}  // namespace crumb::bench
