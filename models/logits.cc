// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/logits.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace crumb::models {

int32_t GreedyToken(std::span<const float> logits) {
  size_t best = 0;
  for (size_t i = 1; i < logits.size(); ++i) {
    if (logits[i] > logits[best] || (std::isnan(logits[best]) && !std::isnan(logits[i]))) best = i;
  }
  return static_cast<int32_t>(best);
}

namespace {

// Returns the logarithm of the sum of exp(logits).
double LogSumExp(std::span<const float> logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(logit - top);
  return top + std::log(sum);
}

}  // namespace

double KlDivergence(std::span<const float> reference, std::span<const float> other) {
  const double reference_norm = LogSumExp(reference);
  const double other_norm = LogSumExp(other);
  double kl = 0.0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double log_p = reference[i] - reference_norm;
    kl += std::exp(log_p) * (log_p - (other[i] - other_norm));
  }
  return std::max(kl, 0.0);  // rounding may make the sum slightly negative
}

LogitAgreement CompareLogits(const Logits& reference, const Logits& other) {
  LogitAgreement agreement;
  agreement.rows = reference.rows;
  if (reference.rows == 0) return agreement;
  for (int i = 0; i < reference.rows; ++i) {
    const double kl = KlDivergence(reference.row(i), other.row(i));
    agreement.mean_kl += kl / reference.rows;
    agreement.max_kl = std::max(agreement.max_kl, kl);
    if (GreedyToken(reference.row(i)) == GreedyToken(other.row(i))) agreement.top1 += 1.0;
  }
  agreement.top1 /= reference.rows;
  return agreement;
}

}  // namespace crumb::models
