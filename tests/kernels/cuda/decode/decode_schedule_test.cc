// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The choice between the planned schedule and clusters, by the host and by the plan, and clusters
// of every size.
#include <cmath>
#include <cstdio>

#include "kernels/cuda/decode/decode_attention.h"
#include "tests/kernels/cuda/decode/decode_case.h"

namespace crumb::kernels::cuda {
namespace {

// Each of a few problems has one cluster or several, up to 8, of 2 to 16 blocks.
TEST(DecodeAttention, ClustersOfEverySize) {
  CRUMB_NEEDS_DEVICE();
  if (!Serves(DecodeForm::kClusters, {}, 1))
    GTEST_SKIP() << "needs compute capability 9.0, for clusters";
  for (const int kv_heads : {1, 3, 8, 17, 70}) {
    for (const int group : {4, 8, 12, 16}) {
      DecodeOptions options;
      options.form = DecodeForm::kClusters;
      options.kv_heads = kv_heads;
      options.group = group;
      options.max_pages = kv_heads < 9 ? 512 : 40;
      options.sequences = {{64, kv_heads < 9 ? 177 + 13 * kv_heads : 37, 287}};
      options.seed = kv_heads;
      DecodeCase run(options);
      run.Run();
      EXPECT_LE(run.WorstError(24), 5e-4) << kv_heads << " heads of " << group;
      const std::vector<uint8_t> first = run.OutBytes();
      run.Run();
      EXPECT_EQ(run.OutBytes(), first) << "a second run gave other bits";
    }
  }
}

// The sequence has more pages than a warp's lanes hold addresses of.
TEST(DecodeAttention, VeryLongSequenceOfOneCluster) {
  CRUMB_NEEDS_DEVICE();
  if (!Serves(DecodeForm::kClusters, {}, 1))
    GTEST_SKIP() << "needs compute capability 9.0, for clusters";
  DecodeOptions options;
  options.form = DecodeForm::kClusters;
  options.kv_heads = 33;
  options.group = 1;
  options.sequences = {{64, 1600, 300}};
  DecodeCase run(options);
  run.Run();
  EXPECT_LE(run.WorstError(16), 5e-4);
}

TEST(DecodeAttention, ChoosesClustersForFewSequences) {
  CRUMB_NEEDS_DEVICE();
  if (!Serves(DecodeForm::kClusters, {}, 1))
    GTEST_SKIP() << "needs compute capability 9.0, for clusters";
  // The choice shows in the workspace: with clusters it holds no queries.
  const auto workspace = [](int batch, bool invariant, DecodeForm form) {
    DecodeShape shape;
    shape.batch = batch;
    shape.max_pages = 500;
    shape.kv_heads = 8;
    shape.q_heads = 32;
    shape.batch_invariant = invariant;
    return DecodeWorkspaceBytes(shape, {.form = form});
  };
  const DecodeForm any = DecodeForm::kAuto;
  for (const int batch : {1, 2}) {
    EXPECT_EQ(workspace(batch, false, any), workspace(batch, false, DecodeForm::kClusters));
    EXPECT_EQ(workspace(batch, true, any), workspace(batch, true, DecodeForm::kPlanned));
  }
  EXPECT_EQ(workspace(32, false, any), workspace(32, false, DecodeForm::kPlanned));
  EXPECT_LT(workspace(1, false, any), workspace(1, false, DecodeForm::kPlanned));
}

// From three sequences on the plan decides. The plan then has the arrays of both schedules.
TEST(DecodeAttention, ThePlanDecidesForMoreSequences) {
  CRUMB_NEEDS_DEVICE();
  if (!Serves(DecodeForm::kClusters, {}, 1))
    GTEST_SKIP() << "needs compute capability 9.0, for clusters";
  const auto plan = [](int batch, DecodeForm form) {
    DecodeShape shape;
    shape.batch = batch;
    shape.max_pages = 500;
    shape.kv_heads = 8;
    shape.q_heads = 32;
    return DecodePlanBytes(shape, {.form = form});
  };
  EXPECT_GT(plan(8, DecodeForm::kAuto), plan(8, DecodeForm::kPlanned));
  EXPECT_EQ(plan(32, DecodeForm::kAuto), plan(32, DecodeForm::kPlanned));
}

struct Decided {
  const char* name;
  int kv_heads;
  bool clusters;  // true: the schedule in clusters
  std::vector<SequenceLengths> sequences;
};

std::vector<SequenceLengths> Equal(int batch, const SequenceLengths& one) {
  return std::vector<SequenceLengths>(batch, one);
}
std::vector<SequenceLengths> With(std::vector<SequenceLengths> sequences, int at,
                                  const SequenceLengths& one) {
  sequences[at] = one;
  return sequences;
}

// Batches for which one schedule or the other is far better, and batches in between.
std::vector<Decided> DecidedByThePlan() {
  const SequenceLengths usual = {64, 60, 287}, small = {64, 3, 70}, none = {};
  return {
      {"equal", 8, true, Equal(8, usual)},
      {"some parts each", 8, true, Equal(4, {64, 130, 300})},
      {"three sequences", 8, true, Equal(3, usual)},
      {"one KV head, three sequences", 1, true, Equal(3, {64, 700, 287})},
      {"one KV head, sixty sequences", 1, true, Equal(60, usual)},
      {"two KV heads, one long", 2, true, With(Equal(9, small), 4, {64, 600, 287})},
      {"one long among three", 8, true, With(Equal(3, small), 1, {64, 300, 287})},
      {"one long among eight", 8, false, With(Equal(8, small), 3, {64, 560, 287})},
      {"two long among eight", 8, false,
       With(With(Equal(8, small), 7, {64, 700, 20}), 0, {64, 620, 287})},
      {"one long, the others padding", 8, true, With(Equal(8, none), 5, {64, 500, 287})},
      {"windows only", 8, true, Equal(8, {64, 0, 300})},
      {"a young window each", 8, true, Equal(8, {0, 0, 200})},
  };
}

TEST(DecodeAttention, ThePlanTakesTheFormThatLengthsRequire) {
  CRUMB_NEEDS_DEVICE();
  if (!Serves(DecodeForm::kClusters, {}, 1))
    GTEST_SKIP() << "needs compute capability 9.0, for clusters";
  for (const Decided& decided : DecidedByThePlan()) {
    for (const int group : {4, 8, 12, 16}) {
      if (decided.kv_heads == 8 && group % 8 == 0) continue;
      DecodeOptions options;
      options.kv_heads = decided.kv_heads;
      options.group = group;
      options.sequences = decided.sequences;
      options.sink_logit = group == 8;
      options.seed = group;
      DecodeCase run(options);
      run.Run();
      EXPECT_LE(run.WorstError(16), 5e-4) << decided.name << ", " << group << " heads";
      const std::vector<uint8_t> bytes = run.OutBytes();
      run.Run();
      EXPECT_EQ(run.OutBytes(), bytes) << decided.name << ": a second run gave other bits";
      // The two schedules sum in different orders.
      options.form = DecodeForm::kPlanned;
      DecodeCase planned(options);
      planned.Run();
      EXPECT_EQ(planned.OutBytes() != bytes, decided.clusters)
          << decided.name << ", " << group << " heads";
    }
  }
}

// One graph runs while lengths move from balanced to ragged and back, with padding. At each step it
// produces the bits of calls that were not captured.
TEST(DecodeAttention, OneGraphServesBothForms) {
  CRUMB_NEEDS_DEVICE();
  for (const int group : {4, 12}) {
    DecodeOptions options;
    options.kv_heads = 8;
    options.group = group;
    options.max_pages = 500;
    options.sequences = Equal(8, {64, 500, 330});
    DecodeCase run(options);
    cudaStream_t stream;
    ASSERT_CUDA(cudaStreamCreate(&stream));
    ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    ASSERT_CUDA(run.Enqueue(stream));
    cudaGraph_t graph;
    ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable;
    ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    std::mt19937 random(group);
    for (int step = 0; step < 24; ++step) {
      std::vector<SequenceLengths> lengths;
      for (int s = 0; s < 8; ++s) {
        const int pages = step % 3 == 0 ? 480 + s : static_cast<int>(random() % 20);
        lengths.push_back(random() % 5 == 0 ? SequenceLengths{}
                                            : SequenceLengths{64, pages, 1 + 40 * s});
      }
      if (step % 3 == 1) lengths[step % 8] = {64, 500, 330};
      run.SetLengths(lengths);
      run.Run();
      const std::vector<uint8_t> fresh = run.OutBytes();
      run.PoisonOutputs();
      ASSERT_CUDA(cudaGraphLaunch(executable, stream));
      ASSERT_CUDA(cudaStreamSynchronize(stream));
      ASSERT_EQ(run.OutBytes(), fresh) << "step " << step;
      EXPECT_LE(run.WorstError(8), 5e-4) << "step " << step;
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

TEST(DecodeAttention, ClustersRefuseWhatTheyDoNotServe) {
  CRUMB_NEEDS_DEVICE();
  const DecodeTuning clusters = {.form = DecodeForm::kClusters};
  DecodeShape shape;
  shape.kv_heads = 1;
  shape.q_heads = 17;
  EXPECT_EQ(DecodePlanBytes(shape, clusters), 0u);
  shape.q_heads = 4;
  shape.tile.group_size = 64;
  EXPECT_EQ(DecodePlanBytes(shape, clusters), 0u);
  shape.tile.group_size = 128;
  shape.tile.head_dim = 256;
  EXPECT_EQ(DecodePlanBytes(shape, clusters), 0u);
}

}  // namespace
}  // namespace crumb::kernels::cuda
