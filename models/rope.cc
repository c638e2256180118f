// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "fmt/format.h"

namespace crumb::models {

namespace {

// Returns the (fractional) index of the pair that is rotated `turns` times in the original context.
double PairWithTurns(double turns, const RopeConfig& config, int head_dim) {
  return head_dim * std::log(config.original_max_positions / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(config.theta));
}

// Returns 0 if a pair keeps its frequency, 1 if it is extended by the factor, and values between
// for the pairs between.
double YarnStretch(int pair, const RopeConfig& config, int head_dim) {
  const double low = std::max(std::floor(PairWithTurns(config.beta_fast, config, head_dim)), 0.0);
  double high = std::min(std::ceil(PairWithTurns(config.beta_slow, config, head_dim)),
                         static_cast<double>(head_dim - 1));
  if (low == high) high += 0.001;
  return std::clamp((pair - low) / (high - low), 0.0, 1.0);
}

// Does the same with Llama 3's scaling, whose bounds are numbers of rotations in the original
// context.
double Llama3Stretch(double frequency, const RopeConfig& config) {
  const double turns = config.original_max_positions * frequency / (2 * std::numbers::pi);
  const double kept = (turns - config.low_frequency_factor) /
                      (config.high_frequency_factor - config.low_frequency_factor);
  return 1.0 - std::clamp(kept, 0.0, 1.0);
}

}  // namespace

Rope::Rope(const RopeConfig& config, int head_dim)
    : frequencies_(head_dim / 2), factor_(static_cast<float>(config.attention_factor)) {
  for (int i = 0; i < head_dim / 2; ++i) {
    const double own = std::pow(config.theta, -2.0 * i / head_dim);
    double stretch = 0.0;
    if (config.kind == RopeConfig::Kind::kLinear) stretch = 1.0;
    if (config.kind == RopeConfig::Kind::kYarn) stretch = YarnStretch(i, config, head_dim);
    if (config.kind == RopeConfig::Kind::kLlama3) stretch = Llama3Stretch(own, config);
    frequencies_[i] = static_cast<float>(own * (1.0 - stretch) + own / config.factor * stretch);
  }
}

void Rope::At(int position, float* cosine, float* sine) const {
  for (size_t i = 0; i < frequencies_.size(); ++i) {
    // The published architecture rounds the angle to f32, an error of about 1e-4 at position 4,000.
    // A double would be closer to the mathematics, but further from the trained model.
    const float angle = static_cast<float>(position) * frequencies_[i];
    cosine[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * factor_;
    sine[i] = static_cast<float>(std::sin(static_cast<double>(angle))) * factor_;
  }
}

void ApplyRope(const float* cosine, const float* sine, int head_dim, float* row) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = row[i];
    const float b = row[i + half];
    row[i] = a * cosine[i] - b * sine[i];
    row[i + half] = b * cosine[i] + a * sine[i];
  }
}

std::string DescribeRope(const RopeConfig& config) {
  std::string line = fmt::format(
      "kind={} theta={} factor={} original={} fast={} slow={} attention={}",
      static_cast<int>(config.kind), config.theta, config.factor, config.original_max_positions,
      config.beta_fast, config.beta_slow, config.attention_factor);
  // Lines of the other kinds stay as they are, because they are part of stored page keys.
  if (config.kind == RopeConfig::Kind::kLlama3) {
    line +=
        fmt::format(" low={} high={}", config.low_frequency_factor, config.high_frequency_factor);
  }
  return line;
}

}  // namespace crumb::models
