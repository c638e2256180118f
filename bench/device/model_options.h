// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb/worker_options.h"

namespace crumb::bench {

// A worker of Qwen3-8B's shape: 36 layers, 8 KV heads, 32 query heads, head_dim 128, Hadamard
// rotations. Quality is not watched.
client::WorkerOptions Qwen3Of8B();

}  // namespace crumb::bench
