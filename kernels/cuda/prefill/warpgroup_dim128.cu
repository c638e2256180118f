// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/warpgroup_kernel.cuh"

namespace crumb::kernels::cuda::prefill {

CRUMB_WGMMA_PREFILL(128, 1)
CRUMB_WGMMA_PREFILL(128, 2)
CRUMB_WGMMA_PREFILL(128, 4)

}  // namespace crumb::kernels::cuda::prefill
