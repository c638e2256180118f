// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/cluster_kernel.cuh"
#include "kernels/cuda/decode/planned_kernel.cuh"

namespace crumb::kernels::cuda {
namespace {

// One kernel that contains both schedules; the plan says for each block which one to run. Blocks of
// all clusters run at once. Code near the kernel's entry is in the instruction cache when the
// kernel starts, while code 100 KB further on is missed line by line in every launch
// (docs/kernels/decode_attempts.md). Clusters, whose calls are shorter, therefore come first: the
// compiler places their code where control falls through.
template <class T>
__global__ void __launch_bounds__(T::kThreadsMax, 1)
    DecodeFusedKernel(const __grid_constant__ DecodeKernelParams k) {
#if __CUDA_ARCH__ >= 900  // never launched on older devices
  const int4 words = __ldg(reinterpret_cast<const int4*>(k.plan.clusters) +
                           (blockIdx.x >> k.launch.cluster.blocks_log2));
  const ClusterWork work = {words.x, words.y, words.z, words.w};
  if (work.parts == kNoClusters) {
    RunBlock<T>(k);
  } else if (work.parts > 0) {
    RunCluster<T>(k, ClusterPlace(k, work));
  } else if (k.p.overlap_previous) {
    ptx::WaitForPrevious();
  }
#endif
}

template <class T>
DecodeKernelPointer Instance(bool fast_path) {
  return fast_path ? DecodeFusedKernel<FastPathTraits<T>> : DecodeFusedKernel<T>;
}

}  // namespace

DecodeKernelPointer FindFusedKernel(int query_rows, bool fast_path) {
  if (query_rows <= 4) return Instance<DecodeTraits<128, 1, 1, true, true>>(fast_path);
  if (query_rows <= 8) return Instance<DecodeTraits<128, 1, 1, false, true>>(fast_path);
  if (query_rows <= 12) return Instance<DecodeTraits<128, 1, 2, true, true>>(fast_path);
  return Instance<DecodeTraits<128, 1, 2, false, true>>(fast_path);
}

}  // namespace crumb::kernels::cuda
