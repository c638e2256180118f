// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "calibration/file_activations.h"
#include "tools/command_line.h"

namespace crumb::tools {

// The activations that `crumb calibrate --activations` names, and what is known of their model.
struct ActivationFiles {
  std::unique_ptr<calibration::FileActivations> source;
  int max_positions = 0;  // 0: nobody says
};

// RoPE, name and longest context come from the options, or else the files' metadata, or else
// config.json of --model. kInvalidArgument: nobody says how positions turn, or what is said does
// not fit; errors of FileActivations::Open.
absl::StatusOr<ActivationFiles> OpenActivationFiles(const CalibrateCommand& command);

}  // namespace crumb::tools
