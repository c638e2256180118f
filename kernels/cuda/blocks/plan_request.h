// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/blocks/blocks_call.h"

// The functions of PlanBlocks for one request, one entry and one page, for host and device.
namespace crumb::kernels::cuda {

CRUMB_HOST_DEVICE inline int LargerOf(int a, int b) { return a > b ? a : b; }
CRUMB_HOST_DEVICE inline int SmallerOf(int a, int b) { return a < b ? a : b; }

// Loads all ids before it decides, so that the loads are in flight together.
CRUMB_HOST_DEVICE inline bool BlocksInPool(const int32_t* ids, int count, int64_t blocks) {
  bool valid = true;
  for (int i = 0; i < count; ++i) valid &= ids[i] >= 0 && ids[i] < blocks;
  return valid;
}

CRUMB_HOST_DEVICE inline BlockHeader* HeaderOf(const PlanBlocksParams& p, int r) {
  const int32_t block = p.recent.blocks[p.recent.stride * r];
  return reinterpret_cast<BlockHeader*>(p.headers + p.block_stride * block);
}

// Returns whether the fresh tokens of request r begin where those of the request before it end. If
// this does not hold for all requests of a step, none is computed: their tokens may overlap, and
// then also their entries of the tables.
CRUMB_HOST_DEVICE inline bool TokensInOrder(const PlanBlocksParams& p, int r) {
  return (r > 0 || p.query_start[0] == 0) && p.query_start[r] <= p.query_start[r + 1];
}

// Checks request r, whose fresh tokens are among the step's, and takes its header. Sets `former`
// and `hit`. Returns its fault. Blocks that all of its tokens attend are left to WritePage, which
// has a thread for each.
CRUMB_HOST_DEVICE inline BlockFault CheckRequest(const PlanBlocksParams& p, int r,
                                                 BlockRequest* request, int* hit) {
  const int windows = request->end / kBlockTokens;
  const bool one = r >= p.decodes || (request->tokens == 1 && request->first == r);
  if (!one || request->tokens > p.request_tokens_max || windows > p.history.stride ||
      windows - 1 > p.pages_max) {
    return kBlockFaultLengths;
  }
  const int first = p.geometry.HistoryEnd(request->begin, 0) / kBlockTokens;
  const int32_t* const history = p.history.blocks + p.history.stride * r;
  if (!BlocksInPool(p.sink.blocks + p.sink.stride * r, p.geometry.sink_blocks, p.blocks) ||
      !BlocksInPool(p.recent.blocks + p.recent.stride * r, p.geometry.recent_blocks, p.blocks) ||
      !BlocksInPool(history + first, windows - first, p.blocks)) {
    return kBlockFaultBlock;
  }
  BlockHeader header = *HeaderOf(p, r);
  request->former = header;
  switch (StartTokens(p.geometry, request->begin, request->end, &header)) {
    case BlockStart::kInsideWindow:
      return kBlockFaultHit;
    case BlockStart::kRowsMissing:
      return kBlockFaultRows;
    case BlockStart::kValid:
      break;
  }
  *HeaderOf(p, r) = header;
  *hit = header.hit;
  return kBlockFaultNone;
}

// Writes entry e for the request's tokens [begin, end), which attend history up to `history_end`.
// Decode counts fresh tokens as the newest recent ones, prefill counts them apart.
CRUMB_HOST_DEVICE inline void WriteEntry(const PlanBlocksParams& p, int e, int r,
                                         const BlockRequest& request, int begin, int end,
                                         int history_end, bool decode) {
  const BlockTables& t = p.tables;
  const int counted = decode ? end : begin;
  const int behind_sink = request.slot + kBlockTokens - request.rows_begin;
  t.request[e] = r;
  t.sink_tokens[e] = SmallerOf(kBlockTokens, counted);
  t.pages[e] = history_end / kBlockTokens - 1;
  t.recent_tokens[e] = LargerOf(0, counted - history_end);
  t.fresh_tokens[e] = end - begin;
  t.fresh_begin[e] = request.first + begin - request.begin;
  // Fresh rows of the sink are adjacent to those behind it, because rows_begin is 64 then.
  t.fresh_row[e] = begin < kBlockTokens ? request.slot + begin : behind_sink + begin;
  t.sink_address[e] = p.rows + p.row_bytes * request.slot;
  t.recent_address[e] = p.rows + p.row_bytes * (behind_sink + history_end);
}

// Writes the entries of request r: one if it decodes, one for each group otherwise.
CRUMB_HOST_DEVICE inline void WriteEntries(const PlanBlocksParams& p, int r,
                                           const BlockRequest& request, int hit) {
  if (r < p.decodes) {
    return WriteEntry(p, r, r, request, request.begin, request.end, request.rows_begin, true);
  }
  int e = p.decode_entries + FirstGroup(request.first - p.query_start[p.decodes], r - p.decodes);
  // The history grows with the token behind which a whole number of windows lies.
  for (int begin = request.begin; begin < request.end;) {
    const int next = (begin + 1) / kBlockTokens * kBlockTokens + kBlockTokens - 1;
    const int end = SmallerOf(request.end, next);
    WriteEntry(p, e++, r, request, begin, end, p.geometry.HistoryEnd(begin, hit), false);
    begin = end;
  }
}

// Writes window w of request r, which is complete with this step, to `index` of the tables.
CRUMB_HOST_DEVICE inline void WriteWindow(const PlanBlocksParams& p, int r,
                                          const BlockRequest& request, int w, int index) {
  const int32_t block = p.history.blocks[p.history.stride * r + w];
  const int slot = request.slot + kBlockTokens + w * kBlockTokens - request.rows_begin;
  p.tables.window_address[index] = p.rows + p.row_bytes * slot;
  p.tables.tile_address[index] = static_cast<uint64_t>(p.block_stride * block);
  p.tables.position_block[index] =
      SmallerOf((w - 1) / p.pages_per_position_block, p.position_blocks - 1);
}

// Marks request r as one that is not computed, and reports why.
CRUMB_HOST_DEVICE inline void Fail(const PlanBlocksParams& p, int r, BlockFault fault) {
  p.tables.requests[r].state = kBlockFailed;
  p.status->request = static_cast<uint32_t>(r);
  p.status->fault = fault;
}

// Plans request r. `in_order`: TokensInOrder holds for all requests of the step. `new_window`
// returns the index of one more window, which is less than BlockWindows because tokens are in
// order.
template <typename NewWindow>
CRUMB_HOST_DEVICE inline void PlanRequest(const PlanBlocksParams& p, int r, bool in_order,
                                          NewWindow new_window) {
  const int first = p.query_start[r], last = p.query_start[r + 1];
  BlockRequest request{};
  request.state = kBlockIdle;
  request.first = SmallerOf(LargerOf(first, 0), p.tokens);
  request.tokens = SmallerOf(LargerOf(last, request.first), p.tokens) - request.first;
  request.end = p.lengths[r];
  BlockRequest& out = p.tables.requests[r];
  out = request;
  const bool fits = in_order && request.first == first && request.first + request.tokens == last;
  const bool padding =
      p.has_padding_block && p.recent.blocks[p.recent.stride * r] == p.padding_block;
  if (fits && (request.tokens == 0 || padding)) return;
  if (!fits || request.end < request.tokens) return Fail(p, r, kBlockFaultLengths);
  request.begin = request.end - request.tokens;
  int hit = 0;
  const BlockFault fault = CheckRequest(p, r, &request, &hit);
  if (fault != kBlockFaultNone) return Fail(p, r, fault);
  request.state = kBlockLive;
  request.rows_begin = p.geometry.HistoryEnd(request.begin, hit);
  request.slot = RequestSlots(p.geometry) * r + request.first;
  out = request;
  WriteEntries(p, r, request, hit);
  const int windows_end = request.end / kBlockTokens;
  for (int w = LargerOf(1, request.begin / kBlockTokens); w < windows_end; ++w) {
    WriteWindow(p, r, request, w, new_window());
  }
}

CRUMB_HOST_DEVICE inline void ClearEntry(const BlockTables& t, int e) {
  t.request[e] = t.sink_tokens[e] = t.pages[e] = t.recent_tokens[e] = t.fresh_tokens[e] = 0;
  t.fresh_begin[e] = t.fresh_row[e] = 0;
  t.sink_address[e] = t.recent_address[e] = 0;
}

// Writes the offset of the history block that is page `page` of entry e. If the block is outside
// the pool, the request fails after all: its header stays unchanged, and its entries are empty.
// Each of them empties itself, because CheckRequest has checked the blocks that only some of them
// have.
CRUMB_HOST_DEVICE inline void WritePage(const PlanBlocksParams& p, int e, int page) {
  const BlockTables& t = p.tables;
  const int r = t.request[e];
  const int32_t block = p.history.blocks[p.history.stride * r + 1 + page];
  if (block < 0 || block >= p.blocks) {
    *HeaderOf(p, r) = t.requests[r].former;
    t.sink_tokens[e] = t.pages[e] = t.recent_tokens[e] = t.fresh_tokens[e] = 0;
    return Fail(p, r, kBlockFaultBlock);
  }
  t.page_address[int64_t{p.pages_max} * e + page] = static_cast<uint64_t>(p.block_stride * block);
}

}  // namespace crumb::kernels::cuda
