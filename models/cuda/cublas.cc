// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/cuda/cublas.h"

#include <dlfcn.h>

namespace crumb::models::cuda {
namespace {

const std::string kMajor = std::to_string(CUBLAS_VER_MAJOR);

void* OpenLibrary(const std::string& name, std::string* error) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *error = std::string("cannot load cuBLAS ") + kMajor + ": " + dlerror() +
             "; install it with CUDA " + kMajor + ", or name its folder in LD_LIBRARY_PATH";
  }
  return library;
}

// Function by function, as long as none was missing.
class Symbols {
 public:
  Symbols(void* library, std::string* error) : library_(library), error_(error) {}

  template <typename Function>
  void Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library_, name));
    if (*function != nullptr) return;
    ok_ = false;
    *error_ = std::string("this cuBLAS has no ") + name + "; install cuBLAS " + kMajor;
  }
  bool ok() const { return ok_; }

 private:
  void* library_;
  std::string* error_;
  bool ok_ = true;
};

bool Fill(Cublas* c, std::string* error) {
  void* blas = OpenLibrary("libcublas.so." + kMajor, error);
  if (blas == nullptr) return false;
  void* lt = OpenLibrary("libcublasLt.so." + kMajor, error);
  if (lt == nullptr) return false;
  Symbols a(blas, error);
  a.Find("cublasCreate_v2", &c->create);
  a.Find("cublasDestroy_v2", &c->destroy);
  a.Find("cublasSetStream_v2", &c->set_stream);
  a.Find("cublasSetWorkspace_v2", &c->set_workspace);
  a.Find("cublasGetVersion_v2", &c->get_version);
  a.Find("cublasGemmEx", &c->gemm);
  Symbols b(lt, error);
  b.Find("cublasLtCreate", &c->lt_create);
  b.Find("cublasLtDestroy", &c->lt_destroy);
  b.Find("cublasLtMatmul", &c->lt_matmul);
  b.Find("cublasLtMatmulAlgoGetHeuristic", &c->lt_heuristic);
  b.Find("cublasLtMatmulDescCreate", &c->lt_desc_create);
  b.Find("cublasLtMatmulDescDestroy", &c->lt_desc_destroy);
  b.Find("cublasLtMatmulDescSetAttribute", &c->lt_desc_set);
  b.Find("cublasLtMatrixLayoutCreate", &c->lt_layout_create);
  b.Find("cublasLtMatrixLayoutDestroy", &c->lt_layout_destroy);
  b.Find("cublasLtMatmulPreferenceCreate", &c->lt_preference_create);
  b.Find("cublasLtMatmulPreferenceDestroy", &c->lt_preference_destroy);
  b.Find("cublasLtMatmulPreferenceSetAttribute", &c->lt_preference_set);
  return a.ok() && b.ok();
}

struct Loaded {
  Cublas functions;
  std::string error;
  bool ok = Fill(&functions, &error);
};

}  // namespace

const Cublas* Cublas::Load(std::string* error) {
  static const Loaded loaded;
  if (!loaded.ok) *error = loaded.error;
  return loaded.ok ? &loaded.functions : nullptr;
}

}  // namespace crumb::models::cuda
