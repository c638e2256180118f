// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "crumb/worker_options.h"
#include "kernels/block_format.h"

namespace crumb::client {

class CpuBackend;
struct AttentionCall;

// How the cache of one request fills an engine's blocks.
using kernels::BlockGeometry;

// Returns the geometry of a model. REQUIRES: options are valid.
BlockGeometry BlockGeometryOf(const WorkerOptions& options);

// Checks that attention over blocks serves the options. kInvalidArgument names the option.
absl::Status CheckBlockOptions(const WorkerOptions& options);

// One group's block ids of every request.
using kernels::BlockTable;

// The memory of one layer: block b of each group begins at base + b * block_stride. The groups of
// an engine may share their memory or have their own.
//
// All groups have blocks of one size, block_stride, which has room for one INT2 tile per KV head:
// an engine's allocator need not know which group a block serves. `blocks` bounds the block ids,
// from 0.
struct BlockPool {
  std::byte* history = nullptr;
  std::byte* sink = nullptr;
  std::byte* recent = nullptr;
  int64_t block_stride = 0;  // bytes
  int64_t blocks = 0;
};

// Checks that the pool has memory for every group and room for a layer's tiles in each block.
absl::Status CheckBlockPool(const BlockPool& pool, const BlockGeometry& geometry, int kv_heads);

// The requests of one step, which may mix prompts and decoding requests.
//
// Nothing is kept: the arrays are read during the call. A request without fresh tokens takes no
// part in the step.
struct BlockBatch {
  int requests = 0;
  const int32_t* query_start = nullptr;  // [requests + 1] first fresh token of each request
  const int32_t* lengths = nullptr;      // [requests] tokens with the fresh ones
  BlockTable history;
  BlockTable sink;
  BlockTable recent;
};

// Rows of the fresh tokens of all requests, one behind the other; strides are elements between two
// tokens. q, out [tokens, q_heads, head_dim]; k, v [tokens, kv_heads, head_dim]
struct FreshRows {
  const kernels::Bf16* q = nullptr;
  const kernels::Bf16* k = nullptr;
  const kernels::Bf16* v = nullptr;
  kernels::Bf16* out = nullptr;
  int64_t q_stride = 0;
  int64_t k_stride = 0;
  int64_t v_stride = 0;
  int64_t out_stride = 0;
};

// BlockAttention computes attention for an engine that allocates the blocks of its KV cache itself.
// It keeps no state of requests: everything is in their blocks.
//
// The token at position p attends the sink, history blocks up to the last position that is a
// multiple of 64 and at least options.recent_tokens (256) tokens back, and BF16 rows behind it.
// This holds for prompts and decoding alike, so results do not depend on how a prompt is cut into
// chunks. A window's tile is written when its 64 tokens are complete, while its rows are still
// recent, so that a full history block can be shared at once.
//
// A request that begins with h > 0 computed tokens (a prefix hit: h is a multiple of 64) has valid
// history blocks for positions [64, h) and valid sink blocks. It has no recent rows for them:
// tokens behind h attend all positions in [64, h) as INT2. Callers leave the last
// options.recent_tokens tokens of a prompt out of a hit.
//
// Requests of one step may share blocks that one of them completes in this step.
//
// REQUIRES of the engine: the first recent block of a new request is zero; the bytes of other new
// blocks do not matter. A request whose blocks were freed is a new request when it returns.
// Thread-safe for calls that have no block in common.
class BlockAttention {
 public:
  // kInvalidArgument names the option that is wrong. History has to be INT2 and v_basis "model".
  static absl::StatusOr<std::unique_ptr<BlockAttention>> Open(const WorkerOptions& options);
  ~BlockAttention();

  // The geometry depends on head_dim, group_size and recent_tokens alone. Engines allocate blocks
  // by it.
  const BlockGeometry& geometry() const { return geometry_; }

  // Stores the fresh rows of one layer and computes attention of the fresh tokens. `layer` counts
  // from this rank's first. kInvalidArgument: a block id is outside the pool, or a hit is no
  // multiple of 64; kFailedPrecondition: rows of earlier tokens are missing, because a request went
  // back by too many tokens or a first recent block was not zero. The step must then be given up:
  // headers of requests in front of the one at fault have moved on.
  //
  // Blocks on the calling thread, or on parallel_for, and returns when all outputs are written.
  // Cost beside attention itself: copies of the request's sink and recent rows.
  absl::Status Attend(int layer, const BlockPool& pool, const BlockBatch& batch,
                      const FreshRows& rows) const;

 private:
  struct Request;
  class GatheredRows;

  explicit BlockAttention(const WorkerOptions& options);
  absl::Status Check(int layer, const BlockPool& pool, const BlockBatch& batch) const;
  absl::StatusOr<Request> RequestOf(const BlockPool& pool, const BlockBatch& batch,
                                    int index) const;
  absl::Status ReadHeader(const BlockPool& pool, Request& request) const;
  absl::Status AttendRequest(int layer, const BlockPool& pool, const Request& request,
                             const FreshRows& rows) const;
  absl::Status AttendTokens(AttentionCall& call, int64_t first, const FreshRows& rows) const;
  void Gather(const BlockPool& pool, const Request& request, const FreshRows& rows,
              GatheredRows& gathered) const;
  void StoreShared(int layer, const BlockPool& pool, const Request& request,
                   const FreshRows& rows) const;
  void StoreRows(const BlockPool& pool, const Request& request, const FreshRows& rows, int begin,
                 int end) const;

  const WorkerOptions options_;
  const BlockGeometry geometry_;
  const std::unique_ptr<CpuBackend> backend_;
};

}  // namespace crumb::client
