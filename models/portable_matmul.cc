// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// 16 vector registers of 4 floats (SSE2, NEON): 8 sums, 2 of b, 1 of a.
#define CRUMB_MATMUL_WIDTH 4
#define CRUMB_MATMUL_ROWS 4
#include "models/matmul_kernels_body.h"

namespace crumb::models {

const MatmulKernels kPortableMatmul = {Pack, Multiply, Dot, Widen};

}  // namespace crumb::models
