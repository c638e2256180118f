// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/block_plan.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/blocks/row_copies.h"

namespace crumb::kernels::cuda {
namespace {

constexpr int kHistoryColumns = 40;
constexpr int kBlocks = 200;
constexpr int kBlockStride = 256;
constexpr uint64_t kRows = 1 << 20;  // an address that is never read
constexpr int kRowBytes = 256;
constexpr int kHeads = 2, kHeadDim = 16;
constexpr BlockGeometry kGeometry = {.tile_bytes = 100 * 4 * kHeadDim,
                                     .rows_per_block = 100,
                                     .sink_blocks = 1,
                                     .recent_blocks = 4,
                                     .recent_tokens = 256};

// An array of a table, between elements that must not be written.
template <typename Element>
class Array {
 public:
  explicit Array(int size) : elements_(size + 2 * kGuard, Guard()) {}
  Element* data() { return elements_.data() + kGuard; }
  int size() const { return static_cast<int>(elements_.size()) - 2 * kGuard; }
  const Element& operator[](int i) const { return elements_[kGuard + i]; }
  bool GuardsAreIntact() const {
    const Element guard = Guard();
    const auto is_guard = [&](const Element& x) {
      return std::memcmp(&x, &guard, sizeof(Element)) == 0;
    };
    return std::all_of(elements_.begin(), elements_.begin() + kGuard, is_guard) &&
           std::all_of(elements_.end() - kGuard, elements_.end(), is_guard);
  }

 private:
  static constexpr int kGuard = 512;
  static Element Guard() {
    Element guard;
    std::memset(&guard, 0x5b, sizeof(guard));
    return guard;
  }
  std::vector<Element> elements_;
};

// The bounds of a step, which the host knows.
struct Bounds {
  int requests = 0;
  int decodes = 0;
  int tokens = 0;
  int request_tokens_max = 0;
};

// A step over blocks in host memory. Tests set the engine's tables, and Plan computes the others,
// whose arrays are no larger than a step with these bounds may need.
class Step {
 public:
  explicit Step(const Bounds& given)
      : bounds(given),
        query_start(given.requests + 1),
        lengths(given.requests),
        history(given.requests * kHistoryColumns, -1),
        sink(given.requests, -1),
        recent(given.requests * kGeometry.recent_blocks, -1),
        pool(kBlocks * kBlockStride),
        groups(BlockGroups(given.tokens, given.requests - given.decodes)),
        windows_max(BlockWindows(given.tokens, given.requests)),
        requests(given.requests),
        request(given.decodes + groups),
        sink_tokens(request.size()),
        pages(request.size()),
        recent_tokens(request.size()),
        fresh_tokens(request.size()),
        fresh_begin(request.size()),
        fresh_row(request.size()),
        sink_address(request.size()),
        recent_address(request.size()),
        page_address(request.size() * kHistoryColumns),
        windows(1),
        window_address(windows_max),
        tile_address(windows_max),
        position_block(windows_max) {}

  // Gives request r blocks of its own. It has `hit` tokens of a prefix, and of `stored` tokens its
  // rows are stored; 0: it is new.
  void Place(int r, int hit, int stored) {
    const auto take = [&] { return next_block_++ % kBlocks; };
    sink[r] = take();
    for (int i = 0; i < kGeometry.recent_blocks; ++i) {
      recent[r * kGeometry.recent_blocks + i] = take();
    }
    for (int i = 0; i < kHistoryColumns; ++i) history[r * kHistoryColumns + i] = take();
    if (stored == 0) return;
    const BlockHeader header = {.magic = kBlockHeaderMagic, .hit = hit, .length = stored};
    std::memcpy(HeaderBytes(r), &header, sizeof(header));
  }
  std::byte* HeaderBytes(int r) {
    return pool.data() + int64_t{kBlockStride} * recent[r * kGeometry.recent_blocks];
  }
  BlockHeader Header(int r) {
    BlockHeader header;
    std::memcpy(&header, HeaderBytes(r), sizeof(header));
    return header;
  }
  int fault() const { return static_cast<int>(status.fault); }

  BlockTables Tables() {
    return {.requests = requests.data(),
            .request = request.data(),
            .sink_tokens = sink_tokens.data(),
            .pages = pages.data(),
            .recent_tokens = recent_tokens.data(),
            .fresh_tokens = fresh_tokens.data(),
            .fresh_begin = fresh_begin.data(),
            .fresh_row = fresh_row.data(),
            .sink_address = sink_address.data(),
            .recent_address = recent_address.data(),
            .page_address = page_address.data(),
            .windows = windows.data(),
            .window_address = window_address.data(),
            .tile_address = tile_address.data(),
            .position_block = position_block.data()};
  }
  void Plan() {
    PlanBlocksParams p;
    p.geometry = kGeometry;
    p.tables = Tables();
    p.requests = bounds.requests;
    p.decodes = p.decode_entries = bounds.decodes;
    p.groups = groups;
    p.windows_max = windows_max;
    p.pages_max = kHistoryColumns;
    p.tokens = bounds.tokens;
    p.request_tokens_max = bounds.request_tokens_max;
    p.query_start = query_start.data();
    p.lengths = lengths.data();
    p.history = {history.data(), kHistoryColumns};
    p.sink = {sink.data(), 1};
    p.recent = {recent.data(), kGeometry.recent_blocks};
    p.headers = pool.data();
    p.block_stride = kBlockStride;
    p.blocks = kBlocks;
    p.has_padding_block = has_padding_block;
    p.padding_block = padding_block;
    p.position_blocks = 2;
    p.pages_per_position_block = 3;
    p.rows = kRows;
    p.row_bytes = kRowBytes;
    p.status = &status;
    PlanBlocksOnHost(p);
  }

  int64_t slots() const {
    return int64_t{RequestSlots(kGeometry)} * bounds.requests + bounds.tokens;
  }

  Bounds bounds;
  std::vector<int32_t> query_start, lengths, history, sink, recent;
  std::vector<std::byte> pool;
  bool has_padding_block = false;
  int32_t padding_block = 0;
  BlockStatus status = {};
  int groups, windows_max;
  Array<BlockRequest> requests;
  Array<int32_t> request, sink_tokens, pages, recent_tokens, fresh_tokens, fresh_begin, fresh_row;
  Array<uint64_t> sink_address, recent_address, page_address;
  Array<int32_t> windows;
  Array<uint64_t> window_address, tile_address;
  Array<int32_t> position_block;

 private:
  int next_block_ = 0;
};

void ExpectGuards(const Step& s) {
  EXPECT_TRUE(s.requests.GuardsAreIntact());
  for (const auto* array : {&s.request, &s.sink_tokens, &s.pages, &s.recent_tokens, &s.fresh_tokens,
                            &s.fresh_begin, &s.fresh_row, &s.windows, &s.position_block}) {
    EXPECT_TRUE(array->GuardsAreIntact());
  }
  for (const auto* array :
       {&s.sink_address, &s.recent_address, &s.page_address, &s.window_address, &s.tile_address}) {
    EXPECT_TRUE(array->GuardsAreIntact());
  }
}

void ExpectSlot(const Step& s, uint64_t address, int tokens) {
  EXPECT_GE(address, kRows);
  EXPECT_LE(address - kRows + uint64_t{kRowBytes} * tokens, uint64_t{kRowBytes} * s.slots());
}

// Expects every address of the plan inside the memory that it belongs to.
void ExpectInBounds(Step& s) {
  ExpectGuards(s);
  ASSERT_LE(s.windows[0], s.windows_max);
  for (int w = 0; w < s.windows[0]; ++w) {
    ExpectSlot(s, s.window_address[w], 64);
    EXPECT_LE(s.tile_address[w], uint64_t{kBlockStride} * (kBlocks - 1));
  }
  for (int e = 0; e < s.request.size(); ++e) {
    EXPECT_GE(s.pages[e], 0);
    if (s.fresh_tokens[e] == 0) {
      EXPECT_EQ(s.sink_tokens[e] + s.pages[e] + s.recent_tokens[e], 0);
      continue;
    }
    EXPECT_EQ(s.requests[s.request[e]].state, kBlockLive);
    EXPECT_LE(s.fresh_begin[e] + s.fresh_tokens[e], s.bounds.tokens);
    EXPECT_LE(s.fresh_row[e] + s.fresh_tokens[e], s.slots());
    ExpectSlot(s, s.sink_address[e], s.sink_tokens[e]);
    ExpectSlot(s, s.recent_address[e], s.recent_tokens[e]);
    ASSERT_LE(s.pages[e], kHistoryColumns);
    for (int page = 0; page < s.pages[e]; ++page) {
      EXPECT_LE(s.page_address[e * kHistoryColumns + page], uint64_t{kBlockStride} * (kBlocks - 1));
    }
  }
}

// Expects no two requests with the same fresh tokens, and all among the step's.
void ExpectTokens(Step& s) {
  std::vector<int> owners(s.bounds.tokens);
  for (int r = 0; r < s.bounds.requests; ++r) {
    const BlockRequest& request = s.requests[r];
    ASSERT_GE(request.first, 0);
    ASSERT_GE(request.tokens, 0);
    ASSERT_LE(request.first + request.tokens, s.bounds.tokens);
    if (request.state != kBlockLive) continue;
    EXPECT_LE(request.tokens, s.bounds.request_tokens_max);
    for (int t = 0; t < request.tokens; ++t) EXPECT_EQ(owners[request.first + t]++, 0);
  }
}

// Expects copies of rows between the memories that they belong to.
void ExpectRowCopies(Step& s) {
  MoveBlockRowsParams p;
  p.geometry = kGeometry;
  p.request = s.requests.data();
  p.requests = s.bounds.requests;
  p.request_tokens_max = s.bounds.request_tokens_max;
  p.kv_heads = kHeads;
  p.head_dim = kHeadDim;
  p.sink = {s.sink.data(), 1};
  p.recent = {s.recent.data(), kGeometry.recent_blocks};
  p.block_stride = int64_t{kHeads} * kGeometry.tile_bytes;
  std::vector<std::byte> blocks(kBlocks * p.block_stride);
  p.sink_blocks = p.recent_blocks = blocks.data();
  std::vector<Bf16> fresh(size_t{1} * s.bounds.tokens * kHeads * kHeadDim);
  p.k = p.v = fresh.data();
  p.k_stride = p.v_stride = int64_t{kHeads} * kHeadDim;
  p.slots = s.slots();
  std::vector<std::byte> rows(2 * kHeads * p.slots * kHeadDim * sizeof(Bf16));
  p.rows = rows.data();
  const auto inside = [](const void* at, const auto& memory) {
    const auto begin = reinterpret_cast<uintptr_t>(memory.data());
    const auto end = begin + memory.size() * sizeof(memory[0]);
    const auto address = reinterpret_cast<uintptr_t>(at);
    return address >= begin && address + kHeadDim * sizeof(Bf16) <= end;
  };
  for (const BlockMove move :
       {BlockMove::kStoreSink, BlockMove::kStoreRecent, BlockMove::kGather}) {
    p.move = move;
    for (int r = 0; r < p.requests; ++r) {
      if (s.requests[r].state != kBlockLive) continue;
      for (int index = 0; index < RowCopies(p); ++index) {
        const BlockRowCopy copy = RowCopy(p, s.requests[r], r, index, kHeads - 1, index % 2 == 1);
        if (copy.from == nullptr) continue;
        const bool gather = move == BlockMove::kGather;
        EXPECT_TRUE(gather ? inside(copy.to, rows) : inside(copy.to, blocks));
        EXPECT_TRUE(inside(copy.from, fresh) || (gather && inside(copy.from, blocks)));
      }
    }
  }
}

// Returns the end of the history of the token at `position`, as BlockAttention defines it.
int HistoryEnd(int position, int hit) {
  int end = 64;
  while (end + 64 <= position + 1 - 256) end += 64;
  return std::max(end, hit);
}

// Expects each fresh token of request r in one entry, which has the tokens in front of it.
void ExpectEntries(Step& s, int r, int hit) {
  const int first = s.query_start[r], begin = s.lengths[r] - (s.query_start[r + 1] - first);
  for (int position = begin; position < s.lengths[r]; ++position) {
    const int token = first + position - begin;
    int found = 0;
    for (int e = 0; e < s.request.size(); ++e) {
      if (token < s.fresh_begin[e] || token >= s.fresh_begin[e] + s.fresh_tokens[e]) continue;
      ++found;
      EXPECT_EQ(s.request[e], r);
      EXPECT_EQ(64 + 64 * s.pages[e], HistoryEnd(position, hit)) << position;
      const int entry_begin = position - (token - s.fresh_begin[e]);
      const int counted = e < s.bounds.decodes ? position + 1 : entry_begin;
      const int behind_sink = counted <= 64 ? 0 : 64 * s.pages[e] + s.recent_tokens[e];
      EXPECT_EQ(s.sink_tokens[e] + behind_sink, counted) << position;
    }
    EXPECT_EQ(found, 1) << position;
  }
}

TEST(BlockPlanTest, EveryTokenIsInOneEntryWithTheHistoryOfItsPosition) {
  std::mt19937 random(3);
  for (int i = 0; i < 60; ++i) {
    Step s({.requests = 4, .decodes = 2, .tokens = 900, .request_tokens_max = 449});
    std::vector<int> hits;
    for (int r = 0; r < 4; ++r) {
      const int tokens = r < 2 ? 1 : static_cast<int>(random() % 450);
      const int hit = static_cast<int>(random() % 10) * 64;
      const bool is_new = random() % 2 == 0;
      const int begin = is_new ? hit : hit + 1 + static_cast<int>(random() % 800);
      hits.push_back(hit);
      s.query_start[r + 1] = s.query_start[r] + tokens;
      s.lengths[r] = begin + tokens;
      s.Place(r, hit, is_new ? 0 : begin);
    }
    s.Plan();
    ASSERT_EQ(s.fault(), kBlockFaultNone);
    ExpectInBounds(s);
    ExpectTokens(s);
    ExpectRowCopies(s);
    for (int r = 0; r < 4; ++r) ExpectEntries(s, r, hits[r]);
  }
}

// A step of two requests of one fresh token, then two of 100 and 60, of 500 tokens each.
Step ValidStep() {
  Step s({.requests = 4, .decodes = 2, .tokens = 170, .request_tokens_max = 100});
  s.query_start = {0, 1, 2, 102, 162};
  for (int r = 0; r < 4; ++r) {
    s.lengths[r] = 500;
    s.Place(r, 0, 500 - (s.query_start[r + 1] - s.query_start[r]));
  }
  return s;
}

// Expects `states` of the requests, and `fault` reported.
void ExpectStates(Step& s, const std::vector<int>& states, int fault) {
  s.Plan();
  for (int r = 0; r < static_cast<int>(states.size()); ++r) {
    EXPECT_EQ(s.requests[r].state, states[r]) << r;
  }
  EXPECT_EQ(s.fault(), fault);
  ExpectInBounds(s);
  ExpectTokens(s);
  ExpectRowCopies(s);
}

constexpr int kLive = kBlockLive, kFailed = kBlockFailed, kIdle = kBlockIdle;

TEST(BlockPlanTest, TokensBehindTheStepsAreNoRows) {
  Step s = ValidStep();
  ExpectStates(s, {kLive, kLive, kLive, kLive}, kBlockFaultNone);
  s = ValidStep();
  s.query_start[4] = 9000;
  ExpectStates(s, {kLive, kLive, kLive, kFailed}, kBlockFaultLengths);
  EXPECT_EQ(s.requests[3].first, 102);
  EXPECT_EQ(s.requests[3].tokens, 170 - 102);
}

TEST(BlockPlanTest, NothingIsComputedOfTokensOutOfOrder) {
  for (const std::vector<int32_t>& start :
       std::vector<std::vector<int32_t>>{{0, 1, 101, 1, 101},
                                         {0, 1, 2, 1, 60},
                                         {1, 2, 3, 60, 100},
                                         {-64, 1, 2, 60, 100},
                                         {0, 1, 2, INT_MAX, INT_MIN}}) {
    Step s = ValidStep();
    s.query_start = start;
    ExpectStates(s, {kFailed, kFailed, kFailed, kFailed}, kBlockFaultLengths);
    EXPECT_EQ(s.windows[0], 0);
    EXPECT_EQ(s.Header(0).length, 499);
  }
}

TEST(BlockPlanTest, ARequestHasNoMoreTokensThanLaunchesMove) {
  Step s = ValidStep();
  s.query_start = {0, 1, 2, 103, 163};
  s.lengths = {500, 500, 501, 500};
  ExpectStates(s, {kLive, kLive, kFailed, kLive}, kBlockFaultLengths);
}

TEST(BlockPlanTest, LengthsThatDoNotFit) {
  for (const int length : {99, 0, -1, INT_MIN, INT_MAX, 64 * (kHistoryColumns + 1)}) {
    Step s = ValidStep();
    s.lengths[2] = length;
    ExpectStates(s, {kLive, kLive, kFailed, kLive}, kBlockFaultLengths);
  }
}

TEST(BlockPlanTest, OnlyTheBlockOfPaddingIsPadding) {
  Step s = ValidStep();
  const int32_t padding = s.recent[kGeometry.recent_blocks];
  s.recent[0] = -1;
  ExpectStates(s, {kFailed, kLive, kLive, kLive}, kBlockFaultBlock);
  s = ValidStep();
  s.has_padding_block = true;
  s.padding_block = padding;
  s.recent[0] = -1;
  ExpectStates(s, {kFailed, kIdle, kLive, kLive}, kBlockFaultBlock);
}

TEST(BlockPlanTest, ABlockOutsideThePoolFailsItsRequestWhereverItIs) {
  for (const int r : {0, 2}) {
    for (int window = 1; window < 500 / 64; ++window) {
      for (const int32_t block : {-1, kBlocks, INT_MAX, INT_MIN}) {
        Step s = ValidStep();
        const BlockHeader before = s.Header(r);
        s.history[r * kHistoryColumns + window] = block;
        std::vector<int> states = {kLive, kLive, kLive, kLive};
        states[r] = kFailed;
        ExpectStates(s, states, kBlockFaultBlock);
        EXPECT_EQ(s.Header(r).length, before.length);
      }
    }
  }
}

TEST(BlockPlanTest, ANewRequestAtFaultIsNewAgain) {
  Step s = ValidStep();
  s.Place(2, 0, 0);
  s.lengths[2] = 640 + 100;
  s.history[2 * kHistoryColumns + 1] = kBlocks;
  ExpectStates(s, {kLive, kLive, kFailed, kLive}, kBlockFaultBlock);
  EXPECT_EQ(s.Header(2).magic, 0u);
}

TEST(BlockPlanTest, RandomTablesLeadNowhereElse) {
  std::mt19937 random(7);
  const std::vector<int32_t> values = {0,  1,   2,   63,   64,      65,      100,    170,
                                       -1, -64, 171, 9000, kBlocks, INT_MAX, INT_MIN};
  int live = 0;
  for (int i = 0; i < 3000; ++i) {
    Step s = ValidStep();
    std::vector<int32_t>* const tables[] = {&s.query_start, &s.lengths, &s.history, &s.sink,
                                            &s.recent};
    for (unsigned change = random() % 4; change < 4; ++change) {
      std::vector<int32_t>& table = *tables[random() % std::size(tables)];
      table[random() % table.size()] = values[random() % values.size()];
    }
    s.Plan();
    ExpectInBounds(s);
    ExpectTokens(s);
    ExpectRowCopies(s);
    ASSERT_FALSE(HasFailure()) << "step " << i;
    for (int r = 0; r < 4; ++r) live += s.requests[r].state == kBlockLive ? 1 : 0;
  }
  EXPECT_GT(live, 3000);  // most steps have requests that are computed
}

}  // namespace
}  // namespace crumb::kernels::cuda
