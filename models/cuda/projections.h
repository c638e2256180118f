// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/tile.h"
#include "models/cuda/cublas.h"
#include "models/cuda/projection_shape.h"

// A model's matrix products, y = x W' for bf16 rows, sums in fp32: by cuBLAS, and for few rows,
// where that is faster, by a kernel of ours.
namespace crumb::models::cuda {

// Owns cuBLAS's handles and workspace on the current device. Calls run one after another on one
// stream at a time. Not thread-safe.
class Projections {
 public:
  // Null: `error` says what is missing.
  static std::unique_ptr<Projections> Open(std::string* error);
  ~Projections();
  Projections(const Projections&) = delete;
  Projections& operator=(const Projections&) = delete;

  // Enqueues y = scale * x W'; can be captured. False: cuBLAS refused.
  //   x  device [rows, inputs]
  //   w  device [outputs, inputs]
  //   y  device [rows, outputs] of shape.output
  bool Multiply(const ProjectionShape& shape, float scale, const kernels::Bf16* x,
                const kernels::Bf16* w, void* y, cudaStream_t stream);

  // Tries cuBLAS's own choice, up to `candidates` of cuBLASLt's, and FewRowsProduct where it serves
  // the shape; takes the fastest for later calls with this shape. `seconds` times what its argument
  // enqueues by Multiply. Returns the name of the choice.
  std::string Tune(const ProjectionShape& shape, int candidates,
                   const std::function<double()>& seconds);

  int version() const { return version_; }

 private:
  struct Plan;

  Projections() = default;
  std::vector<std::unique_ptr<Plan>> Candidates(const ProjectionShape& shape, int count);
  Plan* Find(const ProjectionShape& shape);

  const Cublas* cublas_ = nullptr;
  cublasHandle_t handle_ = nullptr;
  cublasLtHandle_t lt_handle_ = nullptr;
  void* workspace_ = nullptr;
  int version_ = 0;
  std::vector<std::unique_ptr<Plan>> plans_;  // one a shape, those that were tuned
};

}  // namespace crumb::models::cuda
