// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include <string>

// cuBLAS, loaded when it is first asked for: programs start, and say what is missing, on machines
// without it.
namespace crumb::models::cuda {

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

  // The library of the version this was built with, found as the dynamic loader finds libraries;
  // it stays loaded. Null: `error` says what was looked for and what to do. Thread-safe.
  static const Cublas* Load(std::string* error);
};

}  // namespace crumb::models::cuda
