// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels/evict_transforms.h"

#include <numeric>

#include "bench/kernels/device_rates.h"
#include "bench/kernels/random_data.h"

namespace crumb::bench {

// Returns a product of Householder reflections, which is dense and cheap to compute.
std::vector<float> RandomRotation(int dim, std::mt19937& random) {
  std::vector<double> r(static_cast<size_t>(dim) * dim, 0.0);
  for (int i = 0; i < dim; ++i) r[i * dim + i] = 1.0;
  std::normal_distribution<double> normal;
  for (int reflection = 0; reflection < 8; ++reflection) {
    std::vector<double> v(dim);
    for (double& x : v) x = normal(random);
    const double norm = std::inner_product(v.begin(), v.end(), v.begin(), 0.0);
    for (int i = 0; i < dim; ++i) {
      const double dot = std::inner_product(v.begin(), v.end(), r.begin() + i * dim, 0.0);
      for (int j = 0; j < dim; ++j) r[i * dim + j] -= 2.0 * dot / norm * v[j];
    }
  }
  return std::vector<float>(r.begin(), r.end());
}

namespace {

constexpr int kDim = 128;
constexpr float kMean = 0.01f;

}  // namespace

EvictTransforms::EvictTransforms(int matrices, bool metric) : matrices_(matrices), random_(9) {
  std::vector<float> rotations, feedbacks;
  host_rotation_ = RandomRotation(kDim, random_);
  host_feedback_ = RandomFeedback(metric);
  for (int i = 0; i < 2 * matrices; ++i) {
    rotations.insert(rotations.end(), host_rotation_.begin(), host_rotation_.end());
    feedbacks.insert(feedbacks.end(), host_feedback_.begin(), host_feedback_.end());
  }
  rotation_ = Allocate<char>(2 * matrices * kernels::cuda::EvictRotationBytes(kDim));
  feedback_ = Allocate<char>(2 * matrices * kernels::cuda::EvictFeedbackBytes(kDim));
  const Device<float> plain = Upload(rotations), plain_feedback = Upload(feedbacks);
  Check(kernels::cuda::PrepareEvictRotation(
            plain.get(), kDim, 2 * matrices,
            reinterpret_cast<kernels::cuda::EvictRotation*>(rotation_.get()), nullptr),
        "rotation");
  Check(kernels::cuda::PrepareEvictFeedback(
            plain_feedback.get(), kDim, 2 * matrices,
            reinterpret_cast<kernels::cuda::EvictFeedback*>(feedback_.get()), nullptr),
        "feedback");
  Check(cudaDeviceSynchronize(), "constants");
  host_mean_.assign(kDim, kMean);
  means_ = Upload(std::vector<float>(2 * matrices * kDim, kMean));
}

void EvictTransforms::Set(kernels::cuda::EvictParams* p) const {
  p->k = Of(0, 0.96f);
  p->v = Of(matrices_, 0.92f);
}

kernels::RowTransform EvictTransforms::OnHost(float clip, bool feedback) const {
  return {host_rotation_.data(), host_mean_.data(), clip,
          feedback ? host_feedback_.data() : nullptr};
}

kernels::cuda::EvictTransform EvictTransforms::Of(size_t matrix, float clip) const {
  return {reinterpret_cast<const kernels::cuda::EvictRotation*>(
              rotation_.get() + matrix * kernels::cuda::EvictRotationBytes(kDim)),
          means_.get() + matrix * kDim, clip,
          reinterpret_cast<const kernels::cuda::EvictFeedback*>(
              feedback_.get() + matrix * kernels::cuda::EvictFeedbackBytes(kDim))};
}

// Returns an upper matrix with entries like those of a damped factorization. Its diagonal is 0, or
// with `metric` 1.
std::vector<float> EvictTransforms::RandomFeedback(bool metric) {
  std::vector<float> feedback(static_cast<size_t>(kDim) * kDim, 0.0f);
  std::normal_distribution<float> normal;
  for (int i = 0; i < kDim; ++i) {
    if (metric) feedback[i * kDim + i] = 1.0f;
    for (int j = i + 1; j < kDim; ++j) {
      feedback[i * kDim + j] = 0.3f / (1 + j - i) * normal(random_);
    }
  }
  return feedback;
}

}  // namespace crumb::bench
