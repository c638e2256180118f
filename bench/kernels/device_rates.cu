// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels/device_rates.h"

#include <errno.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace crumb::bench {
namespace {

__global__ void __launch_bounds__(512) ReadKernel(const uint4* data, size_t count, uint32_t* out) {
  constexpr int kUnroll = 8;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  uint32_t sum = 0;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + (kUnroll - 1) * stride < count; i += kUnroll * stride) {
    uint4 x[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) x[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (sum == 0x12345678u) *out = sum;  // keeps the compiler from omitting the loads
}

__global__ void __launch_bounds__(512) CopyKernel(const uint4* from, size_t count, uint4* to) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    uint4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __ldcs(from + i + j * stride);
#pragma unroll
    for (int j = 0; j < 4; ++j) __stcs(to + i + j * stride, x[j]);
  }
}

int Processors() {
  int processors = 0;
  Check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "attribute");
  return processors;
}

}  // namespace

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what,
               cudaGetErrorString(error));
  std::exit(1);
}

double TimeGraph(const std::function<void(cudaStream_t)>& enqueue, int repeats) {
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream), "stream");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
  enqueue(stream);
  cudaGraph_t graph;
  Check(cudaStreamEndCapture(stream, &graph), "end capture");
  cudaGraphExec_t executable;
  Check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "event");
  Check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < repeats + 2; ++i) {
    Check(cudaEventRecord(begin, stream), "record");
    Check(cudaGraphLaunch(executable, stream), "launch");
    Check(cudaEventRecord(end, stream), "record");
    Check(cudaStreamSynchronize(stream), "graph replay");
    float ms = 0.0f;
    Check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 2) times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::sort(times.begin(), times.end());
  return 1e3 * times[times.size() / 2];
}

double ReadRate(const void* data, size_t bytes) {
  uint32_t* out = nullptr;
  Check(cudaMalloc(&out, 4), "malloc");
  double best = 0.0;
  for (const int blocks : {2, 4}) {
    const double us = TimeGraph([&](cudaStream_t stream) {
      ReadKernel<<<Processors() * blocks, 512, 0, stream>>>(static_cast<const uint4*>(data),
                                                            bytes / 16, out);
    });
    best = std::max(best, static_cast<double>(bytes) / us * 1e-6);
  }
  cudaFree(out);
  return best;
}

double CopyRate(void* data, size_t bytes) {
  uint4* first = static_cast<uint4*>(data);
  const size_t count = bytes / 32;
  const double us = TimeGraph([&](cudaStream_t stream) {
    CopyKernel<<<Processors() * 4, 512, 0, stream>>>(first, count, first + count);
  });
  return 32.0 * static_cast<double>(count) / us * 1e-6;
}

}  // namespace crumb::bench
