// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "tools/command_line.h"
#include "tools/command_result.h"

namespace crumb::tools {

// Makes a rotation file. `progress` is called with the part that is done, 0 to 1.
CommandResult RunCalibrate(const CalibrateCommand& command,
                           const std::function<void(double)>& progress);

// Shows what a rotation file holds.
CommandResult RunRotationShow(const RotationShowCommand& command);

// Checks digest, shapes, orthogonality (error in f32 at most 1e-6) and, where the covariance is
// there, that diag(R' C R) is constant. kDataLoss when one of them does not hold.
CommandResult RunRotationVerify(const RotationVerifyCommand& command);

}  // namespace crumb::tools
