// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/decode/decode_step.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "bench/decode/step_weights.h"
#include "bench/kernels/device_rates.h"
#include "kernels/bf16.h"

namespace crumb::bench {
namespace {

// Layers whose weights a timing reads in turn: far more bytes than L2 holds.
constexpr int kTunedLayers = 12;
constexpr double kRopeBase = 1e6;

// Returns the experts that are read, for every layer with experts: as many distinct routed ones as
// a batch needs, and the shared ones.
std::vector<int32_t> DrawExperts(const ModelShape& m, int read) {
  std::mt19937 random(31);
  std::vector<int32_t> drawn, ids(m.experts.count);
  std::iota(ids.begin(), ids.end(), 0);
  for (int layer = 0; layer < m.expert_layers(); ++layer) {
    std::shuffle(ids.begin(), ids.end(), random);
    drawn.insert(drawn.end(), ids.begin(), ids.begin() + (read - m.experts.shared));
    for (int i = 0; i < m.experts.shared; ++i) drawn.push_back(m.experts.count + i);
  }
  return drawn;
}

}  // namespace

using models::cuda::ChainOutput;
using models::cuda::ChainProduct;

DecodeStep::DecodeStep(const StepWeights& weights, models::cuda::Projections& projections,
                       const KvCache& cache, const SequenceShape& sequence, int batch)
    : w_(weights), m_(weights.model), projections_(projections), cache_(cache), batch_(batch) {
  const size_t b = batch, hidden = b * m_.hidden;
  tokens_ = Upload(std::vector<int32_t>(b, 1));
  residual_ = Allocate<Bf16>(hidden);
  x_ = Allocate<Bf16>(hidden);
  y_ = Allocate<Bf16>(hidden);
  qkv_ = Allocate<Bf16>(b * m_.qkv_outputs());
  q_ = Allocate<Bf16>(b * m_.q_heads * kHeadDim);
  attended_ = Allocate<Bf16>(b * m_.q_heads * kHeadDim);
  gate_up_ = Allocate<Bf16>(b * 2 * m_.ffn);
  gated_ = Allocate<Bf16>(b * m_.ffn);
  logits_ = Allocate<Bf16>(b * m_.vocabulary);
  std::vector<float> cosine, sine;
  for (int s = 0; s < batch; ++s) {
    for (int i = 0; i < m_.rotary_dim / 2; ++i) {
      const double angle = (sequence.tokens() - 1) * std::pow(kRopeBase, -2.0 * i / m_.rotary_dim);
      cosine.push_back(static_cast<float>(std::cos(angle)));
      sine.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  cosine_ = Upload(cosine);
  sine_ = Upload(sine);
  best_ = Upload(std::vector<uint64_t>(b, 0));
  done_ = Upload(std::vector<uint32_t>(b, 0));
  barrier_ = Upload(std::vector<uint32_t>(1, 0));
  if (m_.expert_layers() == 0) return;
  scores_ = Allocate<Bf16>(b * m_.experts.count);
  experts_ = Upload(DrawExperts(m_, m_.ExpertsRead(batch)));
  unused_ = Allocate<uint32_t>(1);
}

void DecodeStep::Project(const Bf16* x, const Bf16* w, Bf16* y, int inputs, int outputs,
                         cudaStream_t stream) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(inputs));
  if (projections_.Multiply({batch_, inputs, outputs}, scale, x, w, y, stream)) return;
  std::fprintf(stderr, "crumb-decode-bench: cuBLAS refuses %d x %d x %d\n", batch_, inputs,
               outputs);
  std::exit(1);
}

void DecodeStep::TuneOne(int candidates, int inputs, int outputs, const Bf16* w, size_t stride,
                         int layers) {
  const Device<Bf16> x = Allocate<Bf16>(static_cast<size_t>(batch_) * inputs);
  const Device<Bf16> y = Allocate<Bf16>(static_cast<size_t>(batch_) * outputs);
  Check(cudaMemset(x.get(), 0, static_cast<size_t>(batch_) * inputs * sizeof(Bf16)), "clear");
  const models::cuda::ProjectionShape shape = {batch_, inputs, outputs};
  projections_.Tune(shape, candidates, [&] {
    bool accepted = true;
    const double us = TimeGraph(
        [&](cudaStream_t stream) {
          for (int layer = 0; layer < std::min(layers, kTunedLayers); ++layer) {
            accepted = accepted && projections_.Multiply(shape, 1.0f, x.get(), w + layer * stride,
                                                         y.get(), stream);
          }
        },
        3);
    return accepted ? us : std::numeric_limits<double>::infinity();
  });
}

void DecodeStep::Tune(int candidates) {
  TuneProjections(candidates);
  if (!models::cuda::ServesChain(Chain({QkvProduct(0), OutProduct(0), DownProduct(0)}))) return;
  const auto step_us = [this](bool chained) {
    chained_ = chained;
    return TimeGraph([this](cudaStream_t stream) { Enqueue(stream); }, 3);
  };
  const double apart = step_us(false);
  chained_ = step_us(true) < apart;
}

void DecodeStep::TuneProjections(int candidates) {
  const int q = m_.q_heads * kHeadDim;
  TuneOne(candidates, m_.hidden, m_.qkv_outputs(), w_.qkv.get(), w_.qkv_stride, m_.layers);
  TuneOne(candidates, q, m_.hidden, w_.out.get(), w_.out_stride, m_.layers);
  TuneOne(candidates, m_.hidden, 2 * m_.ffn, w_.gate_up.get(), w_.gate_up_stride,
          m_.dense_layers());
  TuneOne(candidates, m_.ffn, m_.hidden, w_.down.get(), w_.down_stride, m_.dense_layers());
  if (m_.expert_layers() > 0) {
    TuneOne(candidates, m_.hidden, m_.experts.count, w_.routers.get(),
            static_cast<size_t>(m_.experts.count) * m_.hidden, m_.expert_layers());
  }
  TuneOne(candidates, m_.hidden, m_.vocabulary, w_.last_projection(), 0, 1);
}

void DecodeStep::EnqueueFfn(int layer, cudaStream_t stream) {
  Project(x_.get(), w_.gate_up.get() + layer * w_.gate_up_stride, gate_up_.get(), m_.hidden,
          2 * m_.ffn, stream);
  Check(models::cuda::GateUp(batch_, m_.ffn, gate_up_.get(), gated_.get(), stream), "gate");
  Project(gated_.get(), w_.down.get() + layer * w_.down_stride, y_.get(), m_.ffn, m_.hidden,
          stream);
}

void DecodeStep::EnqueueExperts(int layer, cudaStream_t stream) {
  const size_t index = layer - m_.dense_layers();
  Project(x_.get(), w_.routers.get() + index * m_.experts.count * m_.hidden, scores_.get(),
          m_.hidden, m_.experts.count, stream);
  EnqueueReadExperts(layer, stream);
}

void DecodeStep::EnqueueReadExperts(int layer, cudaStream_t stream) const {
  const size_t index = layer - m_.dense_layers();
  const size_t layer_experts = m_.experts.count + m_.experts.shared;
  const int read = m_.ExpertsRead(batch_);
  Check(ReadExperts(w_.experts.get() + index * layer_experts * m_.expert_bytes(), m_.expert_bytes(),
                    experts_.get() + index * read, read, unused_.get(), stream),
        "experts");
}

ChainProduct DecodeStep::Product(const Bf16* x, const Bf16* norm, const Bf16* w, int inputs,
                                 int outputs, ChainOutput output, Bf16* y) const {
  const float scale = 1.0f / std::sqrt(static_cast<float>(inputs));
  return {inputs, outputs, output, scale, x, norm, w, y};
}

// Layer m_.layers means the projection to the vocabulary.
ChainProduct DecodeStep::QkvProduct(int layer) const {
  const Bf16* norm = Norm(2 * layer);
  if (layer == m_.layers) {
    return Product(residual_.get(), norm, w_.last_projection(), m_.hidden, m_.vocabulary,
                   ChainOutput::kStore, logits_.get());
  }
  return Product(residual_.get(), norm, w_.qkv.get() + layer * w_.qkv_stride, m_.hidden,
                 m_.qkv_outputs(), ChainOutput::kStore, qkv_.get());
}

models::cuda::ProductChain DecodeStep::Chain(std::initializer_list<ChainProduct> products) const {
  models::cuda::ProductChain chain;
  chain.rows = batch_;
  chain.count = static_cast<int>(products.size());
  chain.epsilon = static_cast<float>(m_.epsilon);
  std::copy(products.begin(), products.end(), chain.products);
  chain.barrier = barrier_.get();
  return chain;
}

void DecodeStep::EnqueueChain(std::initializer_list<ChainProduct> products,
                              cudaStream_t stream) const {
  Check(models::cuda::MultiplyChain(Chain(products), stream), "chain of products");
}

ChainProduct DecodeStep::OutProduct(int layer) const {
  return Product(attended_.get(), nullptr, w_.out.get() + layer * w_.out_stride,
                 m_.q_heads * kHeadDim, m_.hidden, ChainOutput::kAdd, residual_.get());
}

ChainProduct DecodeStep::DownProduct(int layer) const {
  return Product(gated_.get(), nullptr, w_.down.get() + layer * w_.down_stride, m_.ffn, m_.hidden,
                 ChainOutput::kAdd, residual_.get());
}

// Computes the input of the next layer's RoPE from the output of attention.
void DecodeStep::EnqueueChains(int layer, cudaStream_t stream) const {
  const Bf16* norm = Norm(2 * layer + 1);
  if (layer < m_.dense_layers()) {
    EnqueueChain({OutProduct(layer),
                  Product(residual_.get(), norm, w_.gate_up.get() + layer * w_.gate_up_stride,
                          m_.hidden, 2 * m_.ffn, ChainOutput::kGate, gated_.get()),
                  DownProduct(layer), QkvProduct(layer + 1)},
                 stream);
    return;
  }
  const size_t index = layer - m_.dense_layers();
  EnqueueChain(
      {OutProduct(layer),
       Product(residual_.get(), norm, w_.routers.get() + index * m_.experts.count * m_.hidden,
               m_.hidden, m_.experts.count, ChainOutput::kStore, scores_.get())},
      stream);
  EnqueueReadExperts(layer, stream);
  EnqueueChain({QkvProduct(layer + 1)}, stream);
}

void DecodeStep::EnqueueAttend(int layer, cudaStream_t stream) {
  models::cuda::RopeParams rope;
  rope.rows = batch_;
  rope.q_heads = m_.q_heads;
  rope.kv_heads = m_.kv_heads;
  rope.rotary_dim = m_.rotary_dim;
  rope.epsilon = static_cast<float>(m_.epsilon);
  rope.qkv = qkv_.get();
  rope.q_weight = w_.head_norms.get() + layer * 2 * kHeadDim;
  rope.k_weight = rope.q_weight + kHeadDim;
  rope.cosine = cosine_.get();
  rope.sine = sine_.get();
  rope.q = q_.get();
  cache_.SetAppend(layer, &rope);
  Check(models::cuda::NormRopeAppend(rope, stream), "rope");
  cache_.Attend(layer, q_.get(), attended_.get(), stream);
}

void DecodeStep::EnqueueLayer(int layer, cudaStream_t stream) {
  const models::cuda::NormShape norm = {batch_, m_.hidden, static_cast<float>(m_.epsilon)};
  Project(x_.get(), w_.qkv.get() + layer * w_.qkv_stride, qkv_.get(), m_.hidden, m_.qkv_outputs(),
          stream);
  EnqueueAttend(layer, stream);
  Project(attended_.get(), w_.out.get() + layer * w_.out_stride, y_.get(), m_.q_heads * kHeadDim,
          m_.hidden, stream);
  Check(models::cuda::AddAndNorm(norm, y_.get(), Norm(2 * layer + 1), residual_.get(), x_.get(),
                                 stream),
        "norm");
  if (layer < m_.dense_layers()) {
    EnqueueFfn(layer, stream);
  } else {
    EnqueueExperts(layer, stream);
  }
  Check(models::cuda::AddAndNorm(norm, y_.get(), Norm(2 * layer + 2), residual_.get(), x_.get(),
                                 stream),
        "norm");
}

void DecodeStep::Enqueue(cudaStream_t stream) {
  cache_.Plan(stream);
  Check(
      models::cuda::EmbedAndNorm({batch_, m_.hidden, static_cast<float>(m_.epsilon)}, tokens_.get(),
                                 w_.table.get(), Norm(0), residual_.get(), x_.get(), stream),
      "embedding");
  if (chained_) EnqueueChain({QkvProduct(0)}, stream);
  for (int layer = 0; layer < m_.layers; ++layer) {
    if (chained_) {
      EnqueueAttend(layer, stream);
      EnqueueChains(layer, stream);
    } else {
      EnqueueLayer(layer, stream);
    }
  }
  if (!chained_) {
    Project(x_.get(), w_.last_projection(), logits_.get(), m_.hidden, m_.vocabulary, stream);
  }
  Check(models::cuda::GreedyTokens(batch_, m_.vocabulary, logits_.get(), best_.get(), done_.get(),
                                   tokens_.get(), stream),
        "choice");
}

void DecodeStep::EnqueueAttention(cudaStream_t stream) {
  cache_.Plan(stream);
  for (int layer = 0; layer < m_.layers; ++layer) {
    cache_.Attend(layer, q_.get(), attended_.get(), stream);
  }
}

void DecodeStep::EnqueueProjections(cudaStream_t stream) {
  if (chained_) {
    EnqueueChain({QkvProduct(0)}, stream);
    for (int layer = 0; layer < m_.layers; ++layer) EnqueueChains(layer, stream);
    return;
  }
  for (int layer = 0; layer < m_.layers; ++layer) {
    Project(x_.get(), w_.qkv.get() + layer * w_.qkv_stride, qkv_.get(), m_.hidden, m_.qkv_outputs(),
            stream);
    Project(attended_.get(), w_.out.get() + layer * w_.out_stride, y_.get(), m_.q_heads * kHeadDim,
            m_.hidden, stream);
    if (layer < m_.dense_layers()) {
      EnqueueFfn(layer, stream);
    } else {
      EnqueueExperts(layer, stream);
    }
  }
  Project(x_.get(), w_.last_projection(), logits_.get(), m_.hidden, m_.vocabulary, stream);
}

bool DecodeStep::Sane() const {
  const std::vector<Bf16> logits =
      Download(logits_.get(), static_cast<size_t>(batch_) * m_.vocabulary);
  bool differ = false;
  for (const Bf16 x : logits) {
    if (!std::isfinite(kernels::Bf16ToFloat(x))) return false;
    differ = differ || x.bits != logits[0].bits;
  }
  return differ;
}

}  // namespace crumb::bench
