// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crumb::kernels::cuda {

// Elements of K and V rows as the model gives them.
enum class RowType : uint8_t { kBf16, kFp16 };

}  // namespace crumb::kernels::cuda
