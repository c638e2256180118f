// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The kernels over an engine's blocks; simulated_kernels.cc has the others.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/blocks/row_copies.h"
#include "tests/client/gpu/simulated_device.h"
#include "tests/client/gpu/simulated_kernels.h"
#include "tests/kernels/block_plan.h"

namespace crumb::client {
namespace {

using kernels::Bf16;

void RunMoveBlockRows(const kernels::cuda::MoveBlockRowsParams& p) {
  for (int r = 0; r < p.requests; ++r) {
    const kernels::cuda::BlockRequest& request = p.request[r];
    if (request.state == kernels::cuda::kBlockFailed &&
        p.move == kernels::cuda::BlockMove::kGather) {
      for (int t = 0; t < request.tokens; ++t) {
        std::fill_n(p.out + (request.first + t) * p.out_stride, p.out_elements, Bf16{0x7fc0});
      }
    }
    if (request.state != kernels::cuda::kBlockLive) continue;
    for (int index = 0; index < RowCopies(p); ++index) {
      for (int row = 0; row < 2 * p.kv_heads; ++row) {
        const auto copy = RowCopy(p, request, r, index, row / 2, row % 2 == 1);
        if (copy.from != nullptr) std::memcpy(copy.to, copy.from, size_t{2} * p.head_dim);
      }
    }
  }
}

}  // namespace

absl::Status SimulatedKernels::PlanBlocks(const kernels::cuda::PlanBlocksParams& params,
                                          DeviceStream stream) {
  return device_.Enqueue(stream, [params] { PlanBlocksOnHost(params); });
}

absl::Status SimulatedKernels::MoveBlockRows(const kernels::cuda::MoveBlockRowsParams& params,
                                             DeviceStream stream) {
  return device_.Enqueue(stream, [params] { RunMoveBlockRows(params); });
}

}  // namespace crumb::client
