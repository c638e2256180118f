// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/rotation_file.h"
#include "nlohmann/json.hpp"
#include "tools/command_line.h"

namespace crumb::client {
class Client;
}

// The commands of `crumb`. Each returns a CommandResult; RunCommandLine picks the one that was
// named, connects to crumbd if the command needs it, and prints the result.
namespace crumb::tools {

// The output of a command, as text and as JSON, and whether it succeeded. Output and an error may
// come together: a damaged page is shown and is an error.
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

// Prints `result` as text, or as JSON if `json` is set. Returns the exit code. Control characters
// from crumbd or a file are escaped, so that they cannot control a terminal.
int PrintResult(const CommandResult& result, bool json, std::ostream& out, std::ostream& error);

// Runs a command line and returns the exit code. Commands that need crumbd connect to it first; the
// others do not. `stats --watch` runs until `interrupted` returns true or a call fails.
int RunCommandLine(const CommandLine& line, const std::function<bool()>& interrupted,
                   std::ostream& out, std::ostream& error);

// Runs a command of the crumbd to which `crumbd` is connected, once. Calls that accept a timeout
// get `timeout`. REQUIRES: the command is none of those below.
CommandResult RunOnCrumbd(const Command& command, Duration timeout, client::Client& crumbd);

// The commands below need no crumbd. `progress` is called with the fraction that is done, 0 to 1.

// Checks a fragment file and describes it, or shows the rows of one tile.
CommandResult RunPageInspect(const PageInspectCommand& command);

// Makes a rotation file.
CommandResult RunCalibrate(const CalibrateCommand& command,
                           const std::function<void(double)>& progress);

// The name of the rotation file in the folder of a model with R_V folded in. Loaders of models read
// every *.safetensors in that folder as weights, so the name has another ending.
inline constexpr char kAbsorbedRotationFile[] = "crumb.rotation";

// Writes a copy of a model directory whose v_proj and o_proj contain R_V, with the rotation file
// for it beside them, and checks for every layer that the product of both projections is unchanged.
// On an error it leaves no files.
CommandResult RunAbsorb(const AbsorbCommand& command, const std::function<void(double)>& progress);

// Describes a rotation file: its fields and, per layer, spectrum and expected gain if it has
// eigenvalues.
CommandResult RunRotationShow(const RotationShowCommand& command);

// Checks the digest, shapes and orthogonality of a rotation file (error in f32 at most 1e-6) and,
// for each side whose covariance it has, that diag(R' C R) is constant. kDataLoss: a check failed.
CommandResult RunRotationVerify(const RotationVerifyCommand& command);

// A rotation file's fields and digest, as a JSON object and as lines of text.
nlohmann::json DescribeRotation(const RotationFile& file);
std::string DescribeRotationText(const RotationFile& file);

// Reads RotationZoo files (one for K, one for V, or both) or a rotation file, and writes a rotation
// file or one RotationZoo file. On an error it writes nothing.
CommandResult RunRotationConvert(const RotationConvertCommand& command);

}  // namespace crumb::tools
