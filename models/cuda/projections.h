// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/tile.h"
#include "models/cuda/product_chain.h"

namespace crumb::models::cuda {

// The functions of cuBLAS, which is loaded at first use: on machines without it, programs start and
// report the missing library.

struct Cublas {
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  decltype(&cublasGetVersion_v2) get_version = nullptr;
  // cublasGemmEx, which the header overloads.
  using Gemm = cublasStatus_t(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n,
                              int k, const void* alpha, const void* a, cudaDataType, int lda,
                              const void* b, cudaDataType, int ldb, const void* beta, void* c,
                              cudaDataType, int ldc, cublasComputeType_t, cublasGemmAlgo_t);
  Gemm* gemm = nullptr;

  decltype(&cublasLtCreate) lt_create = nullptr;
  decltype(&cublasLtDestroy) lt_destroy = nullptr;
  decltype(&cublasLtMatmul) lt_matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) lt_heuristic = nullptr;
  decltype(&cublasLtMatmulDescCreate) lt_desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) lt_desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) lt_desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) lt_layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) lt_layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) lt_preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) lt_preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) lt_preference_set = nullptr;

  // Loads the library of the version with which this was built, by the search of the dynamic
  // loader. It stays loaded. Returns null if there is none; `error` then names the library and the
  // remedy. Thread-safe.
  static const Cublas* Load(std::string* error);
};

// The projections of a model, y = x W' for bf16 rows with sums in fp32. cuBLAS computes them, or
// FewRowsProduct if there are few rows and it is faster. Owns cuBLAS's handles and workspace on the
// current device. REQUIRES: calls run one after another, on one stream at a time. Not thread-safe.
class Projections {
 public:
  // Returns null if cuBLAS is missing; `error` then describes the remedy.
  static std::unique_ptr<Projections> Open(std::string* error);
  ~Projections();
  Projections(const Projections&) = delete;
  Projections& operator=(const Projections&) = delete;

  // Enqueues y = scale * x W', which can be captured. Returns false if cuBLAS rejects the shape.
  //   x  device [rows, inputs]
  //   w  device [outputs, inputs]
  //   y  device [rows, outputs] of shape.output
  bool Multiply(const ProjectionShape& shape, float scale, const kernels::Bf16* x,
                const kernels::Bf16* w, void* y, cudaStream_t stream);

  // Times cuBLAS's default, up to `candidates` algorithms of cuBLASLt, and FewRowsProduct if it
  // serves the shape; later calls with this shape use the fastest. `seconds` times the calls of
  // Multiply that it makes. Returns the name of the choice.
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
  std::vector<std::unique_ptr<Plan>> plans_;  // one per tuned shape
};

}  // namespace crumb::models::cuda
