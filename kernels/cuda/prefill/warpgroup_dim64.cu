// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/warpgroup_kernel.cuh"

namespace crumb::kernels::cuda::prefill {

CRUMB_WGMMA_PREFILL(64, 1)
CRUMB_WGMMA_PREFILL(64, 2)

}  // namespace crumb::kernels::cuda::prefill
