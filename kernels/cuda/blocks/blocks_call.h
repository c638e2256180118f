// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/block_format.h"
#include "kernels/tile.h"

// One step of attention over an engine's blocks (kernels/block_format.h defines their contents).
// The attention and evict kernels read BF16 rows at fixed strides, whereas blocks hold them in
// pieces of rows_per_block. A step therefore has tables, which PlanBlocks computes once from the
// engine's block tables, and row memory, to which each layer gathers the sink, the recent window
// and the fresh rows of its requests:
//
//   slots of request r   [ sink: 64 ][ positions rows_begin, rows_begin + 1, ..., end - 1 ]
//
// A request has RequestSlots slots more than fresh tokens, so that its first slot follows from
// its number and from its first fresh token. This header needs no CUDA header. All pointers are
// device pointers.

namespace crumb::kernels::cuda {

// Why a request of a step was not computed.
enum BlockFault : uint32_t {
  kBlockFaultNone = 0,
  kBlockFaultLengths = 1,  // query_start or lengths that do not fit each other, or the limits
  kBlockFaultBlock = 2,    // a block id outside the pool
  kBlockFaultHit = 3,      // a new request begins inside a window
  kBlockFaultRows = 4,     // rows of earlier tokens are missing
};

// Written by the device to memory that the host reads without waiting.
struct BlockStatus {
  uint32_t fault;  // fault of the latest faulty request; kBlockFaultNone: none
  uint32_t request;
};

enum BlockRequestState : int32_t { kBlockIdle = 0, kBlockLive = 1, kBlockFailed = 2 };

// A request of the step as PlanBlocks found it. Fresh tokens of every request, also of one at
// fault, are among the step's.
struct BlockRequest {
  int32_t state;
  int32_t first;       // its first fresh token in q, k, v and out
  int32_t tokens;      // fresh tokens
  int32_t begin;       // position of the first
  int32_t end;         // position behind the last
  int32_t rows_begin;  // position of the first gathered row behind the sink
  int32_t slot;        // its first slot
  BlockHeader former;  // its header as it was before this step
};

// Returns the slots of a request beside those of its fresh tokens: the sink, and the recent window
// with one more page.
CRUMB_HOST_DEVICE constexpr int RequestSlots(const BlockGeometry& geometry) {
  return kBlockTokens + geometry.recent_tokens + kBlockTokens;
}

// The arrays that PlanBlocks writes. An entry is a sequence in the attention kernels' terms: first
// come `decode_entries` requests with one fresh token, then groups of up to 64 fresh tokens of
// other requests. The tokens of a group attend the same history. Entries without tokens have
// lengths of 0.
struct BlockTables {
  BlockRequest* requests = nullptr;    // [requests]
  int32_t* request = nullptr;          // [entries]
  int32_t* sink_tokens = nullptr;      // [entries]
  int32_t* pages = nullptr;            // [entries]
  int32_t* recent_tokens = nullptr;    // [entries]
  int32_t* fresh_tokens = nullptr;     // [entries]
  int32_t* fresh_begin = nullptr;      // [entries] first fresh token in q and out
  int32_t* fresh_row = nullptr;        // [entries] its slot
  uint64_t* sink_address = nullptr;    // [entries] in the row memory
  uint64_t* recent_address = nullptr;  // [entries]
  uint64_t* page_address = nullptr;    // [entries, pages_max] offsets of blocks in a pool
  int32_t* windows = nullptr;          // [1] windows that are complete with this step
  uint64_t* window_address = nullptr;  // [windows_max] in the row memory
  uint64_t* tile_address = nullptr;    // [windows_max] offsets of blocks in a pool
  int32_t* position_block = nullptr;   // [windows_max]
};

struct PlanBlocksParams {
  BlockGeometry geometry;
  BlockTables tables;
  int requests = 0;
  int decodes = 0;         // leading requests, which have one fresh token each or none
  int decode_entries = 0;  // `decodes` or more
  int groups = 0;          // entries of the other requests; BlockGroups
  int windows_max = 0;
  int pages_max = 1;                     // pages of an entry, or more
  int tokens = 1;                        // fresh tokens of all requests, or more
  int request_tokens_max = 1;            // fresh tokens of one request, or more
  const int32_t* query_start = nullptr;  // [requests + 1]
  const int32_t* lengths = nullptr;      // [requests]
  BlockTable history, sink, recent;
  std::byte* headers = nullptr;  // recent blocks of the layer whose headers count
  int64_t block_stride = 0;      // bytes
  int64_t blocks = 0;
  // A request whose first recent block is padding_block takes no part.
  bool has_padding_block = false;
  int32_t padding_block = 0;
  int position_blocks = 1;
  int pages_per_position_block = 1;
  uint64_t rows = 0;      // the row memory
  int64_t row_bytes = 0;  // distance between two slots
  BlockStatus* status = nullptr;
};

// Moves of BF16 rows of one layer between fresh rows, blocks and the row memory.
enum class BlockMove : uint8_t {
  kStoreSink,    // fresh rows -> sink blocks
  kStoreRecent,  // fresh rows -> recent blocks
  kStore,        // both
  kGather,       // blocks and fresh rows -> row memory
};

struct MoveBlockRowsParams {
  BlockMove move = BlockMove::kStore;
  BlockGeometry geometry;
  const BlockRequest* request = nullptr;  // [requests] of PlanBlocks
  int requests = 0;
  int request_tokens_max = 1;  // fresh tokens of one request, or more; determines the grid
  int kv_heads = 1;
  int head_dim = 128;
  BlockTable sink, recent;
  std::byte* sink_blocks = nullptr;  // this layer's blocks
  std::byte* recent_blocks = nullptr;
  int64_t block_stride = 0;  // bytes
  const Bf16* k = nullptr;   // [tokens, kv_heads, head_dim]; strides are elements between tokens
  const Bf16* v = nullptr;
  int64_t k_stride = 0;
  int64_t v_stride = 0;
  std::byte* rows = nullptr;  // K of [kv_heads, slots, head_dim], then V
  int64_t slots = 0;
  // Rows of tokens of requests that were not computed become NaN.
  Bf16* out = nullptr;  // [tokens, out_elements]
  int64_t out_stride = 0;
  int64_t out_elements = 0;
};

// Returns the first group of the request whose first fresh token is `first`, counted from the first
// request behind the decoding ones. A request with n tokens has at most n / 64 + 2.
CRUMB_HOST_DEVICE constexpr int FirstGroup(int first, int request) {
  return first / kBlockTokens + 2 * request;
}
// Returns how many groups a step needs at most.
CRUMB_HOST_DEVICE constexpr int BlockGroups(int tokens, int requests) {
  return requests == 0 ? 0 : FirstGroup(tokens, requests);
}
CRUMB_HOST_DEVICE constexpr int BlockWindows(int tokens, int requests) {
  return tokens / kBlockTokens + requests;
}

}  // namespace crumb::kernels::cuda
