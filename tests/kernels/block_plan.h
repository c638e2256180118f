// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/blocks/plan_request.h"

namespace crumb::kernels::cuda {

// Computes a step's tables as PlanBlocks does, one request after another and in host memory.
inline void PlanBlocksOnHost(const PlanBlocksParams& p) {
  const int entries = p.decode_entries + p.groups;
  for (int e = 0; e < entries; ++e) ClearEntry(p.tables, e);
  bool in_order = true;
  for (int r = 0; r < p.requests; ++r) in_order &= TokensInOrder(p, r);
  int windows = 0;
  for (int r = 0; r < p.requests; ++r) {
    PlanRequest(p, r, in_order, [&windows] { return windows++; });
  }
  *p.tables.windows = windows;
  for (int e = 0; e < entries; ++e) {
    for (int page = 0; page < p.tables.pages[e]; ++page) WritePage(p, e, page);
  }
}

}  // namespace crumb::kernels::cuda
