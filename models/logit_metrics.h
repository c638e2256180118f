// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "models/logits.h"

// How far the next-token distributions of two runs of one model are apart. Computed in double.
namespace crumb::models {

// Kullback-Leibler divergence KL(softmax(reference) || softmax(other)) in nats; at least 0. Both
// rows have the same size, above 0.
double KlDivergence(std::span<const float> reference, std::span<const float> other);

struct LogitAgreement {
  int rows = 0;
  double mean_kl = 0.0;  // nats per row
  double max_kl = 0.0;
  double top1 = 0.0;  // share of rows whose most likely token is the same, 0 to 1
};

// Row by row over two runs of equal rows and vocab_size; all zero when there are no rows.
LogitAgreement CompareLogits(const Logits& reference, const Logits& other);

}  // namespace crumb::models
