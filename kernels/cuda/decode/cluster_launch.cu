// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/kernels.h"

#include <algorithm>
#include <atomic>
#include <bit>

#include "kernels/cuda/decode/cluster_kernel.cuh"

namespace crumb::kernels::cuda {
namespace {

// Cluster sizes in blocks, as powers of two.
constexpr int kSizesLog2[] = {4, 3, 2, 1};
constexpr int kClusterSizes = 4;
// Devices whose occupancy is cached; calls on others fail.
constexpr int kDevicesMax = 64;
// Largest batch for which kAuto uses clusters without a plan: they divide the device by the number
// of sequences, whatever their lengths.
constexpr int kAutoBatchMax = 2;
// Index of the cluster size under a plan. With 2 blocks per cluster most SMs can run a cluster.
constexpr int kByPlanSize = 3;
// A problem gets another cluster only if the blocks of each keep at least this many pages of a full
// sequence.
constexpr int kPagesPerBlockMin = 4;

using Kernel = DecodeKernelPointer;

template <class T>
Kernel Instance(bool fast_path) {
  return fast_path ? DecodeClusterKernel<FastPathTraits<T>> : DecodeClusterKernel<T>;
}

Kernel KernelOf(int query_rows, bool fast_path) {
  if (query_rows <= 4) return Instance<DecodeTraits<128, 1, 1, true, true>>(fast_path);
  if (query_rows <= 8) return Instance<DecodeTraits<128, 1, 1, false, true>>(fast_path);
  if (query_rows <= 12) return Instance<DecodeTraits<128, 1, 2, true, true>>(fast_path);
  return Instance<DecodeTraits<128, 1, 2, false, true>>(fast_path);
}

ClusterLayout LayoutOf(const DecodeShape& shape, const DecodeLaunch& launch, int blocks,
                       bool fast_path = false) {
  return {launch.warps,
          static_cast<uint32_t>(launch.slot_bytes),
          shape.tile.head_dim,
          launch.rows(),
          static_cast<int>(launch.FragmentWords(shape.tile)),
          blocks,
          fast_path && StagesFactors(launch.query_tiles, launch.interleaved)};
}

cudaError_t AllowClusters(Kernel kernel, int shared_bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

void TakeClusters(const DecodeShape& shape, int size, const ClusterLayout& layout,
                  ClusterLaunch* cluster) {
  const int dim_log2 = std::countr_zero(static_cast<unsigned>(shape.tile.head_dim));
  cluster->blocks_log2 = kSizesLog2[size];
  cluster->slice_log2 = dim_log2 - kSizesLog2[size];
  cluster->layout = layout;
}

// A launch configuration with its attributes. It is not copied because it points into itself.
struct ClusterConfig {
  cudaLaunchAttribute attribute[2] = {};
  cudaLaunchConfig_t config = {};

  ClusterConfig(dim3 grid, int blocks, int warps, size_t shared_bytes) {
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = blocks;
    attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
    attribute[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3(32 * warps);
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = attribute;
    config.numAttrs = 1;
  }
  ClusterConfig(const ClusterConfig&) = delete;
  ClusterConfig& operator=(const ClusterConfig&) = delete;
};

// Finds how many clusters of kSizesLog2[size] the device runs at once. The query takes longer than
// a launch, so its result is cached per device; all instances occupy an SM alike.
cudaError_t ClustersAtOnce(int device, int size, int* clusters) {
  static std::atomic<int> known[kDevicesMax][kClusterSizes] = {};  // result + 1; 0: not known
  if (device >= kDevicesMax) return cudaErrorInvalidDevice;
  std::atomic<int>& cached = known[device][size];
  if (cached.load(std::memory_order_relaxed) == 0) {
    DecodeShape shape;
    DecodeLaunch launch;
    launch.warps = WarpsFor(128, 1);
    launch.interleaved = true;
    launch.slot_bytes = shape.tile.int2_bytes();
    const int blocks = 1 << kSizesLog2[size];
    const uint32_t bytes = LayoutOf(shape, launch, blocks).bytes;
    const Kernel kernel = KernelOf(1, false);
    cudaError_t error = AllowClusters(kernel, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    const ClusterConfig one(dim3(blocks), blocks, launch.warps, bytes);
    int found = 0;
    error = cudaOccupancyMaxActiveClusters(&found, kernel, &one.config);
    if (error != cudaSuccess) return error;
    cached.store(found + 1, std::memory_order_relaxed);
  }
  *clusters = cached.load(std::memory_order_relaxed) - 1;
  return cudaSuccess;
}

// Prepares a launch that contains both schedules, if every problem can have a cluster at once. Its
// blocks are those of the clusters that run at once, one fewer than SMs if these are an odd number.
cudaError_t ChooseByPlan(const DecodeShape& shape, int device, int shared_max,
                         DecodeLaunch* launch) {
  const ClusterLayout layout = LayoutOf(shape, *launch, 1 << kSizesLog2[kByPlanSize]);
  if (layout.bytes > static_cast<uint32_t>(shared_max)) return cudaSuccess;
  int clusters = 0;
  const cudaError_t error = ClustersAtOnce(device, kByPlanSize, &clusters);
  if (error != cudaSuccess) return error;
  const int blocks = clusters << kSizesLog2[kByPlanSize];
  if (shape.batch * shape.kv_heads > clusters || 8 * blocks < 7 * launch->blocks) {
    return cudaSuccess;
  }
  launch->blocks = blocks;
  launch->shared_bytes = std::max<size_t>(launch->shared_bytes, layout.bytes);
  TakeClusters(shape, kByPlanSize, layout, &launch->cluster);
  launch->cluster.by_plan = true;
  return cudaSuccess;
}

bool Serves(const DecodeShape& shape) {
  return shape.tile.tokens == 64 && shape.tile.head_dim == 128 && shape.tile.group_size == 128 &&
         shape.query_rows() <= 16;
}

}  // namespace

cudaError_t ChooseClusters(const DecodeShape& shape, DecodeForm form, const DeviceLimits& limits,
                           DecodeLaunch* launch) {
  const bool requested = form == DecodeForm::kClusters;
  const cudaError_t none = requested ? cudaErrorInvalidValue : cudaSuccess;
  if (form == DecodeForm::kPlanned || !Serves(shape)) return none;
  if (!requested && shape.batch_invariant) return none;
  if (limits.major < 9) return none;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (!requested && shape.batch > kAutoBatchMax) {
    return ChooseByPlan(shape, device, limits.shared_bytes, launch);
  }
  const int problems = shape.batch * shape.kv_heads;
  ClusterLayout layout[kClusterSizes];
  int parts[kClusterSizes] = {}, most = 0, smallest = -1;
  for (int size = 0; size < kClusterSizes; ++size) {
    layout[size] = LayoutOf(shape, *launch, 1 << kSizesLog2[size]);
    if (layout[size].bytes > static_cast<uint32_t>(limits.shared_bytes)) continue;
    int clusters = 0;
    error = ClustersAtOnce(device, size, &clusters);
    if (error != cudaSuccess) return error;
    const int wanted = shape.max_pages / (kPagesPerBlockMin << kSizesLog2[size]);
    parts[size] = std::min(clusters / problems, std::max(1, wanted));
    most = std::max(most, parts[size] << kSizesLog2[size]);
    smallest = size;
  }
  // Takes the largest clusters that keep nearly as many blocks busy as any size does, so that fewer
  // partial results are merged. If there are more problems than clusters at once, it takes the
  // smallest.
  int taken = 0;
  while (taken < kClusterSizes &&
         (parts[taken] == 0 || 8 * (parts[taken] << kSizesLog2[taken]) < 7 * most)) {
    ++taken;
  }
  if (taken == kClusterSizes) {
    if (!requested || smallest < 0) return none;
    taken = smallest;
  }
  TakeClusters(shape, taken, layout[taken], &launch->cluster);
  launch->cluster.parts = std::max(1, parts[taken]);
  return cudaSuccess;
}

cudaError_t LaunchClusters(const DecodeKernelParams& params, cudaStream_t stream) {
  DecodeKernelParams k = params;
  ClusterLaunch& launch = k.launch.cluster;
  const DecodeShape& shape = k.p.shape;
  const bool fast_path = IsFastPath(k.p);
  launch.layout = LayoutOf(shape, k.launch, launch.blocks(), fast_path);
  const Kernel kernel = launch.by_plan ? FindFusedKernel(shape.query_rows(), fast_path)
                                       : KernelOf(shape.query_rows(), fast_path);
  const size_t bytes =
      std::max<size_t>(launch.by_plan ? k.launch.shared_bytes : 0, launch.layout.bytes);
  const cudaError_t error = AllowClusters(kernel, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  const dim3 grid = launch.by_plan
                        ? dim3(k.launch.blocks)
                        : dim3(launch.blocks() * launch.parts, shape.kv_heads, shape.batch);
  ClusterConfig all(grid, launch.blocks(), k.launch.warps, bytes);
  all.config.stream = stream;
  if (k.p.overlap_previous) all.config.numAttrs = 2;
  return cudaLaunchKernelEx(&all.config, kernel, k);
}

}  // namespace crumb::kernels::cuda
