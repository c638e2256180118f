// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/instance.cuh"

namespace crumb::kernels::cuda::prefill {

CRUMB_PREFILL_FP16(64, 1)
CRUMB_PREFILL_FP16(64, 2)
CRUMB_PREFILL_FP16(128, 1)
CRUMB_PREFILL_FP16(128, 2)
CRUMB_PREFILL_FP16(128, 4)
CRUMB_PREFILL_FP16(256, 2)
CRUMB_PREFILL_FP16(256, 4)
CRUMB_PREFILL_FP16(256, 8)

}  // namespace crumb::kernels::cuda::prefill
