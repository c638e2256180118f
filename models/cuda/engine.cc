// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/cuda/engine.h"

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "models/cuda/device_weights.h"
#include "models/cuda/layer_kernels.h"
#include "models/cuda/product_chain.h"
#include "models/cuda/projections.h"
#include "models/engine.h"
#include "models/rope.h"
#include "models/weights.h"

namespace crumb::models::cuda {
namespace {

constexpr int kHeadDim = 128;
// The lengths of rows must be multiples of it: bf16 elements of a 16-byte access.
constexpr int kVector = 8;

absl::Status CheckServed(const ModelConfig& config) {
  if (config.head_dim != kHeadDim) {
    return absl::InvalidArgumentError(absl::StrCat("the CUDA engine serves head_dim ", kHeadDim,
                                                   ", this model has ", config.head_dim,
                                                   "; run it on the CPU"));
  }
  if (config.qkv_bias || config.o_bias) {
    return absl::InvalidArgumentError(
        "the CUDA engine serves projections without biases; run this model on the CPU");
  }
  if (!config.qk_norm) {
    return absl::InvalidArgumentError(
        "the CUDA engine serves models that normalise queries and keys, such as Qwen3; run this "
        "model on the CPU");
  }
  for (const int width : {config.hidden_size, config.intermediate_size, config.vocab_size}) {
    if (width % kVector == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the CUDA engine serves multiples of 8 for hidden, intermediate and vocabulary size, not ",
        width, "; run this model on the CPU"));
  }
  return absl::OkStatus();
}

absl::Status OpenDevice(int device) {
  const cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("CUDA device ", device,
                                             " cannot be used: ", cudaGetErrorString(error),
                                             "; is there a GPU, and its driver?"));
}

// The rows of one chunk in device memory.
struct Activations {
  absl::Status Allocate(const ModelConfig& c, size_t tokens) {
    const size_t q_width = size_t{1} * c.q_heads * kHeadDim;
    const size_t kv_width = size_t{1} * c.kv_heads * kHeadDim;
    CRUMB_ASSIGN_OR_RETURN(ids, NewBuffer<int32_t>(tokens));
    const std::pair<Buffer<Bf16>*, size_t> rows[] = {{&residual, c.hidden_size},
                                                     {&normed, c.hidden_size},
                                                     {&delta, c.hidden_size},
                                                     {&qkv, q_width + 2 * kv_width},
                                                     {&q, q_width},
                                                     {&k, kv_width},
                                                     {&v, kv_width},
                                                     {&attended, q_width},
                                                     {&gated, c.intermediate_size},
                                                     {&gate_up, size_t{2} * c.intermediate_size}};
    for (const auto& [buffer, width] : rows) {
      CRUMB_ASSIGN_OR_RETURN(*buffer, NewBuffer<Bf16>(tokens * width));
    }
    CRUMB_ASSIGN_OR_RETURN(logits, NewBuffer<float>(tokens * c.vocab_size));
    return absl::OkStatus();
  }

  Buffer<int32_t> ids;
  Buffer<Bf16> residual, normed, delta, qkv, q, k, v, attended, gate_up, gated;
  Buffer<float> logits;
};

class CublasEngine : public Engine {
 public:
  CublasEngine(const EngineOptions& options, ModelConfig config)
      : options_(options), config_(std::move(config)) {}
  ~CublasEngine() override {
    if (stream_ == nullptr) return;
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }

  absl::Status Open(const std::string& dir) {
    CRUMB_ASSIGN_OR_RETURN(const Weights weights, Weights::Load(dir, config_));
    CRUMB_RETURN_IF_ERROR(OpenDevice(options_.device));
    std::string error;
    projections_ = Projections::Open(&error);
    if (projections_ == nullptr) return absl::UnavailableError(error);
    CRUMB_RETURN_IF_ERROR(
        FromCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream"));
    CRUMB_ASSIGN_OR_RETURN(weights_, DeviceWeights::Copy(weights));
    CRUMB_RETURN_IF_ERROR(MakeTurns());
    CRUMB_RETURN_IF_ERROR(a_.Allocate(config_, options_.chunk_tokens));
    const uint32_t zero[] = {0};
    CRUMB_ASSIGN_OR_RETURN(barrier_, NewBufferOf(std::span<const uint32_t>(zero)));
    chains_ = ServesChains();
    return absl::OkStatus();
  }

  const ModelConfig& config() const override { return config_; }
  cudaStream_t stream() const override { return stream_; }

  absl::StatusOr<Logits> Forward(DeviceKvCache& cache, std::span<const int32_t> tokens,
                                 LogitRows rows) override {
    CRUMB_RETURN_IF_ERROR(CheckForwardInput(config_, cache.length(), tokens));
    Logits logits;
    logits.vocab_size = config_.vocab_size;
    while (!tokens.empty()) {
      const int most = std::min(options_.chunk_tokens, cache.pass_tokens_max());
      const auto chunk = tokens.first(std::min<size_t>(tokens.size(), most));
      tokens = tokens.subspan(chunk.size());
      const int count = static_cast<int>(chunk.size());
      CRUMB_RETURN_IF_ERROR(EnqueueChunk(cache, chunk));
      if (rows == LogitRows::kAll) {
        CRUMB_RETURN_IF_ERROR(ReadLogits(Chained(count), 0, count, &logits));
      } else if (tokens.empty()) {
        CRUMB_RETURN_IF_ERROR(ReadLogits(Chained(count), count - 1, 1, &logits));
      }
      CRUMB_RETURN_IF_ERROR(cache.Advance(chunk));
    }
    return logits;
  }

 private:
  // Copies the sine and cosine of every position.
  absl::Status MakeTurns() {
    const Rope rope(config_.rope, kHeadDim);
    const size_t half = kHeadDim / 2;
    std::vector<float> cosine(half * config_.max_positions), sine(cosine.size());
    for (int position = 0; position < config_.max_positions; ++position) {
      rope.At(position, cosine.data() + position * half, sine.data() + position * half);
    }
    CRUMB_ASSIGN_OR_RETURN(cosine_, NewBufferOf(std::span<const float>(cosine)));
    CRUMB_ASSIGN_OR_RETURN(sine_, NewBufferOf(std::span<const float>(sine)));
    return absl::OkStatus();
  }

  absl::Status Project(int rows, int inputs, int outputs, const Bf16* x, const Bf16* w, void* y,
                       ProjectionOutput output = ProjectionOutput::kBf16) {
    if (projections_->Multiply({rows, inputs, outputs, output}, 1.0f, x, w, y, stream_)) {
      return absl::OkStatus();
    }
    return absl::InternalError(
        absl::StrCat("cuBLAS refuses a product of ", rows, " x ", inputs, " x ", outputs));
  }

  absl::Status EnqueueChunk(DeviceKvCache& cache, std::span<const int32_t> tokens) {
    const int rows = static_cast<int>(tokens.size()), position = cache.length();
    const NormShape norm = {rows, config_.hidden_size, config_.rms_norm_eps};
    // The host memory is pageable, so the call returns after it has been read.
    CRUMB_RETURN_IF_ERROR(FromCuda(cudaMemcpyAsync(a_.ids.get(), tokens.data(), tokens.size_bytes(),
                                                   cudaMemcpyHostToDevice, stream_),
                                   "copying token ids"));
    CRUMB_RETURN_IF_ERROR(cache.Start(rows));
    CRUMB_RETURN_IF_ERROR(FromCuda(EmbedAndNorm(norm, a_.ids.get(), weights_.embedding.get(),
                                                weights_.layers[0].attention_norm.get(),
                                                a_.residual.get(), a_.normed.get(), stream_),
                                   "embedding"));
    if (Chained(rows)) CRUMB_RETURN_IF_ERROR(Multiply(rows, {QkvProduct(0)}));
    for (int layer = 0; layer < config_.layers; ++layer) {
      if (Chained(rows)) {
        CRUMB_RETURN_IF_ERROR(EnqueueAttention(cache, layer, rows, position));
        CRUMB_RETURN_IF_ERROR(EnqueueChain(layer, rows));
      } else {
        const DeviceLayerWeights& w = weights_.layers[layer];
        CRUMB_RETURN_IF_ERROR(Project(rows, config_.hidden_size, QkvWidth(), a_.normed.get(),
                                      w.qkv.get(), a_.qkv.get()));
        CRUMB_RETURN_IF_ERROR(EnqueueAttention(cache, layer, rows, position));
        CRUMB_RETURN_IF_ERROR(EnqueueMlp(layer, norm));
      }
    }
    return absl::OkStatus();
  }

  // With few rows, one kernel computes all products between two attentions.
  bool Chained(int rows) const { return chains_ && rows <= kFewRows; }

  bool ServesChains() const {
    const Bf16* norm = weights_.final_norm.get();
    const auto product = [&](int inputs, const Bf16* weight) {
      return Product(nullptr, inputs, weight, nullptr, 2, ChainOutput::kStore, nullptr);
    };
    return ServesChain(Chain(
        kFewRows, {product(config_.hidden_size, norm), product(config_.q_heads * kHeadDim, nullptr),
                   product(config_.intermediate_size, nullptr)}));
  }

  absl::Status Multiply(int rows, std::initializer_list<ChainProduct> products) {
    return FromCuda(MultiplyChain(Chain(rows, products), stream_), "multiplying a few rows");
  }

  ProductChain Chain(int rows, std::initializer_list<ChainProduct> products) const {
    ProductChain chain;
    chain.rows = rows;
    chain.count = static_cast<int>(products.size());
    chain.epsilon = config_.rms_norm_eps;
    std::copy(products.begin(), products.end(), chain.products);
    chain.barrier = barrier_.get();
    return chain;
  }

  // Describes a product of a chain. `norm` is null if the rows are not normalised.
  static ChainProduct Product(const Bf16* x, int inputs, const Bf16* norm, const Bf16* w,
                              int outputs, ChainOutput output, void* y) {
    return {inputs, outputs, output, 1.0f, x, norm, w, y};
  }

  ChainProduct QkvProduct(int layer) const {
    const DeviceLayerWeights& w = weights_.layers[layer];
    return Product(a_.residual.get(), config_.hidden_size, w.attention_norm.get(), w.qkv.get(),
                   QkvWidth(), ChainOutput::kStore, a_.qkv.get());
  }

  // Computes the next layer's q, k and v from the output of attention, as one chain.
  absl::Status EnqueueChain(int layer, int rows) {
    const DeviceLayerWeights& w = weights_.layers[layer];
    const int hidden = config_.hidden_size, width = config_.intermediate_size;
    const ChainProduct out = Product(a_.attended.get(), config_.q_heads * kHeadDim, nullptr,
                                     w.out.get(), hidden, ChainOutput::kAdd, a_.residual.get());
    const ChainProduct gate = Product(a_.residual.get(), hidden, w.mlp_norm.get(), w.gate_up.get(),
                                      2 * width, ChainOutput::kGate, a_.gated.get());
    const ChainProduct down = Product(a_.gated.get(), width, nullptr, w.down.get(), hidden,
                                      ChainOutput::kAdd, a_.residual.get());
    if (layer + 1 == config_.layers) return Multiply(rows, {out, gate, down});
    return Multiply(rows, {out, gate, down, QkvProduct(layer + 1)});
  }

  int QkvWidth() const { return (config_.q_heads + 2 * config_.kv_heads) * kHeadDim; }

  absl::Status EnqueueAttention(DeviceKvCache& cache, int layer, int rows, int position) {
    const DeviceLayerWeights& w = weights_.layers[layer];
    RopeParams p;
    p.rows = rows;
    p.q_heads = config_.q_heads;
    p.kv_heads = config_.kv_heads;
    p.epsilon = config_.rms_norm_eps;
    p.qkv = a_.qkv.get();
    p.q_weight = w.q_norm.get();
    p.k_weight = w.k_norm.get();
    p.cosine = cosine_.get() + size_t{1} * position * kHeadDim / 2;
    p.sine = sine_.get() + size_t{1} * position * kHeadDim / 2;
    p.q = a_.q.get();
    p.k = a_.k.get();
    p.v = a_.v.get();
    CRUMB_RETURN_IF_ERROR(FromCuda(NormRopeAppend(p, stream_), "turning q and k"));
    CRUMB_RETURN_IF_ERROR(cache.Append(layer, a_.k.get(), a_.v.get()));
    return cache.Attend(layer, a_.q.get(), a_.attended.get());
  }

  // Computes the rows that the next layer, or the last projection, reads from the output of
  // attention.
  absl::Status EnqueueMlp(int layer, const NormShape& norm) {
    const DeviceLayerWeights& w = weights_.layers[layer];
    CRUMB_RETURN_IF_ERROR(Project(norm.rows, config_.q_heads * kHeadDim, config_.hidden_size,
                                  a_.attended.get(), w.out.get(), a_.delta.get()));
    const Bf16* next = layer + 1 < config_.layers ? weights_.layers[layer + 1].attention_norm.get()
                                                  : weights_.final_norm.get();
    CRUMB_RETURN_IF_ERROR(FromCuda(AddAndNorm(norm, a_.delta.get(), w.mlp_norm.get(),
                                              a_.residual.get(), a_.normed.get(), stream_),
                                   "norm"));
    CRUMB_RETURN_IF_ERROR(Project(norm.rows, config_.hidden_size, 2 * config_.intermediate_size,
                                  a_.normed.get(), w.gate_up.get(), a_.gate_up.get()));
    CRUMB_RETURN_IF_ERROR(FromCuda(
        GateUp(norm.rows, config_.intermediate_size, a_.gate_up.get(), a_.gated.get(), stream_),
        "gate"));
    CRUMB_RETURN_IF_ERROR(Project(norm.rows, config_.intermediate_size, config_.hidden_size,
                                  a_.gated.get(), w.down.get(), a_.delta.get()));
    return FromCuda(
        AddAndNorm(norm, a_.delta.get(), next, a_.residual.get(), a_.normed.get(), stream_),
        "norm");
  }

  // Appends the logits of `rows` rows from `first` on, and waits for them. `chained`: whether
  // chains computed the chunk.
  absl::Status ReadLogits(bool chained, int first, int rows, Logits* logits) {
    const size_t begin_row = size_t{1} * first * config_.hidden_size;
    if (chained) {
      CRUMB_RETURN_IF_ERROR(Multiply(
          rows,
          {Product(a_.residual.get() + begin_row, config_.hidden_size, weights_.final_norm.get(),
                   weights_.output(), config_.vocab_size, ChainOutput::kF32, a_.logits.get())}));
    } else {
      CRUMB_RETURN_IF_ERROR(Project(rows, config_.hidden_size, config_.vocab_size,
                                    a_.normed.get() + begin_row, weights_.output(), a_.logits.get(),
                                    ProjectionOutput::kF32));
    }
    const size_t begin = logits->values.size(), count = size_t{1} * rows * config_.vocab_size;
    logits->values.resize(begin + count);
    logits->rows += rows;
    CRUMB_RETURN_IF_ERROR(
        FromCuda(cudaMemcpyAsync(logits->values.data() + begin, a_.logits.get(),
                                 count * sizeof(float), cudaMemcpyDeviceToHost, stream_),
                 "copying logits"));
    return FromCuda(cudaStreamSynchronize(stream_), "computing logits");
  }

  const EngineOptions options_;
  const ModelConfig config_;
  std::unique_ptr<Projections> projections_;
  cudaStream_t stream_ = nullptr;
  DeviceWeights weights_;
  bool chains_ = false;
  Buffer<uint32_t> barrier_;     // ProductChain::barrier
  Buffer<float> cosine_, sine_;  // [max_positions, head_dim / 2]
  Activations a_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Load(const std::string& dir,
                                                     const EngineOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckChunkTokens(options.chunk_tokens));
  CRUMB_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(dir));
  CRUMB_RETURN_IF_ERROR(CheckServed(config));
  auto engine = std::make_unique<CublasEngine>(options, std::move(config));
  CRUMB_RETURN_IF_ERROR(engine->Open(dir));
  return engine;
}

}  // namespace crumb::models::cuda
