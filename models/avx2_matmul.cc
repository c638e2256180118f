// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// 16 vector registers of 8 floats: 12 sums, 2 of b, 1 of a.
#define CRUMB_MATMUL_WIDTH 8
#define CRUMB_MATMUL_ROWS 6
#include "models/matmul_kernels_body.h"

namespace crumb::models {

const MatmulKernels kAvx2Matmul = {Pack, Multiply, Dot, Widen};

}  // namespace crumb::models
