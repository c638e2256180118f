// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels/evict_transforms.h"

#include "bench/kernels/device_rates.h"
#include "bench/kernels/random_data.h"

namespace crumb::bench {
namespace {

constexpr int kDim = 128;
constexpr float kMean = 0.01f;

}  // namespace

EvictTransforms::EvictTransforms(int matrices) : matrices_(matrices), random_(9) {
  std::vector<float> rotations, feedbacks;
  host_rotation_ = RandomRotation(kDim, random_);
  host_feedback_ = RandomFeedback();
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

// Strictly upper, entries as a damped factorization gives them.
std::vector<float> EvictTransforms::RandomFeedback() {
  std::vector<float> feedback(static_cast<size_t>(kDim) * kDim, 0.0f);
  std::normal_distribution<float> normal;
  for (int i = 0; i < kDim; ++i) {
    for (int j = i + 1; j < kDim; ++j) {
      feedback[i * kDim + j] = 0.3f / (1 + j - i) * normal(random_);
    }
  }
  return feedback;
}

}  // namespace crumb::bench
