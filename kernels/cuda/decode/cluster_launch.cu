// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode/cluster_launch.h"

#include <algorithm>
#include <atomic>
#include <bit>

#include "kernels/cuda/decode/cluster_kernel.cuh"

namespace crumb::kernels::cuda {
namespace {

// Blocks of a cluster.
constexpr int kSizesLog2[] = {4, 3, 2, 1};
constexpr int kClusterSizes = 4;
constexpr int kDevicesMax = 64;
// Most sequences for which kAuto has no plan: clusters divide the device by sequences, whatever
// their lengths.
constexpr int kAutoBatchMax = 2;
// Blocks of a cluster where the plan decides: with 2, most blocks run at once.
constexpr int kByPlanSize = 3;
// A cluster's blocks get at least so many pages of a full sequence before a pair gets another.
constexpr int kPagesPerBlockMin = 4;

using Kernel = DecodeKernelPointer;

template <class T>
Kernel Instance(bool plain) {
  return plain ? DecodeClusterKernel<PlainTraits<T>> : DecodeClusterKernel<T>;
}

Kernel KernelOf(int columns, bool plain) {
  if (columns <= 4) return Instance<DecodeTraits<128, 1, 1, true, true>>(plain);
  if (columns <= 8) return Instance<DecodeTraits<128, 1, 1, false, true>>(plain);
  if (columns <= 12) return Instance<DecodeTraits<128, 1, 2, true, true>>(plain);
  return Instance<DecodeTraits<128, 1, 2, false, true>>(plain);
}

ClusterLayout LayoutOf(const DecodeShape& shape, const DecodeLaunch& launch, int blocks,
                       bool plain = false) {
  return {launch.warps,
          static_cast<uint32_t>(launch.slot_bytes),
          shape.tile.head_dim,
          launch.rows(),
          static_cast<int>(launch.FragmentWords(shape.tile)),
          blocks,
          plain && StagesFactors(launch.column_tiles, launch.pair)};
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

// A launch configuration; it points to its own attributes.
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

// Clusters of kSizesLog2[size] that the device runs at once. A device's answer is kept: it takes
// longer than a launch, and all instances fill a multiprocessor alike.
cudaError_t ClustersAtOnce(int device, int size, int* clusters) {
  static std::atomic<int> known[kDevicesMax][kClusterSizes] = {};  // 1 more than the answer
  if (device >= kDevicesMax) return cudaErrorInvalidDevice;
  std::atomic<int>& answer = known[device][size];
  if (answer.load(std::memory_order_relaxed) == 0) {
    DecodeShape shape;
    DecodeLaunch launch;
    launch.warps = WarpsFor(128, 1);
    launch.pair = true;
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
    answer.store(found + 1, std::memory_order_relaxed);
  }
  *clusters = answer.load(std::memory_order_relaxed) - 1;
  return cudaSuccess;
}

// Both forms in one launch, where all pairs have a cluster at once. Blocks are those of the
// clusters at once, which on an odd number of multiprocessors are fewer.
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
         shape.columns() <= 16;
}

}  // namespace

cudaError_t ChooseClusters(const DecodeShape& shape, DecodeForm form, const DeviceLimits& limits,
                           DecodeLaunch* launch) {
  const bool asked = form == DecodeForm::kClusters;
  const cudaError_t none = asked ? cudaErrorInvalidValue : cudaSuccess;
  if (form == DecodeForm::kPlanned || !Serves(shape)) return none;
  if (!asked && shape.batch_invariant) return none;
  if (limits.major < 9) return none;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (!asked && shape.batch > kAutoBatchMax) {
    return ChooseByPlan(shape, device, limits.shared_bytes, launch);
  }
  const int pairs = shape.batch * shape.kv_heads;
  ClusterLayout layout[kClusterSizes];
  int parts[kClusterSizes] = {}, most = 0, smallest = -1;
  for (int size = 0; size < kClusterSizes; ++size) {
    layout[size] = LayoutOf(shape, *launch, 1 << kSizesLog2[size]);
    if (layout[size].bytes > static_cast<uint32_t>(limits.shared_bytes)) continue;
    int clusters = 0;
    error = ClustersAtOnce(device, size, &clusters);
    if (error != cudaSuccess) return error;
    const int wanted = shape.max_pages / (kPagesPerBlockMin << kSizesLog2[size]);
    parts[size] = std::min(clusters / pairs, std::max(1, wanted));
    most = std::max(most, parts[size] << kSizesLog2[size]);
    smallest = size;
  }
  // The largest clusters that use nearly as many blocks as any: fewer parts to merge. Where there
  // are more pairs than clusters at once, the smallest.
  int taken = 0;
  while (taken < kClusterSizes &&
         (parts[taken] == 0 || 8 * (parts[taken] << kSizesLog2[taken]) < 7 * most)) {
    ++taken;
  }
  if (taken == kClusterSizes) {
    if (!asked || smallest < 0) return none;
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
  const bool plain = !launch.by_plan && IsPlain(k.p);
  if (plain) launch.layout = LayoutOf(shape, k.launch, launch.blocks(), true);
  const Kernel kernel =
      launch.by_plan ? FindEitherKernel(shape.columns()) : KernelOf(shape.columns(), plain);
  const size_t bytes = launch.by_plan ? k.launch.shared_bytes : launch.layout.bytes;
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
