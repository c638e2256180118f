// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace crumb::client {

// What quantization did to one layer of one evicted window. Ratios of Euclidean norms; 0: exact.
struct QualitySample {
  int layer = 0;
  float attention_error = 0.0f;  // of attention over the window's 64 tokens, for recent queries
  float key_error = 0.0f;        // of the window's keys
  float value_error = 0.0f;      // of its values
};

}  // namespace crumb::client
