// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "nlohmann/json_fwd.hpp"
#include "tools/fragment_report.h"

// A fragment's report as text for people and as JSON for programs.
namespace crumb::tools {

std::string FragmentText(const FragmentReport& report);
nlohmann::json FragmentJson(const FragmentReport& report);

std::string TileRowsText(std::span<const TileRow> rows);
nlohmann::json TileRowsJson(std::span<const TileRow> rows);

}  // namespace crumb::tools
