// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/attention_inputs.h"
#include "kernels/cuda/decode/decode_call.h"

// What a call of AppendRows is given (append.h). Plain data that needs no CUDA header. All pointers
// are device pointers.
namespace crumb::kernels::cuda {

inline constexpr int kAppendTokensMax = 16384;

struct AppendParams {
  int batch = 1;     // sequences, padding included
  int q_tokens = 1;  // rows of k and v per sequence, at most kAppendTokensMax
  int kv_heads = 1;
  int head_dim = 128;  // a multiple of 8

  // Row of (sequence, token, head) of k and v: sequence * sequence_stride + token * token_stride +
  // head * head_stride elements in; multiples of 8.
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t sequence_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  // Lengths after the append. The sequence's newest rows are the new ones, in order: those that
  // recent_tokens counts lie at the ring's end, what is left (a sequence that still fills its first
  // page) at the sink's end. A sequence with all lengths 0 is padding: nothing is written.
  DecodeLengths lengths;
  const int32_t* new_tokens = nullptr;  // [batch] rows to append, at most q_tokens; null: q_tokens
  Bf16Rows sink;
  Bf16Rows recent;
  int recent_capacity = 1;  // slots of the ring
};

}  // namespace crumb::kernels::cuda
