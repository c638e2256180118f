// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/decode/decode_attention.h"
#include "kernels/cuda/decode/plan.h"
#include "kernels/tile.h"

// Parameters, selection and launch of the decode kernels. Template instances are compiled in
// generated sources (kernels/cuda/CMakeLists.txt). Internal to the CUDA back end.
namespace crumb::kernels::cuda {

// The parameters of all decode kernels, passed as a grid constant: the call's arguments, with plan
// and workspace resolved into pointers. A launch processes query rows first_row to first_row +
// query_rows - 1 of every KV head; a call with more rows has several launches.
struct DecodeKernelParams {
  DecodeAttentionParams p;
  PlanView plan;
  WorkspaceView workspace;
  DecodeLaunch launch;
  int heads;       // query heads per KV head
  int first_row;   // first query row of this launch
  int query_rows;  // query rows of this launch
  float scale;
  float log2_scale;  // scale * log2(e)
};

// Returns whether the fast path kernels (FastPathTraits) serve a call.
inline bool IsFastPath(const DecodeAttentionParams& p) {
  return p.shape.q_tokens == 1 && p.soft_cap <= 0.0f && p.window <= 0 && p.rotation_k != nullptr &&
         p.rotation_v != nullptr;
}

// --- The planned schedule ----------------------------------------------------------------------

using DecodeLauncher = cudaError_t (*)(const DecodeKernelParams&, cudaStream_t);

// Returns null if there is no kernel for the shape. `bulk` selects the kernel with bulk copies
// (compute capability 9 and later).
DecodeLauncher FindDecodeKernel(const TileShape& tile, int query_rows, bool bulk);

// Return the instance for a head_dim and its number of groups, or null if there is none for so many
// query rows: NarrowInstance for up to 8, WideInstance for up to 16.
template <int dim, int groups>
DecodeLauncher NarrowInstance(int query_rows, bool bulk);
template <int dim, int groups>
DecodeLauncher WideInstance(int query_rows, bool bulk);

// --- The cluster schedule ----------------------------------------------------------------------
//
// The cluster schedule of decode attention: every (sequence, KV head) has one thread block cluster
// or several, whose blocks divide its tokens evenly and exchange partial results through
// distributed shared memory (docs/kernels/decode.md). How many clusters each has is decided by the
// plan or, without one, by the grid.

// Decides whether and how clusters serve a shape on the current device. Sets launch->cluster, or
// leaves it empty if the planned schedule is used; if the plan decides between both, launch->blocks
// and shared memory are made to serve both. The decision depends on the device, the form and the
// shape's sizes alone. Returns cudaErrorInvalidValue if `form` is kClusters and clusters do not
// serve the shape. REQUIRES: the rest of `launch` is set.
cudaError_t ChooseClusters(const DecodeShape& shape, DecodeForm form, const DeviceLimits& limits,
                           DecodeLaunch* launch);

// Enqueues the kernel of a launch with clusters.
cudaError_t LaunchClusters(const DecodeKernelParams& k, cudaStream_t stream);

using DecodeKernelPointer = void (*)(const DecodeKernelParams);
// Returns the kernel that contains both schedules and follows the plan, for up to 16 query rows.
DecodeKernelPointer FindFusedKernel(int query_rows, bool fast_path);

}  // namespace crumb::kernels::cuda
