// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.h"

// Attention in double precision on the host, for tests and the benchmark of the CUDA back end. It
// is the definition of kernels/attention.h, made fast enough for long contexts: the query is
// rotated, and the INT2 part of the output inverse-rotated, once per row instead of once per
// position. Pages are INT2.
namespace crumb::kernels::cuda {

struct OracleRow {
  std::vector<double> out;  // [head_dim]
  double lse = 0.0;
};

// Returns the attention of one query row. REQUIRES: addresses in `params` are host addresses.
OracleRow OracleAttend(const AttentionParams& params, int q_token, int q_head);

}  // namespace crumb::kernels::cuda
