// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "calibration/calibrator.h"

namespace crumb::tools {

// What an error of a value costs at the layer's output: C = sum over the KV head's query heads of
// W_o,h' W_o,h, from the o_proj of a model directory, read layer by layer. kInvalidArgument,
// kNotFound name file and tensor: missing weights, another geometry than `shape`'s.
absl::StatusOr<calibration::ValueHessians> OutputProjectionHessians(
    const std::string& model, const calibration::ModelShape& shape);

}  // namespace crumb::tools
