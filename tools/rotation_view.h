// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "common/rotation_file.h"
#include "nlohmann/json.hpp"
#include "tools/command_line.h"
#include "tools/command_result.h"

namespace crumb::tools {

// A rotation file's fields and digest, as one object and as a few lines.
nlohmann::json DescribeRotation(const RotationFile& file);
std::string DescribeRotationText(const RotationFile& file);

// Shows what a rotation file holds: fields, and per layer spectrum and expected gain where there
// are eigenvalues.
CommandResult RunRotationShow(const RotationShowCommand& command);

// Checks digest, shapes, orthogonality (error in f32 at most 1e-6) and, for each side whose
// covariance is there, that diag(R' C R) is constant. kDataLoss when one of them does not hold.
CommandResult RunRotationVerify(const RotationVerifyCommand& command);

}  // namespace crumb::tools
