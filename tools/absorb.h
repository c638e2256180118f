// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "tools/command_line.h"
#include "tools/command_result.h"

namespace crumb::tools {

// The rotation file that a model with R_V folded in is served with, in the model's folder. Loaders
// take every *.safetensors there for weights, so it is not called that.
inline constexpr char kAbsorbedRotationFile[] = "crumb.rotation";

// Writes a copy of a model directory whose v_proj and o_proj hold R_V, beside it the rotation file
// to serve it with, and checks for every layer that the product of both projections is the same.
// `progress` is called with the part that is done, 0 to 1. On an error nothing is left.
CommandResult RunAbsorb(const AbsorbCommand& command, const std::function<void(double)>& progress);

}  // namespace crumb::tools
