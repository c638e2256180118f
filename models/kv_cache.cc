// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/bf16.h"
#include "models/matmul_kernels.h"

namespace crumb::models {

namespace {

// Query tokens of one task, whose scores are as many rows of all keys.
constexpr int kTokensPerTask = 16;
// Query tokens up to which K and V are read as stored instead of being converted to f32 first.
constexpr int kFewTokens = 4;
// Values that are converted to f32 at a time if few tokens read them.
constexpr int kValueBlock = 128;

const std::byte* Bytes(const kernels::Bf16* rows) {
  return reinterpret_cast<const std::byte*>(rows);
}

int RoundUp(int value, int to) { return (value + to - 1) / to * to; }

// Replaces scores[0, visible) by probabilities, and the rest up to `size` by zeros.
void Softmax(float* scores, int visible, int size, float scale) {
  float top = -std::numeric_limits<float>::infinity();
  for (int j = 0; j < visible; ++j) top = std::max(top, scores[j]);
  double sum = 0.0;
  for (int j = 0; j < visible; ++j) {
    scores[j] = std::exp((scores[j] - top) * scale);
    sum += scores[j];
  }
  const float inverse = static_cast<float>(1.0 / sum);
  for (int j = 0; j < visible; ++j) scores[j] *= inverse;
  std::fill(scores + visible, scores + size, 0.0f);
}

}  // namespace

struct DenseKvCache::Job {
  const kernels::Bf16* q;
  float* out;
  int layer;
  int tokens;  // fresh tokens, the last of `total`
  int total;
  int group;  // query heads per KV head
  int width;  // head_dim rounded up to a multiple of kPanelColumns
  float scale;
};

DenseKvCache::DenseKvCache(const ModelConfig& config, ThreadPool& pool)
    : layers_(config.layers),
      q_heads_(config.q_heads),
      kv_heads_(config.kv_heads),
      head_dim_(config.head_dim),
      pool_(pool),
      rows_(static_cast<size_t>(config.layers) * config.kv_heads) {}

int DenseKvCache::TokensHeld(int layer) const {
  return static_cast<int>(rows(layer, 0).k.size() / head_dim_);
}

std::span<const kernels::Bf16> DenseKvCache::keys(int layer, int kv_head) const {
  return rows(layer, kv_head).k;
}

std::span<const kernels::Bf16> DenseKvCache::values(int layer, int kv_head) const {
  return rows(layer, kv_head).v;
}

absl::Status DenseKvCache::Append(int layer, int tokens, const kernels::Bf16* k,
                                  const kernels::Bf16* v) {
  if (layer < 0 || layer >= layers_ || tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("append of ", tokens, " tokens to layer ", layer, " of ", layers_));
  }
  for (int t = 0; t < tokens; ++t) {
    for (int h = 0; h < kv_heads_; ++h) {
      const int64_t from = (int64_t{t} * kv_heads_ + h) * head_dim_;
      Rows& held = rows(layer, h);
      held.k.insert(held.k.end(), k + from, k + from + head_dim_);
      held.v.insert(held.v.end(), v + from, v + from + head_dim_);
    }
  }
  return absl::OkStatus();
}

absl::Status DenseKvCache::Attend(int layer, int tokens, const kernels::Bf16* q, float* out) {
  if (layer < 0 || layer >= layers_ || tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention of ", tokens, " tokens in layer ", layer, " of ", layers_));
  }
  const Job job = {q,
                   out,
                   layer,
                   tokens,
                   TokensHeld(layer),
                   q_heads_ / kv_heads_,
                   RoundUp(head_dim_, kPanelColumns),
                   1.0f / std::sqrt(static_cast<float>(head_dim_))};
  if (job.total < tokens) {
    return absl::FailedPreconditionError(absl::StrCat("attention of ", tokens, " tokens in layer ",
                                                      layer, ", which holds ", job.total));
  }
  if (tokens <= kFewTokens) {
    pool_.ParallelFor(kv_heads_, [&](int h) { AttendFew(job, h); });
    return absl::OkStatus();
  }
  std::vector<float> k_panels(static_cast<size_t>(RoundUp(job.total, kPanelColumns)) * head_dim_);
  std::vector<float> v_rows(static_cast<size_t>(job.total) * job.width);
  for (int h = 0; h < kv_heads_; ++h) AttendMany(job, h, k_panels, v_rows);
  return absl::OkStatus();
}

absl::Status DenseKvCache::Advance(std::span<const int32_t> tokens) {
  const int length = length_ + static_cast<int>(tokens.size());
  for (int layer = 0; layer < layers_; ++layer) {
    if (TokensHeld(layer) != length) {
      return absl::FailedPreconditionError(
          absl::StrCat("layer ", layer, " holds ", TokensHeld(layer), " tokens, not ", length));
    }
  }
  length_ = length;
  return absl::OkStatus();
}

// Decode reads every key and value once, so it uses them as they are stored.
void DenseKvCache::AttendFew(const Job& job, int kv_head) const {
  const MatmulKernels& kernels = ActiveMatmulKernels();
  const Rows& held = rows(job.layer, kv_head);
  std::vector<float> q(static_cast<size_t>(job.group) * head_dim_);
  std::vector<float> scores(static_cast<size_t>(job.group) * job.total);
  std::vector<float> block(static_cast<size_t>(kValueBlock) * job.width);
  std::vector<float> sums(static_cast<size_t>(job.group) * job.width);
  for (int t = 0; t < job.tokens; ++t) {
    const int64_t row = (int64_t{t} * q_heads_ + kv_head * job.group) * head_dim_;
    const int visible = job.total - job.tokens + t + 1;
    kernels.widen(DType::kBf16, Bytes(job.q + row), job.group * head_dim_, q.data());
    for (int g = 0; g < job.group; g += kDotRowsMax) {
      kernels.dot(DType::kBf16, Bytes(held.k.data()), head_dim_ * 2, visible, head_dim_,
                  std::min(kDotRowsMax, job.group - g), q.data() + g * head_dim_, head_dim_,
                  scores.data() + int64_t{g} * job.total, job.total);
    }
    for (int g = 0; g < job.group; ++g) {
      Softmax(scores.data() + int64_t{g} * job.total, visible, visible, job.scale);
    }
    for (int begin = 0; begin < visible; begin += kValueBlock) {
      const int count = std::min(kValueBlock, visible - begin);
      for (int j = 0; j < count; ++j) {
        kernels.widen(DType::kBf16, Bytes(held.v.data() + int64_t{begin + j} * head_dim_),
                      head_dim_, block.data() + int64_t{j} * job.width);
      }
      kernels.multiply(job.group, job.width, count, scores.data() + begin, job.total, block.data(),
                       job.width, sums.data(), job.width, begin > 0);
    }
    for (int g = 0; g < job.group; ++g) {
      std::copy_n(sums.data() + int64_t{g} * job.width, head_dim_,
                  job.out + row + int64_t{g} * head_dim_);
    }
  }
}

// Prefill converts the head's K (as panels of 32 tokens) and V to f32 once and uses them for all
// blocks of queries.
void DenseKvCache::AttendMany(const Job& job, int kv_head, std::vector<float>& k_panels,
                              std::vector<float>& v_rows) const {
  const MatmulKernels& kernels = ActiveMatmulKernels();
  const Rows& held = rows(job.layer, kv_head);
  const int panels = RoundUp(job.total, kPanelColumns) / kPanelColumns;
  pool_.ParallelFor(panels, [&](int p) {
    const int begin = p * kPanelColumns;
    const int count = std::min(kPanelColumns, job.total - begin);
    kernels.pack(DType::kBf16, Bytes(held.k.data() + int64_t{begin} * head_dim_), head_dim_ * 2,
                 count, head_dim_, k_panels.data() + int64_t{begin} * head_dim_);
    for (int j = begin; j < begin + count; ++j) {
      kernels.widen(DType::kBf16, Bytes(held.v.data() + int64_t{j} * head_dim_), head_dim_,
                    v_rows.data() + int64_t{j} * job.width);
    }
  });
  const int blocks = (job.tokens + kTokensPerTask - 1) / kTokensPerTask;
  // The last block has the most keys. It is taken first, so that the threads end at about one time.
  pool_.ParallelFor(blocks, [&](int b) {
    AttendBlock(job, kv_head, (blocks - 1 - b) * kTokensPerTask, k_panels, v_rows);
  });
}

// Attends query tokens [begin, begin + 16) of the query heads of one KV head.
void DenseKvCache::AttendBlock(const Job& job, int kv_head, int begin,
                               const std::vector<float>& k_panels,
                               const std::vector<float>& v_rows) const {
  const MatmulKernels& kernels = ActiveMatmulKernels();
  const int count = std::min(kTokensPerTask, job.tokens - begin);
  const int height = count * job.group;
  const int first_visible = job.total - job.tokens + begin + 1;
  const int keys = first_visible + count - 1;
  const int stride = RoundUp(keys, kPanelColumns);
  std::vector<float> q(static_cast<size_t>(height) * head_dim_);
  std::vector<float> scores(static_cast<size_t>(height) * stride);
  std::vector<float> sums(static_cast<size_t>(height) * job.width);
  const auto row = [&](int t) {
    return (int64_t{begin + t} * q_heads_ + kv_head * job.group) * head_dim_;
  };
  const int64_t group_size = int64_t{job.group} * head_dim_;
  for (int t = 0; t < count; ++t) {
    kernels.widen(DType::kBf16, Bytes(job.q + row(t)), group_size, q.data() + t * group_size);
  }
  for (int j = 0; j < keys; j += kPanelColumns) {
    kernels.multiply(height, kPanelColumns, head_dim_, q.data(), head_dim_,
                     k_panels.data() + int64_t{j} * head_dim_, kPanelColumns, scores.data() + j,
                     stride, false);
  }
  for (int i = 0; i < height; ++i) {
    Softmax(scores.data() + int64_t{i} * stride, first_visible + i / job.group, stride, job.scale);
  }
  for (int j = 0; j < keys; j += kValueBlock) {
    kernels.multiply(height, job.width, std::min(kValueBlock, keys - j), scores.data() + j, stride,
                     v_rows.data() + int64_t{j} * job.width, job.width, sums.data(), job.width,
                     j > 0);
  }
  for (int i = 0; i < height; ++i) {
    std::copy_n(sums.data() + int64_t{i} * job.width, head_dim_,
                job.out + row(i / job.group) + int64_t{i % job.group} * head_dim_);
  }
}

}  // namespace crumb::models
