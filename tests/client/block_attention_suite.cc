// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/block_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "client/worker/segment_rule.h"
#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "tests/client/block_engine.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

using kernels::Bf16;

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
  EXPECT_LT(std::sqrt(error / norm), BlockErrorMax())
      << "layer " << layer << " position " << position;
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

// Attention over blocks, by the back end that the program is linked with.
class BlockAttentionTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status status = BlockBackendStatus(); !status.ok()) GTEST_SKIP() << status;
  }
};

class BlockAttentionChunksTest : public BlockAttentionTest,
                                 public testing::WithParamInterface<int> {};

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

TEST_F(BlockAttentionTest, HeadsOfOtherSizes) {
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

TEST_F(BlockAttentionTest, SlidingWindowsAndSinkLogits) {
  const WorkerOptions options = WindowedWorkerOptions();
  Engine engine(options, 400);
  const SequenceModel a(options, RandomTokens(700, 31));
  const SequenceModel b(options, RandomTokens(700, 32));
  EngineRequest first = engine.NewRequest(a);
  EngineRequest second = engine.NewRequest(b);
  StepAndCheck(engine, options, {&first, &second}, {100, 40});
  StepAndCheck(engine, options, {&first, &second}, {550, 1});
  StepAndCheck(engine, options, {&first, &second}, {1, 430});
  for (int i = 0; i < 3; ++i) StepAndCheck(engine, options, {&first, &second}, {1, 1});
  // Behind a prefix of INT2 pages, windows reach into the history.
  EngineRequest hit = engine.Hit(first, a, 640);
  StepAndCheck(engine, options, {&hit}, {20});
  for (int i = 0; i < 3; ++i) StepAndCheck(engine, options, {&hit, &second}, {1, 1});
}

TEST_F(BlockAttentionTest, PromptsAndDecodingRequestsInOneStep) {
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

TEST_F(BlockAttentionTest, AHitAttendsSharedBlocksAndLeavesThemAsTheyAre) {
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
      shared.push_back(engine.block(owner.history[i]));
    }
    // All 640 tokens are complete windows, the last of them in the owner's recent window.
    EngineRequest reader = engine.Hit(owner, continued, hit);
    StepAndCheck(engine, options, {&owner, &reader}, {1, 90});
    StepAndCheck(engine, options, {&reader}, {1});
    StepAndCheck(engine, options, {&reader}, {150});
    for (int i = 1; i < hit / 64; ++i) {
      EXPECT_EQ(engine.block(owner.history[i]), shared[i]) << hit << " " << i;
    }
    engine.Free(reader.recent);
    engine.Free({reader.history.begin() + hit / 64, reader.history.end()});
  }
}

TEST_F(BlockAttentionTest, ARequestMayAttendWhatALaterOneOfTheStepCompletes) {
  const WorkerOptions options = Options();
  Engine engine(options, 300);
  const SequenceModel model(options, RandomTokens(900, 22));
  EngineRequest owner = engine.NewRequest(model);
  engine.Reserve(owner, 700);
  EngineRequest reader = engine.Hit(owner, model, 640);
  StepAndCheck(engine, options, {&reader, &owner}, {70, 700});
}

TEST_F(BlockAttentionTest, TilesDoNotDependOnChunks) {
  const WorkerOptions options = Options();
  Engine engine(options, 300);
  const SequenceModel model(options, RandomTokens(400, 4));
  EngineRequest whole = engine.NewRequest(model);
  EngineRequest pieces = engine.NewRequest(model);
  ASSERT_TRUE(engine.Step({&whole}, {400}).ok());
  for (int i = 0; i < 400; i += 10) ASSERT_TRUE(engine.Step({&pieces}, {10}).ok());
  for (int window = 1; window < 400 / 64; ++window) {
    EXPECT_EQ(engine.block(whole.history[window]), engine.block(pieces.history[window])) << window;
  }
}

TEST_F(BlockAttentionTest, DraftsThatWereRejectedAreComputedAgain) {
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

TEST_F(BlockAttentionTest, RefusesWhatWouldGiveWrongResults) {
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
  request.history[2] = 300;
  EXPECT_EQ(engine.Step({&request}, {1}).status().code(), absl::StatusCode::kInvalidArgument);
  request.history[2] = -2;
  EXPECT_EQ(engine.Step({&request}, {1}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(BlockAttentionTest, RefusesFreshTokensOutOfOrder) {
  const WorkerOptions options = Options();
  Engine engine(options, 300);
  const SequenceModel model(options, RandomTokens(700, 8));
  EngineRequest a = engine.NewRequest(model), b = engine.NewRequest(model);
  EngineRequest c = engine.NewRequest(model);
  for (const std::vector<int32_t>& start :
       std::vector<std::vector<int32_t>>{{0, 70, 30, 100}, {10, 70, 90, 100}, {-1, 70, 90, 100}}) {
    const auto out = engine.Step({&a, &b, &c}, {70, 20, 10},
                                 [&](BlockStepInput& step) { step.query_start = start; });
    EXPECT_EQ(out.status().code(), absl::StatusCode::kInvalidArgument);
  }
  for (EngineRequest* request : {&a, &b, &c}) StepAndCheck(engine, options, {request}, {90});
}

TEST_F(BlockAttentionTest, ABlockOutsideThePoolIsRefusedWhereverItIs) {
  const WorkerOptions options = Options();
  Engine engine(options, 300);
  const SequenceModel model(options, RandomTokens(900, 8));
  const SequenceModel other(options, RandomTokens(900, 9));
  EngineRequest bad = engine.NewRequest(model), good = engine.NewRequest(other);
  StepAndCheck(engine, options, {&bad, &good}, {500, 300});
  for (const std::vector<int>& tokens : std::vector<std::vector<int>>{{1, 1}, {70, 5}, {1, 60}}) {
    for (size_t window = 1; window < 500 / 64; ++window) {
      const int32_t valid = std::exchange(bad.history[window], 300);
      const auto out = engine.Step({&good, &bad}, {tokens[1], tokens[0]});
      EXPECT_EQ(out.status().code(), absl::StatusCode::kInvalidArgument) << window;
      bad.history[window] = valid;
    }
    // The request at fault is unchanged, and the other one is computed again.
    StepAndCheck(engine, options, {&bad, &good}, tokens);
  }
}

TEST_F(BlockAttentionTest, RefusesOptionsThatItDoesNotServe) {
  const WorkerOptions options = Options();
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
