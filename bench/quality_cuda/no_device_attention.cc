// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_cuda/device_attention.h"

namespace crumb::bench {

absl::StatusOr<AttentionBackend> OpenDeviceAttention() {
  return absl::FailedPreconditionError(
      "this crumb-bench was built without CUDA: use --device cpu, or configure with "
      "-DCRUMB_CUDA=ON");
}

}  // namespace crumb::bench
