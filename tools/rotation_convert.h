// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tools/command_line.h"
#include "tools/command_result.h"

namespace crumb::tools {

// Reads RotationZoo files (one for K, one for V, or both) or a rotation file, and writes a rotation
// file or one RotationZoo file. Nothing is written on an error.
CommandResult RunRotationConvert(const RotationConvertCommand& command);

}  // namespace crumb::tools
