// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/cluster_kernel.cuh"
#include "kernels/cuda/decode/planned_kernel.cuh"

namespace crumb::kernels::cuda {
namespace {

// Both forms: which of them, and what a cluster does, the plan says. Blocks of all clusters run at
// once. What a kernel's code begins with is there when it starts; what lies 100 KB further is
// missing line by line, in every launch (docs/kernels/decode_attempts.md). So clusters, which have
// less to do, come first: the compiler lays them where they are not jumped to.
template <class T>
__global__ void __launch_bounds__(T::kThreadsMax, 1)
    DecodeEitherKernel(const __grid_constant__ DecodeKernelParams k) {
#if __CUDA_ARCH__ >= 900  // never launched on others
  const int4 words = __ldg(reinterpret_cast<const int4*>(k.plan.clusters) +
                           (blockIdx.x >> k.launch.cluster.blocks_log2));
  const ClusterShare share = {words.x, words.y, words.z, words.w};
  if (share.parts == kNoClusters) {
    RunBlock<T>(k);
  } else if (share.parts > 0) {
    RunCluster<T>(k, ClusterPlace(k, share));
  } else if (k.p.overlap_previous) {
    ptx::WaitForPrevious();
  }
#endif
}

}  // namespace

DecodeKernelPointer FindEitherKernel(int columns) {
  if (columns <= 4) return DecodeEitherKernel<DecodeTraits<128, 1, 1, true, true>>;
  if (columns <= 8) return DecodeEitherKernel<DecodeTraits<128, 1, 1, false, true>>;
  if (columns <= 12) return DecodeEitherKernel<DecodeTraits<128, 1, 2, true, true>>;
  return DecodeEitherKernel<DecodeTraits<128, 1, 2, false, true>>;
}

}  // namespace crumb::kernels::cuda
