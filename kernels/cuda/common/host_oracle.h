// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.h"

// Attention in double precision for long contexts, on the host: the definition of
// kernels/attention.h with the query rotated and the INT2 part turned back once per row, not once
// per position. Pages are INT2. For tests and the benchmark of the CUDA back end.
namespace crumb::kernels::cuda {

struct OracleRow {
  std::vector<double> out;  // [head_dim]
  double lse = 0.0;
};

// Addresses in `params` are host addresses.
OracleRow OracleAttend(const AttentionParams& params, int q_token, int q_head);

}  // namespace crumb::kernels::cuda
