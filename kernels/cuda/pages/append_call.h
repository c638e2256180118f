// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/attention_inputs.h"
#include "kernels/cuda/decode/decode_call.h"

// Arguments of AppendRows (pages.h). This header is plain data and needs no CUDA header. All
// pointers are device pointers.
namespace crumb::kernels::cuda {

// Bound on q_tokens: keeps the number of threads of a launch within an int for every batch.
inline constexpr int kAppendTokensMax = 16384;

struct AppendParams {
  int batch = 1;     // sequences, padding included
  int q_tokens = 1;  // rows of k and v per sequence, at most kAppendTokensMax
  int kv_heads = 1;
  int head_dim = 128;  // a multiple of 8

  // The bf16 row of (sequence, token, head) begins sequence * sequence_stride + token *
  // token_stride + head * head_stride elements into k and v. Strides are multiples of 8.
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t sequence_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  // Lengths after the append. A sequence's newest rows are the new ones, in order. Those that
  // recent_tokens counts are written to the ring's end; the rest, of a sequence that is still
  // filling its first page, to the sink's end. A sequence whose lengths are all 0 is padding, and
  // nothing is written for it.
  DecodeLengths lengths;
  const int32_t* new_tokens = nullptr;  // [batch] rows to append, at most q_tokens; null: q_tokens
  Bf16Rows sink;
  Bf16Rows recent;
  int recent_capacity = 1;  // slots of the ring
};

}  // namespace crumb::kernels::cuda
