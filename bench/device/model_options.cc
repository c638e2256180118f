// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/device/model_options.h"

namespace crumb::bench {

client::WorkerOptions Qwen3Of8B() {
  client::WorkerOptions options;
  options.model = "qwen3-8b";
  options.weights = "none";
  options.layers = 36;
  options.kv_heads = 8;
  options.q_heads = 32;
  options.head_dim = 128;
  options.watch_every = 0;
  options.draft_slots = 7;
  options.rotations = client::RotationSet::Hadamard(128).value();
  return options;
}

}  // namespace crumb::bench
