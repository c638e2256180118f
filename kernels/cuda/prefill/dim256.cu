// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/kernel.cuh"

namespace crumb::kernels::cuda::prefill {

CRUMB_PREFILL(256, 2)
CRUMB_PREFILL(256, 4)
CRUMB_PREFILL(256, 8)

}  // namespace crumb::kernels::cuda::prefill
