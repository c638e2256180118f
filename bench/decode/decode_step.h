// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <string>

#include "bench/decode/kv_cache.h"
#include "bench/decode/step_weights.h"
#include "bench/kernels/device_memory.h"
#include "bench/model_shape.h"
#include "models/cuda/product_chain.h"
#include "models/cuda/projections.h"

namespace crumb::bench {

// One decode step of a batch, from token ids to token ids, one token per sequence: embedding;
// norms, projections, RoPE, append and attention of every layer; last projection and greedy choice.
// A layer with experts reads the bytes of those that the batch needs, but computes nothing with
// them. Weights, projections and cache must outlive it.
class DecodeStep {
 public:
  DecodeStep(const StepWeights& weights, models::cuda::Projections& projections,
             const KvCache& cache, const SequenceShape& sequence, int batch);

  // Chooses the fastest of cuBLAS's algorithms for each projection, or chains for all of them if
  // there are few rows and the step is faster. Waits for the device.
  void Tune(int candidates);

  // The functions below enqueue work and can be captured; each replay computes the same step.
  void Enqueue(cudaStream_t stream);
  // Enqueue only the attention of the step, with its plan, and only its projections.
  void EnqueueAttention(cudaStream_t stream);
  void EnqueueProjections(cudaStream_t stream);

  // Returns whether the logits of the last step are finite and differ. Waits for the device.
  bool Sane() const;

 private:
  using Bf16 = kernels::Bf16;

  // Enqueues one projection of the batch's rows.
  void Project(const Bf16* x, const Bf16* w, Bf16* y, int inputs, int outputs, cudaStream_t stream);
  // Chooses the fastest algorithm of every projection; TuneOne does so for one shape, over the
  // weights of `layers` layers, so that they are not read from caches.
  void TuneProjections(int candidates);
  void TuneOne(int candidates, int inputs, int outputs, const Bf16* w, size_t stride, int layers);
  // Enqueue the parts of one layer: attention with its new rows, projections, FFN, and reading
  // experts.
  void EnqueueAttend(int layer, cudaStream_t stream);
  void EnqueueLayer(int layer, cudaStream_t stream);
  void EnqueueFfn(int layer, cudaStream_t stream);
  void EnqueueExperts(int layer, cudaStream_t stream);
  void EnqueueReadExperts(int layer, cudaStream_t stream) const;
  // With few rows, one chain computes all products between two attentions, or two around experts.
  models::cuda::ChainProduct Product(const Bf16* x, const Bf16* norm, const Bf16* w, int inputs,
                                     int outputs, models::cuda::ChainOutput output, Bf16* y) const;
  models::cuda::ChainProduct QkvProduct(int layer) const;
  models::cuda::ChainProduct OutProduct(int layer) const;
  models::cuda::ChainProduct DownProduct(int layer) const;
  models::cuda::ProductChain Chain(
      std::initializer_list<models::cuda::ChainProduct> products) const;
  void EnqueueChain(std::initializer_list<models::cuda::ChainProduct> products,
                    cudaStream_t stream) const;
  void EnqueueChains(int layer, cudaStream_t stream) const;
  const Bf16* Norm(int index) const { return w_.norms.get() + index * size_t(m_.hidden); }

  const StepWeights& w_;
  const ModelShape& m_;
  models::cuda::Projections& projections_;
  const KvCache& cache_;
  const int batch_;
  Device<int32_t> tokens_;
  bool chained_ = false;
  Device<uint32_t> barrier_;  // ProductChain::barrier
  Device<Bf16> residual_, x_, y_, qkv_, q_, attended_, gate_up_, gated_, logits_;
  Device<float> cosine_, sine_;
  Device<uint64_t> best_;
  Device<uint32_t> done_;
  Device<Bf16> scores_;      // output of the router
  Device<int32_t> experts_;  // [expert layers, ExpertsRead(batch)], distinct per layer
  Device<uint32_t> unused_;
};

}  // namespace crumb::bench
