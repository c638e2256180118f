// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/block_attention.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "client/cpu/cpu_backend.h"
#include "common/page_key.h"
#include "common/status_macros.h"
#include "kernels/bf16.h"

namespace crumb::client {
namespace {

using kernels::Bf16;
using kernels::BlockHeader;
using kernels::BlockStart;

static_assert(kernels::kBlockTokens == kPageTokens);

int DivideUp(int value, int by) { return (value + by - 1) / by; }

// Rows of one request and layer in paged memory.
class PagedRowMemory {
 public:
  PagedRowMemory(std::byte* base, int64_t block_stride, const int32_t* blocks,
                 const BlockGeometry& geometry, int head_dim)
      : base_(base),
        block_stride_(block_stride),
        blocks_(blocks),
        geometry_(geometry),
        head_dim_(head_dim) {}

  // Returns the K row, behind which V lies.
  Bf16* row(int index, int head) const {
    std::byte* const block = base_ + block_stride_ * blocks_[index / geometry_.rows_per_block];
    return reinterpret_cast<Bf16*>(block + int64_t{head} * geometry_.tile_bytes) +
           int64_t{index % geometry_.rows_per_block} * 2 * head_dim_;
  }

 private:
  std::byte* base_;
  int64_t block_stride_;
  const int32_t* blocks_;
  const BlockGeometry& geometry_;
  int head_dim_;
};

}  // namespace

// The sink and the rows from position `begin` on, each KV head by itself, as kernels read them.
class BlockAttention::GatheredRows {
 public:
  GatheredRows(int begin, int end, int heads, int head_dim)
      : begin_(begin),
        tokens_(kPageTokens + std::max(0, end - begin)),
        head_dim_(head_dim),
        k_(static_cast<size_t>(tokens_) * heads * head_dim),
        v_(k_.size()) {}

  void Set(int position, int head, const Bf16* k, const Bf16* v) {
    const int64_t at = At(position, head);
    std::memcpy(&k_[at], k, head_dim_ * sizeof(Bf16));
    std::memcpy(&v_[at], v, head_dim_ * sizeof(Bf16));
  }

  int begin() const { return begin_; }
  int end() const { return begin_ + tokens_ - kPageTokens; }
  LayerRows sink() const { return From(0); }
  LayerRows recent() const { return From(kPageTokens); }
  WindowRows window(int position, int head) const {
    const int64_t at = At(position, head);
    return {.k = &k_[at], .v = &v_[at], .stride = head_dim_};
  }

 private:
  int64_t At(int position, int head) const {
    const int token = position < kPageTokens ? position : kPageTokens + position - begin_;
    return (int64_t{head} * tokens_ + token) * head_dim_;
  }
  LayerRows From(int token) const {
    const int64_t at = int64_t{token} * head_dim_;
    return {.k = k_.data() + at,
            .v = v_.data() + at,
            .head_stride = int64_t{tokens_} * head_dim_,
            .token_stride = head_dim_};
  }

  int begin_;
  int tokens_;
  int head_dim_;
  std::vector<Bf16> k_;  // [heads, tokens, head_dim]
  std::vector<Bf16> v_;
};

// One request of a step.
struct BlockAttention::Request {
  int index = 0;
  int first = 0;   // its first fresh token in the step's rows
  int tokens = 0;  // fresh tokens
  int begin = 0;   // position of the first
  int end = 0;
  int hit = 0;
  const int32_t* history = nullptr;
  const int32_t* sink = nullptr;
  const int32_t* recent = nullptr;
};

BlockGeometry BlockGeometryOf(const WorkerOptions& options) {
  BlockGeometry geometry;
  geometry.tile_bytes = static_cast<int>(options.tile_shape().int2_bytes());
  geometry.rows_per_block =
      geometry.tile_bytes / static_cast<int>(2 * options.head_dim * sizeof(Bf16));
  geometry.sink_blocks = DivideUp(kPageTokens, geometry.rows_per_block);
  geometry.recent_tokens = options.recent_tokens;
  // One more window than the minimum is there before the oldest becomes history.
  geometry.recent_blocks =
      DivideUp(1 + options.recent_tokens + kPageTokens, geometry.rows_per_block);
  return geometry;
}

absl::Status CheckBlockPool(const BlockPool& pool, const BlockGeometry& geometry, int kv_heads) {
  if (pool.history == nullptr || pool.sink == nullptr || pool.recent == nullptr ||
      pool.block_stride < int64_t{geometry.tile_bytes} * kv_heads) {
    return absl::InvalidArgumentError(
        "the pool has no memory for one of its groups, or its block_stride is less than the tiles "
        "of a layer");
  }
  return absl::OkStatus();
}

BlockAttention::BlockAttention(const WorkerOptions& options)
    : options_(options),
      geometry_(BlockGeometryOf(options)),
      backend_(std::make_unique<CpuBackend>(options_)) {}

BlockAttention::~BlockAttention() = default;

absl::Status CheckBlockOptions(const WorkerOptions& options) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  if (options.history_format != kernels::PageFormat::kInt2) {
    return absl::InvalidArgumentError("block attention has INT2 history only, not BF16");
  }
  if (options.v_basis != "model") {
    return absl::InvalidArgumentError(
        "v_basis: an engine's values are in the model's basis, and the rotation file has them "
        "rotated");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<BlockAttention>> BlockAttention::Open(const WorkerOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckBlockOptions(options));
  return std::unique_ptr<BlockAttention>(new BlockAttention(options));
}

absl::Status BlockAttention::Check(int layer, const BlockPool& pool,
                                   const BlockBatch& batch) const {
  if (layer < 0 || layer >= options_.own_layers()) {
    return absl::InvalidArgumentError("layer " + std::to_string(layer) + " of " +
                                      std::to_string(options_.own_layers()));
  }
  CRUMB_RETURN_IF_ERROR(CheckBlockPool(pool, geometry_, options_.own_kv_heads()));
  if (batch.requests < 0 || (batch.requests > 0 && batch.query_start[0] != 0)) {
    return absl::InvalidArgumentError("the batch's query_start does not begin with 0");
  }
  return absl::OkStatus();
}

absl::StatusOr<BlockAttention::Request> BlockAttention::RequestOf(const BlockPool& pool,
                                                                  const BlockBatch& batch,
                                                                  int index) const {
  Request request;
  request.index = index;
  request.first = batch.query_start[index];
  request.tokens = batch.query_start[index + 1] - request.first;
  if (request.tokens == 0) return request;
  request.end = batch.lengths[index];
  request.begin = request.end - request.tokens;
  if (request.tokens < 0 || request.begin < 0) {
    return absl::InvalidArgumentError("request " + std::to_string(index) + " has " +
                                      std::to_string(request.end) + " tokens, of which " +
                                      std::to_string(request.tokens) + " are fresh");
  }
  request.history = batch.history.blocks + batch.history.stride * index;
  request.sink = batch.sink.blocks + batch.sink.stride * index;
  request.recent = batch.recent.blocks + batch.recent.stride * index;
  const auto valid = [&](const BlockTable& table, const int32_t* blocks, int count) {
    return count <= table.stride && std::all_of(blocks, blocks + count, [&](int32_t block) {
             return block >= 0 && block < pool.blocks;
           });
  };
  if (!valid(batch.history, request.history, request.end / kPageTokens) ||
      !valid(batch.sink, request.sink, geometry_.sink_blocks) ||
      !valid(batch.recent, request.recent, geometry_.recent_blocks)) {
    return absl::InvalidArgumentError("request " + std::to_string(index) + " with " +
                                      std::to_string(request.end) +
                                      " tokens has too few blocks, or one outside the pool");
  }
  CRUMB_RETURN_IF_ERROR(ReadHeader(pool, request));
  return request;
}

absl::Status BlockAttention::ReadHeader(const BlockPool& pool, Request& request) const {
  std::byte* const place = pool.recent + pool.block_stride * request.recent[0];
  BlockHeader header;
  std::memcpy(&header, place, sizeof(header));
  switch (StartTokens(geometry_, request.begin, request.end, &header)) {
    case BlockStart::kInsideWindow:
      return absl::InvalidArgumentError("request " + std::to_string(request.index) +
                                        " begins with " + std::to_string(request.begin) +
                                        " computed tokens, which is no multiple of 64");
    case BlockStart::kRowsMissing:
      return absl::FailedPreconditionError(
          "request " + std::to_string(request.index) + " continues at token " +
          std::to_string(request.begin) + ", and its recent blocks hold rows up to token " +
          std::to_string(header.length) + ": new requests need a first recent block of zeros");
    case BlockStart::kValid:
      break;
  }
  std::memcpy(place, &header, sizeof(header));
  request.hit = header.hit;
  return absl::OkStatus();
}

absl::Status BlockAttention::Attend(int layer, const BlockPool& pool, const BlockBatch& batch,
                                    const FreshRows& rows) const {
  CRUMB_RETURN_IF_ERROR(Check(layer, pool, batch));
  std::vector<Request> requests;
  for (int i = 0; i < batch.requests; ++i) {
    CRUMB_ASSIGN_OR_RETURN(const Request request, RequestOf(pool, batch, i));
    if (request.tokens > 0) requests.push_back(request);
  }
  // Engines share blocks as soon as their tokens are scheduled: a request may attend blocks that
  // another request, anywhere in the batch, completes in this step.
  for (const Request& request : requests) StoreShared(layer, pool, request, rows);
  for (const Request& request : requests) {
    CRUMB_RETURN_IF_ERROR(AttendRequest(layer, pool, request, rows));
  }
  return absl::OkStatus();
}

// Stores the blocks that other requests may read: rows of the sink, and tiles of the windows that
// are complete with this step.
void BlockAttention::StoreShared(int layer, const BlockPool& pool, const Request& request,
                                 const FreshRows& rows) const {
  StoreRows(pool, request, rows, request.begin, std::min(request.end, kPageTokens));
  const int first = std::max(1, request.begin / kPageTokens);
  const int last = request.end / kPageTokens;
  if (first >= last) return;
  GatheredRows gathered(first * kPageTokens, last * kPageTokens, options_.own_kv_heads(),
                        options_.head_dim);
  Gather(pool, request, rows, gathered);
  Page page;
  page.tile_bytes = geometry_.tile_bytes;
  for (int w = first; w < last; ++w) {
    page.position = static_cast<uint32_t>(w);
    page.tiles = pool.history + pool.block_stride * request.history[w];
    backend_->StoreTiles([&](int head) { return gathered.window(w * kPageTokens, head); }, layer,
                         page);
  }
}

absl::Status BlockAttention::AttendRequest(int layer, const BlockPool& pool, const Request& request,
                                           const FreshRows& rows) const {
  GatheredRows gathered(geometry_.HistoryEnd(request.begin, request.hit), request.end,
                        options_.own_kv_heads(), options_.head_dim);
  Gather(pool, request, rows, gathered);
  // The latest rows, as many as there is room for. They replace rows that were gathered.
  const int oldest = std::max(kPageTokens, request.end - geometry_.recent_capacity());
  StoreRows(pool, request, rows, std::max(request.begin, oldest), request.end);
  std::vector<uint64_t> pages;
  for (int p = request.begin; p < request.end;) {
    // Tokens with the same history are attended together.
    const int history_end = geometry_.HistoryEnd(p, request.hit);
    int last = p + 1;
    while (last < request.end && geometry_.HistoryEnd(last, request.hit) == history_end) ++last;
    while (static_cast<int>(pages.size()) < history_end / kPageTokens - 1) {
      const int32_t block = request.history[1 + pages.size()];
      pages.push_back(reinterpret_cast<uint64_t>(pool.history + pool.block_stride * block));
    }
    AttentionCall call;
    call.layer = layer;
    call.q_tokens = last - p;
    call.sink = gathered.sink();
    call.sink_tokens = std::min(kPageTokens, last);
    call.pages = pages;
    call.recent = gathered.recent();
    call.recent_begin = history_end - gathered.begin();
    call.recent_capacity = std::max(1, request.end - gathered.begin());
    call.recent_tokens = std::max(0, last - history_end);
    CRUMB_RETURN_IF_ERROR(AttendTokens(call, request.first + p - request.begin, rows));
    p = last;
  }
  return absl::OkStatus();
}

// Computes `call` for the fresh tokens from `first` on.
absl::Status BlockAttention::AttendTokens(AttentionCall& call, int64_t first,
                                          const FreshRows& rows) const {
  const int64_t elements = int64_t{options_.own_q_heads()} * options_.head_dim;
  std::vector<Bf16> q(call.q_tokens * elements);
  std::vector<float> out(q.size());
  for (int t = 0; t < call.q_tokens; ++t) {
    std::memcpy(&q[t * elements], rows.q + (first + t) * rows.q_stride, elements * sizeof(Bf16));
  }
  call.q = q.data();
  call.out = out.data();
  CRUMB_RETURN_IF_ERROR(backend_->Attend(call));
  for (int t = 0; t < call.q_tokens; ++t) {
    Bf16* const to = rows.out + (first + t) * rows.out_stride;
    for (int64_t i = 0; i < elements; ++i) to[i] = kernels::Bf16FromFloat(out[t * elements + i]);
  }
  return absl::OkStatus();
}

// Copies the sink, and the rows of the positions that `gathered` has, from blocks and fresh rows.
void BlockAttention::Gather(const BlockPool& pool, const Request& request, const FreshRows& rows,
                            GatheredRows& gathered) const {
  const int dim = options_.head_dim;
  const PagedRowMemory sink(pool.sink, pool.block_stride, request.sink, geometry_, dim);
  const PagedRowMemory recent(pool.recent, pool.block_stride, request.recent, geometry_, dim);
  for (int head = 0; head < options_.own_kv_heads(); ++head) {
    for (int p = 0; p < std::min(kPageTokens, request.begin); ++p) {
      const Bf16* const row = sink.row(p, head);
      gathered.Set(p, head, row, row + dim);
    }
    for (int p = gathered.begin(); p < request.begin; ++p) {
      const Bf16* const row = recent.row(geometry_.recent_row(p), head);
      gathered.Set(p, head, row, row + dim);
    }
    for (int p = request.begin; p < std::min(request.end, gathered.end()); ++p) {
      if (p >= kPageTokens && p < gathered.begin()) continue;
      const int64_t at = request.first + p - request.begin;
      gathered.Set(p, head, rows.k + at * rows.k_stride + int64_t{head} * dim,
                   rows.v + at * rows.v_stride + int64_t{head} * dim);
    }
  }
}

// Stores the fresh rows of positions [begin, end), all of the sink or none.
void BlockAttention::StoreRows(const BlockPool& pool, const Request& request, const FreshRows& rows,
                               int begin, int end) const {
  const int dim = options_.head_dim;
  const PagedRowMemory sink(pool.sink, pool.block_stride, request.sink, geometry_, dim);
  const PagedRowMemory recent(pool.recent, pool.block_stride, request.recent, geometry_, dim);
  for (int p = begin; p < end; ++p) {
    const int64_t at = request.first + p - request.begin;
    for (int head = 0; head < options_.own_kv_heads(); ++head) {
      Bf16* const row =
          p < kPageTokens ? sink.row(p, head) : recent.row(geometry_.recent_row(p), head);
      std::memcpy(row, rows.k + at * rows.k_stride + int64_t{head} * dim, dim * sizeof(Bf16));
      std::memcpy(row + dim, rows.v + at * rows.v_stride + int64_t{head} * dim, dim * sizeof(Bf16));
    }
  }
}

}  // namespace crumb::client
