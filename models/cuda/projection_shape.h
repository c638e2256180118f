// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crumb::models::cuda {

// Elements of the product.
enum class ProjectionOutput : uint8_t { kBf16, kF32 };

struct ProjectionShape {
  int rows = 1;     // of x and y
  int inputs = 1;   // a multiple of 8
  int outputs = 1;  // a multiple of 8
  ProjectionOutput output = ProjectionOutput::kBf16;
  friend bool operator==(const ProjectionShape&, const ProjectionShape&) = default;
};

}  // namespace crumb::models::cuda
