// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/cuda/projections.h"

#include <dlfcn.h>

#include <algorithm>
#include <limits>

#include "models/cuda/product_chain.h"

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

// Loads one function, unless a previous one was missing.
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

namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

cudaDataType TypeOf(ProjectionOutput output) {
  return output == ProjectionOutput::kBf16 ? CUDA_R_16BF : CUDA_R_32F;
}

}  // namespace

// How a shape is multiplied: by an algorithm of cuBLASLt, by FewRowsProduct, or by cuBLAS's
// default.
struct Projections::Plan {
  Plan(const Cublas& cublas, const ProjectionShape& of) : c(cublas), shape(of) {}
  ~Plan() {
    if (x != nullptr) c.lt_layout_destroy(x);
    if (w != nullptr) c.lt_layout_destroy(w);
    if (y != nullptr) c.lt_layout_destroy(y);
    if (product != nullptr) c.lt_desc_destroy(product);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // cuBLAS reads row-major rows as columns: y (outputs x rows) = w' (outputs x inputs) x.
  bool Describe() {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const auto layout = [this](cublasLtMatrixLayout_t* out, cudaDataType type, int height,
                               int width) {
      return c.lt_layout_create(out, type, height, width, height) == CUBLAS_STATUS_SUCCESS;
    };
    return c.lt_desc_create(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
           c.lt_desc_set(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)) ==
               CUBLAS_STATUS_SUCCESS &&
           layout(&w, CUDA_R_16BF, shape.inputs, shape.outputs) &&
           layout(&x, CUDA_R_16BF, shape.inputs, shape.rows) &&
           layout(&y, TypeOf(shape.output), shape.outputs, shape.rows);
  }

  const Cublas& c;
  ProjectionShape shape;
  bool few_rows = false;
  bool has_algorithm = false;
  cublasLtMatmulAlgo_t algorithm = {};
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t x = nullptr, w = nullptr, y = nullptr;
  std::string name = "cublas";
};

std::unique_ptr<Projections> Projections::Open(std::string* error) {
  const Cublas* cublas = Cublas::Load(error);
  if (cublas == nullptr) return nullptr;
  auto projections = std::unique_ptr<Projections>(new Projections());
  projections->cublas_ = cublas;
  if (cublas->create(&projections->handle_) != CUBLAS_STATUS_SUCCESS ||
      cublas->lt_create(&projections->lt_handle_) != CUBLAS_STATUS_SUCCESS ||
      cudaMalloc(&projections->workspace_, kWorkspaceBytes) != cudaSuccess) {
    *error = "cuBLAS does not start on this device: it needs a driver and 64 MiB of free memory";
    return nullptr;
  }
  cublas->get_version(projections->handle_, &projections->version_);
  return projections;
}

Projections::~Projections() {
  plans_.clear();
  if (handle_ != nullptr) cublas_->destroy(handle_);
  if (lt_handle_ != nullptr) cublas_->lt_destroy(lt_handle_);
  cudaFree(workspace_);
}

Projections::Plan* Projections::Find(const ProjectionShape& shape) {
  for (const auto& plan : plans_) {
    if (plan->shape == shape) return plan.get();
  }
  return nullptr;
}

bool Projections::Multiply(const ProjectionShape& s, float scale, const kernels::Bf16* x,
                           const kernels::Bf16* w, void* y, cudaStream_t stream) {
  const float zero = 0.0f;
  const Plan* plan = Find(s);
  if (plan != nullptr && plan->few_rows) {
    return FewRowsProduct(s, scale, x, w, y, stream) == cudaSuccess;
  }
  if (plan != nullptr && plan->has_algorithm) {
    return cublas_->lt_matmul(lt_handle_, plan->product, &scale, w, plan->w, x, plan->x, &zero, y,
                              plan->y, y, plan->y, &plan->algorithm, workspace_, kWorkspaceBytes,
                              stream) == CUBLAS_STATUS_SUCCESS;
  }
  // cublasSetStream resets the workspace, so it is set again.
  return cublas_->set_stream(handle_, stream) == CUBLAS_STATUS_SUCCESS &&
         cublas_->set_workspace(handle_, workspace_, kWorkspaceBytes) == CUBLAS_STATUS_SUCCESS &&
         cublas_->gemm(handle_, CUBLAS_OP_T, CUBLAS_OP_N, s.outputs, s.rows, s.inputs, &scale, w,
                       CUDA_R_16BF, s.inputs, x, CUDA_R_16BF, s.inputs, &zero, y, TypeOf(s.output),
                       s.outputs, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS;
}

std::vector<std::unique_ptr<Projections::Plan>> Projections::Candidates(
    const ProjectionShape& shape, int count) {
  std::vector<std::unique_ptr<Plan>> plans;
  plans.push_back(std::make_unique<Plan>(*cublas_, shape));
  if (shape.rows <= kFewRows) {
    plans.push_back(std::make_unique<Plan>(*cublas_, shape));
    plans.back()->few_rows = true;
    plans.back()->name = "few rows";
  }
  Plan probe(*cublas_, shape);
  cublasLtMatmulPreference_t preference = nullptr;
  const size_t bytes = kWorkspaceBytes;
  std::vector<cublasLtMatmulHeuristicResult_t> results(count);
  int found = 0;
  if (probe.Describe() && cublas_->lt_preference_create(&preference) == CUBLAS_STATUS_SUCCESS &&
      cublas_->lt_preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                 sizeof(bytes)) == CUBLAS_STATUS_SUCCESS &&
      cublas_->lt_heuristic(lt_handle_, probe.product, probe.w, probe.x, probe.y, probe.y,
                            preference, count, results.data(), &found) != CUBLAS_STATUS_SUCCESS) {
    found = 0;
  }
  if (preference != nullptr) cublas_->lt_preference_destroy(preference);
  for (int i = 0; i < found; ++i) {
    if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
    auto plan = std::make_unique<Plan>(*cublas_, shape);
    if (!plan->Describe()) continue;
    plan->has_algorithm = true;
    plan->algorithm = results[i].algo;
    plan->name = "cublasLt " + std::to_string(i);
    plans.push_back(std::move(plan));
  }
  return plans;
}

std::string Projections::Tune(const ProjectionShape& shape, int candidates,
                              const std::function<double()>& seconds) {
  std::erase_if(plans_, [&shape](const auto& plan) { return plan->shape == shape; });
  std::unique_ptr<Plan> best;
  double best_seconds = std::numeric_limits<double>::infinity();
  for (auto& candidate : Candidates(shape, candidates)) {
    plans_.push_back(std::move(candidate));
    const double measured = seconds();
    candidate = std::move(plans_.back());
    plans_.pop_back();
    if (measured >= best_seconds) continue;
    best_seconds = measured;
    best = std::move(candidate);
  }
  plans_.push_back(std::move(best));
  return plans_.back()->name;
}

}  // namespace crumb::models::cuda
