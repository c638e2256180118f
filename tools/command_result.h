// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace crumb::tools {

// What a command has to say, for people and for programs, and whether it did its work. Output and
// failure may come together: a damaged page is shown and is an error.
struct CommandResult {
  static CommandResult Done(std::string text, nlohmann::json values) {
    return {std::move(text), std::move(values), absl::OkStatus()};
  }
  static CommandResult Failed(absl::Status status) {
    return {"", nlohmann::json::object(), std::move(status)};
  }

  std::string text;
  nlohmann::json json;
  absl::Status status;
};

}  // namespace crumb::tools
