// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// 32 vector registers of 16 floats: 24 sums, 2 of b, 1 of a.
#define CRUMB_MATMUL_WIDTH 16
#define CRUMB_MATMUL_ROWS 12
#include "models/matmul_kernels_body.h"

namespace crumb::models {

const MatmulKernels kAvx512Matmul = {Pack, Multiply, Dot, Widen};

}  // namespace crumb::models
