// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/logit_metrics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "models/sampler.h"

namespace crumb::models {

namespace {

// log of the sum of exp(logits).
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
  return std::max(kl, 0.0);  // rounding can leave a tiny negative sum
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
