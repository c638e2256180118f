// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/block_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "client/worker/segment_rule.h"
#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

using kernels::Bf16;

// A request of the engine below: its tokens, how many are computed, and its blocks.
struct EngineRequest {
  const SequenceModel* model = nullptr;
  int length = 0;
  int hit = 0;
  std::vector<int32_t> history = {};
  std::vector<int32_t> sink = {};
  std::vector<int32_t> recent = {};
};

// An engine with a block pool for all three groups, whose blocks are handed out in random order and
// with the bytes of their former owners. Block b of a layer begins at layer_stride * layer +
// block_stride * b, as in an engine that keeps a block of all layers together.
class Engine {
 public:
  Engine(const WorkerOptions& options, int blocks)
      : options_(options),
        geometry_(BlockGeometryOf(options)),
        layer_stride_(int64_t{geometry_.tile_bytes} * options.kv_heads),
        block_stride_(layer_stride_ * options.layers),
        memory_(block_stride_ * blocks, std::byte{0xa5}),
        free_(blocks) {
    auto opened = BlockAttention::Open(options);
    EXPECT_TRUE(opened.ok()) << opened.status();
    attention_ = std::move(opened).value();
    std::iota(free_.begin(), free_.end(), 0);
    std::shuffle(free_.begin(), free_.end(), std::mt19937(11));
  }

  const BlockGeometry& geometry() const { return geometry_; }
  std::span<const std::byte> block(int32_t index) const {
    return {&memory_[block_stride_ * index], static_cast<size_t>(block_stride_)};
  }

  EngineRequest NewRequest(const SequenceModel& model) {
    EngineRequest request{.model = &model};
    request.sink = Take(geometry_.sink_blocks);
    request.recent = Take(geometry_.recent_blocks);
    Zero(request.recent[0]);
    return request;
  }

  // Returns a request that shares the leading `hit` tokens of another.
  EngineRequest Hit(const EngineRequest& of, const SequenceModel& model, int hit) {
    EngineRequest request = NewRequest(model);
    Free(request.sink);
    request.sink = of.sink;
    request.history.assign(of.history.begin(), of.history.begin() + hit / 64);
    request.length = request.hit = hit;
    return request;
  }

  // Gives the request history blocks for `length` tokens.
  void Reserve(EngineRequest& request, int length) {
    while (static_cast<int>(request.history.size()) * 64 < length) {
      request.history.push_back(Take(1)[0]);
    }
  }

  void Free(const std::vector<int32_t>& blocks) {
    free_.insert(free_.end(), blocks.begin(), blocks.end());
  }

  // Computes the next tokens[i] tokens of request i. Returns the outputs of every layer, [layers,
  // tokens, q_heads, head_dim].
  absl::StatusOr<std::vector<std::vector<Bf16>>> Step(std::vector<EngineRequest*> requests,
                                                      const std::vector<int>& tokens) {
    constexpr int64_t kColumns = 64;
    std::vector<int32_t> starts = {0};
    std::vector<int32_t> lengths;
    std::vector<int32_t> history(requests.size() * kColumns, -1);
    std::vector<int32_t> sink(requests.size() * kColumns, -1);
    std::vector<int32_t> recent(requests.size() * kColumns, -1);
    for (size_t i = 0; i < requests.size(); ++i) {
      EngineRequest& request = *requests[i];
      starts.push_back(starts.back() + tokens[i]);
      lengths.push_back(request.length + tokens[i]);
      Reserve(request, lengths.back());
      std::copy(request.history.begin(), request.history.end(), &history[i * kColumns]);
      std::copy(request.sink.begin(), request.sink.end(), &sink[i * kColumns]);
      std::copy(request.recent.begin(), request.recent.end(), &recent[i * kColumns]);
    }
    const BlockBatch batch = {.requests = static_cast<int>(requests.size()),
                              .query_start = starts.data(),
                              .lengths = lengths.data(),
                              .history = {history.data(), kColumns},
                              .sink = {sink.data(), kColumns},
                              .recent = {recent.data(), kColumns}};
    std::vector<std::vector<Bf16>> out(options_.layers);
    for (int layer = 0; layer < options_.layers; ++layer) {
      const absl::Status status = StepLayer(layer, requests, tokens, batch, out[layer]);
      if (!status.ok()) return status;
    }
    for (size_t i = 0; i < requests.size(); ++i) requests[i]->length += tokens[i];
    return out;
  }

 private:
  std::vector<int32_t> Take(int count) {
    EXPECT_GE(free_.size(), static_cast<size_t>(count));
    std::vector<int32_t> taken(free_.end() - count, free_.end());
    free_.resize(free_.size() - count);
    return taken;
  }

  void Zero(int32_t block) {
    std::memset(&memory_[block_stride_ * block], 0, static_cast<size_t>(block_stride_));
  }

  absl::Status StepLayer(int layer, const std::vector<EngineRequest*>& requests,
                         const std::vector<int>& tokens, const BlockBatch& batch,
                         std::vector<Bf16>& out) const {
    std::vector<Bf16> q;
    std::vector<Bf16> k;
    std::vector<Bf16> v;
    const auto append = [](std::vector<Bf16>& to, const std::vector<Bf16>& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    for (size_t i = 0; i < requests.size(); ++i) {
      const int begin = requests[i]->length;
      append(q, requests[i]->model->Queries(layer, begin, begin + tokens[i]));
      append(k, requests[i]->model->Keys(layer, begin, begin + tokens[i]));
      append(v, requests[i]->model->Values(layer, begin, begin + tokens[i]));
    }
    out.resize(q.size());
    std::byte* const base = const_cast<std::byte*>(memory_.data()) + layer_stride_ * layer;
    const BlockPool pool = {.history = base,
                            .sink = base,
                            .recent = base,
                            .block_stride = block_stride_,
                            .blocks = static_cast<int64_t>(memory_.size()) / block_stride_};
    const int64_t q_stride = int64_t{options_.q_heads} * options_.head_dim;
    const int64_t kv_stride = int64_t{options_.kv_heads} * options_.head_dim;
    return attention_->Attend(layer, pool, batch,
                              {.q = q.data(),
                               .k = k.data(),
                               .v = v.data(),
                               .out = out.data(),
                               .q_stride = q_stride,
                               .k_stride = kv_stride,
                               .v_stride = kv_stride,
                               .out_stride = q_stride});
  }

  const WorkerOptions options_;
  const BlockGeometry geometry_;
  const int64_t layer_stride_;
  const int64_t block_stride_;
  std::vector<std::byte> memory_;
  std::vector<int32_t> free_;
  std::unique_ptr<BlockAttention> attention_;
};

WorkerOptions Options() {
  WorkerOptions options = SmallWorkerOptions();
  options.rotations = RotationSet::Hadamard(options.head_dim).value();
  return options;
}

// Compares one token's output with attention in double precision.
void ExpectToken(const WorkerOptions& options, const EngineRequest& request, int layer,
                 int position, const Bf16* got) {
  const SegmentRule rule{.recent_tokens = options.recent_tokens};
  const int history_end = std::max(rule.HistoryEnd(position + 1), request.hit);
  const std::vector<double> expected = request.model->Expected(layer, position, history_end);
  double error = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double x = kernels::Bf16ToFloat(got[i]);
    error += (x - expected[i]) * (x - expected[i]);
    norm += expected[i] * expected[i];
  }
  // Outputs are rounded to BF16: at most 2^-9 of each.
  EXPECT_LT(std::sqrt(error / norm), 3e-3) << "layer " << layer << " position " << position;
}

// Computes a step and checks some tokens of each request.
void StepAndCheck(Engine& engine, const WorkerOptions& options,
                  std::vector<EngineRequest*> requests, const std::vector<int>& tokens) {
  std::vector<int> begins;
  for (const EngineRequest* request : requests) begins.push_back(request->length);
  const auto out = engine.Step(requests, tokens);
  ASSERT_TRUE(out.ok()) << out.status();
  const size_t row = static_cast<size_t>(options.q_heads) * options.head_dim;
  size_t first = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    for (int t = 0; t < tokens[i]; ++t) {
      const int position = begins[i] + t;
      const bool edge = t == 0 || t == tokens[i] - 1 || position % 64 == 63 || position == 64;
      if (!edge && position % 53 != 0) continue;
      for (int layer = 0; layer < options.layers; ++layer) {
        ExpectToken(options, *requests[i], layer, position, &(*out)[layer][(first + t) * row]);
      }
    }
    first += tokens[i];
  }
}

class BlockAttentionChunksTest : public testing::TestWithParam<int> {};

TEST_P(BlockAttentionChunksTest, AttendsWhatTheRuleSaysForAnyChunks) {
  const WorkerOptions options = Options();
  Engine engine(options, 160);
  const SequenceModel model(options, RandomTokens(900, 5));
  EngineRequest request = engine.NewRequest(model);
  while (request.length < 860) {
    StepAndCheck(engine, options, {&request}, {std::min(GetParam(), 860 - request.length)});
    if (HasFatalFailure()) return;
  }
  for (int i = 0; i < 40; ++i) StepAndCheck(engine, options, {&request}, {1});
}

INSTANTIATE_TEST_SUITE_P(Chunks, BlockAttentionChunksTest,
                         testing::Values(17, 64, 100, 333, 500, 860));

TEST(BlockAttentionTest, HeadsOfOtherSizes) {
  for (const auto& [head_dim, group_size] : {std::pair{128, 128}, {256, 128}, {128, 64}}) {
    WorkerOptions options = SmallWorkerOptions();
    options.layers = 1;
    options.head_dim = head_dim;
    options.group_size = group_size;
    options.rotations = RotationSet::Hadamard(head_dim).value();
    Engine engine(options, 160);
    const SequenceModel model(options, RandomTokens(600, 9));
    EngineRequest request = engine.NewRequest(model);
    StepAndCheck(engine, options, {&request}, {590});
    StepAndCheck(engine, options, {&request}, {1});
  }
}

TEST(BlockAttentionTest, PromptsAndDecodingRequestsInOneStep) {
  const WorkerOptions options = Options();
  Engine engine(options, 400);
  const SequenceModel a(options, RandomTokens(700, 1));
  const SequenceModel b(options, RandomTokens(700, 2));
  const SequenceModel c(options, RandomTokens(700, 3));
  EngineRequest first = engine.NewRequest(a);
  StepAndCheck(engine, options, {&first}, {600});
  EngineRequest second = engine.NewRequest(b);
  StepAndCheck(engine, options, {&first, &second}, {1, 450});
  EngineRequest third = engine.NewRequest(c);
  StepAndCheck(engine, options, {&second, &third, &first}, {100, 30, 1});
  StepAndCheck(engine, options, {&third, &first, &second}, {400, 1, 1});
  // A request without fresh tokens takes no part.
  StepAndCheck(engine, options, {&third, &first, &second}, {1, 0, 1});

  // Its blocks go to another, which sees nothing of them.
  engine.Free(first.recent);
  engine.Free(first.sink);
  engine.Free(first.history);
  EngineRequest fourth = engine.NewRequest(a);
  StepAndCheck(engine, options, {&fourth, &third}, {500, 1});
}

TEST(BlockAttentionTest, AHitAttendsSharedBlocksAndLeavesThemAsTheyAre) {
  const WorkerOptions options = Options();
  Engine engine(options, 400);
  std::vector<int32_t> tokens = RandomTokens(900, 21);
  const SequenceModel model(options, tokens);
  EngineRequest owner = engine.NewRequest(model);
  StepAndCheck(engine, options, {&owner}, {700});
  for (size_t i = 640; i < tokens.size(); ++i) tokens[i] += 1;  // another continuation
  const SequenceModel continued(options, tokens);
  for (const int hit : {64, 128, 640}) {
    std::vector<std::vector<std::byte>> shared;
    for (int i = 0; i < hit / 64; ++i) {
      const auto bytes = engine.block(owner.history[i]);
      shared.emplace_back(bytes.begin(), bytes.end());
    }
    // All 640 tokens are complete windows, the last of them in the owner's recent window.
    EngineRequest reader = engine.Hit(owner, continued, hit);
    StepAndCheck(engine, options, {&owner, &reader}, {1, 90});
    StepAndCheck(engine, options, {&reader}, {1});
    StepAndCheck(engine, options, {&reader}, {150});
    for (int i = 1; i < hit / 64; ++i) {
      const auto bytes = engine.block(owner.history[i]);
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), shared[i].begin())) << hit << " " << i;
    }
    engine.Free(reader.recent);
    engine.Free({reader.history.begin() + hit / 64, reader.history.end()});
  }
}

TEST(BlockAttentionTest, ARequestMayAttendWhatALaterOneOfTheStepCompletes) {
  const WorkerOptions options = Options();
  Engine engine(options, 300);
  const SequenceModel model(options, RandomTokens(900, 22));
  EngineRequest owner = engine.NewRequest(model);
  engine.Reserve(owner, 700);
  EngineRequest reader = engine.Hit(owner, model, 640);
  StepAndCheck(engine, options, {&reader, &owner}, {70, 700});
}

TEST(BlockAttentionTest, TilesDoNotDependOnChunks) {
  const WorkerOptions options = Options();
  Engine engine(options, 300);
  const SequenceModel model(options, RandomTokens(400, 4));
  EngineRequest whole = engine.NewRequest(model);
  EngineRequest pieces = engine.NewRequest(model);
  ASSERT_TRUE(engine.Step({&whole}, {400}).ok());
  for (int i = 0; i < 400; i += 10) ASSERT_TRUE(engine.Step({&pieces}, {10}).ok());
  for (int window = 1; window < 400 / 64; ++window) {
    const auto a = engine.block(whole.history[window]);
    const auto b = engine.block(pieces.history[window]);
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin())) << window;
  }
}

TEST(BlockAttentionTest, DraftsThatWereRejectedAreComputedAgain) {
  const WorkerOptions options = Options();
  Engine engine(options, 300);
  std::vector<int32_t> tokens = RandomTokens(700, 8);
  const SequenceModel model(options, tokens);
  for (size_t i = 639; i < tokens.size(); ++i) tokens[i] += 1;
  const SequenceModel drafts(options, tokens);
  EngineRequest request = engine.NewRequest(model);
  StepAndCheck(engine, options, {&request}, {638});
  request.model = &drafts;  // the second of three tokens is wrong, and completes a window
  ASSERT_TRUE(engine.Step({&request}, {3}).ok());
  request.model = &model;
  request.length -= 2;
  for (int i = 0; i < 20; ++i) StepAndCheck(engine, options, {&request}, {1});
}

TEST(BlockAttentionTest, RefusesWhatWouldGiveWrongResults) {
  const WorkerOptions options = Options();
  Engine engine(options, 300);
  const SequenceModel model(options, RandomTokens(700, 8));
  EngineRequest request = engine.NewRequest(model);
  request.length = 100;  // a new request that begins inside a window
  EXPECT_EQ(engine.Step({&request}, {1}).status().code(), absl::StatusCode::kInvalidArgument);
  request = engine.NewRequest(model);
  ASSERT_TRUE(engine.Step({&request}, {500}).ok());
  request.length = 600;  // tokens are missing
  EXPECT_EQ(engine.Step({&request}, {1}).status().code(), absl::StatusCode::kFailedPrecondition);
  request.length = 400;  // their rows were replaced
  EXPECT_EQ(engine.Step({&request}, {1}).status().code(), absl::StatusCode::kFailedPrecondition);
  EngineRequest other = engine.NewRequest(model);
  other.recent[0] = request.history[2];  // neither zero nor a header
  EXPECT_EQ(engine.Step({&other}, {1}).status().code(), absl::StatusCode::kFailedPrecondition);
  request.length = 500;
  request.history[3] = 300;
  EXPECT_EQ(engine.Step({&request}, {1}).status().code(), absl::StatusCode::kInvalidArgument);
  request.history[3] = -2;
  EXPECT_EQ(engine.Step({&request}, {1}).status().code(), absl::StatusCode::kInvalidArgument);

  WorkerOptions exact = options;
  exact.history_format = kernels::PageFormat::kBf16;
  EXPECT_EQ(BlockAttention::Open(exact).status().code(), absl::StatusCode::kInvalidArgument);
  WorkerOptions absorbed = options;
  absorbed.v_basis = "rotated";
  EXPECT_EQ(BlockAttention::Open(absorbed).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(BlockGeometryTest, ARequestOf32kTokensTakesAtMost18PercentOfBf16) {
  for (const auto& [head_dim, tile, rows, sink, recent] :
       {std::tuple{64, 2560, 10, 7, 33}, {128, 4608, 9, 8, 36}, {256, 9216, 9, 8, 36}}) {
    WorkerOptions options = SmallWorkerOptions();
    options.head_dim = head_dim;
    options.group_size = std::min(128, head_dim);
    const BlockGeometry geometry = BlockGeometryOf(options);
    EXPECT_EQ(geometry.tile_bytes, tile);
    EXPECT_EQ(geometry.rows_per_block, rows);
    EXPECT_EQ(geometry.sink_blocks, sink);
    EXPECT_EQ(geometry.recent_blocks, recent);
    const double blocks = 32768 / 64 + sink + recent;
    EXPECT_LT(blocks * tile / (32768.0 * head_dim * 4), 0.18);
  }
}

}  // namespace
}  // namespace crumb::client
