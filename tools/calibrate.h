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

}  // namespace crumb::tools
