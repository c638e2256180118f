// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/cpu/cpu_sequence.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>
#include <thread>

#include "client/worker/segment_rule.h"
#include "common/hex.h"
#include "common/rotation_file.h"
#include "crumb/worker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/bf16.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

using kernels::Bf16;
using kernels::PageFormat;

std::unique_ptr<Worker> OpenWorker(const WorkerOptions& options) {
  auto worker = Worker::Open(options, nullptr);
  EXPECT_TRUE(worker.ok()) << worker.status();
  return std::move(worker).value();
}

std::unique_ptr<Sequence> Begin(Worker& worker, std::span<const int32_t> prompt) {
  auto sequence = worker.Begin(prompt);
  EXPECT_TRUE(sequence.ok()) << sequence.status();
  return std::move(sequence).value();
}

// Computes the end of the history at one position the slow way: window by window, step by step.
int HistoryEndBySteps(const WorkerOptions& options, int prompt, int position) {
  if (position < prompt) {
    return std::max(64, position / options.prefill_block * options.prefill_block);
  }
  int end = 64;
  for (int length = 0; length <= position + 1; ++length) {
    while (length - end >= options.recent_tokens + 64) end += 64;
  }
  return end;
}

void ExpectOutputs(const SequenceModel& model, const WorkerOptions& options, int prompt, int begin,
                   int end, const std::vector<float>& out) {
  const size_t row = static_cast<size_t>(options.q_heads) * options.head_dim;
  for (int layer = 0; layer < options.layers; ++layer) {
    for (const int p : std::set<int>{begin, (begin + end) / 2, end - 1}) {
      const auto expected = model.Expected(layer, p, HistoryEndBySteps(options, prompt, p));
      const float* got = out.data() + (size_t(layer) * (end - begin) + (p - begin)) * row;
      double worst = 0.0;
      for (size_t i = 0; i < row; ++i) worst = std::max(worst, std::abs(got[i] - expected[i]));
      EXPECT_LT(worst, 2e-4) << "layer " << layer << " position " << p;
    }
  }
}

TEST(SegmentRuleTest, AgreesWithTheTimeline) {
  const SegmentRule rule{.recent_tokens = 256, .prefill_block = 512};
  WorkerOptions options = SmallWorkerOptions();
  for (int length = 1; length < 2000; ++length) {
    ASSERT_EQ(rule.HistoryEnd(length), HistoryEndBySteps(options, 0, length - 1)) << length;
    const int recent = length - rule.HistoryEnd(length);
    ASSERT_TRUE(length < 320 || (recent >= 256 && recent < 320)) << length;
  }
}

TEST(SegmentRuleTest, HitsLeaveTheRecentWindowAndOneToken) {
  const SegmentRule rule;
  EXPECT_EQ(rule.HitTokensMax(1), 0);
  EXPECT_EQ(rule.HitTokensMax(64), 0);
  EXPECT_EQ(rule.HitTokensMax(65), 64);  // the sink is BF16 and may lie in the last 256
  EXPECT_EQ(rule.HitTokensMax(383), 64);
  EXPECT_EQ(rule.HitTokensMax(384), 128);
  EXPECT_EQ(rule.HitTokensMax(4096), 3840);
}

// Sliding windows and sink logits, in prompts that reach into the history and in decoding.
TEST(CpuSequenceTest, SlidingWindowsAndSinkLogits) {
  const WorkerOptions options = WindowedWorkerOptions();
  constexpr int kPrompt = 700, kTotal = 790;
  const SequenceModel model(options, RandomTokens(kTotal, 8));
  const auto worker = OpenWorker(options);
  const auto sequence = Begin(*worker, model.prompt(kPrompt));
  while (sequence->length() < kTotal) {
    const int begin = sequence->length();
    const int end = begin < kPrompt ? std::min(kPrompt, begin + 256) : begin + 1;
    const std::vector<float> out = model.Pass(*sequence, end);
    if (begin < kPrompt || begin % 29 == 0) {
      ExpectOutputs(model, options, kPrompt, begin, end, out);
    }
  }
}

// A rank has the windows of its own layers, and the sink logits of its own layers and heads.
TEST(CpuSequenceTest, RanksHaveTheirOwnWindowsAndSinkLogits) {
  const WorkerOptions whole = WindowedWorkerOptions();
  WorkerOptions options = whole;
  options.part.layers = {1, 3};
  options.part.kv_heads = {1, 2};
  options.part.q_heads = {8, 16};
  ASSERT_TRUE(options.Validate().ok());
  EXPECT_EQ(options.own_window(0), 0);
  EXPECT_EQ(options.own_window(1), 128);
  const std::vector<float> own = options.own_sink_logits();
  ASSERT_EQ(own.size(), 16u);
  EXPECT_EQ(own[0], whole.sink_logits[1 * 16 + 8]);
  EXPECT_EQ(own[15], whole.sink_logits[2 * 16 + 15]);

  // One fresh token attends itself and the sink: its output is its value times a weight.
  const auto worker = OpenWorker(options);
  const SequenceModel model(whole, RandomTokens(1, 9));
  const auto sequence = Begin(*worker, model.prompt(1));
  for (int layer = 1; layer < 3; ++layer) {
    const auto k = model.Keys(layer, 0, 1), v = model.Values(layer, 0, 1);
    const auto q = model.Queries(layer, 0, 1);
    std::vector<float> out(8 * 64);
    ASSERT_TRUE(sequence->Append(layer - 1, 1, &k[64], &v[64]).ok());
    ASSERT_TRUE(sequence->Attend(layer - 1, 1, &q[8 * 64], out.data()).ok());
    const std::vector<double> expected = model.Expected(layer, 0, 64);
    for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], expected[8 * 64 + i], 1e-5) << i;
  }
}

struct Case {
  int prompt;
  int total;
  int chunk;
  PageFormat format;
};

class TimelineTest : public testing::TestWithParam<Case> {};

TEST_P(TimelineTest, AttendsWhatTheTimelineSays) {
  WorkerOptions options = SmallWorkerOptions();
  options.history_format = GetParam().format;
  const SequenceModel model(options, RandomTokens(GetParam().total, 7));
  const auto worker = OpenWorker(options);
  const auto sequence = Begin(*worker, model.prompt(GetParam().prompt));
  while (sequence->length() < GetParam().total) {
    const int begin = sequence->length();
    const int end = begin < GetParam().prompt
                        ? std::min(GetParam().prompt, begin + GetParam().chunk)
                        : begin + 1;
    const std::vector<float> out = model.Pass(*sequence, end);
    const bool check = begin < GetParam().prompt || begin % 37 == 0 || begin % 64 < 2;
    if (check) ExpectOutputs(model, options, GetParam().prompt, begin, end, out);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Prompts, TimelineTest,
    testing::Values(Case{1, 100, 1, PageFormat::kInt2}, Case{63, 400, 63, PageFormat::kInt2},
                    Case{130, 470, 50, PageFormat::kInt2}, Case{600, 760, 177, PageFormat::kInt2},
                    Case{600, 700, 600, PageFormat::kInt2}, Case{512, 650, 128, PageFormat::kInt2},
                    Case{1290, 1300, 1000, PageFormat::kInt2},
                    Case{600, 760, 177, PageFormat::kBf16}));

TEST(ThreeSegmentTest, ChunksDoNotChangeDecodeOutputs) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(1400, 3));
  std::vector<float> first;
  for (const int chunk : {64, 100, 512, 1333}) {
    const auto worker = OpenWorker(options);
    const auto sequence = Begin(*worker, model.prompt(1333));
    while (sequence->length() < 1333) {
      model.Pass(*sequence, std::min(1333, sequence->length() + chunk));
    }
    std::vector<float> outputs;
    while (sequence->length() < 1400) {
      const auto out = model.Pass(*sequence, sequence->length() + 1);
      outputs.insert(outputs.end(), out.begin(), out.end());
    }
    if (first.empty()) first = outputs;
    EXPECT_TRUE(first == outputs) << "chunk " << chunk;
  }
}

TEST(ThreeSegmentTest, RejectedDraftsLeaveNoTrace) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(900, 4));
  const SequenceModel drafts(options, RandomTokens(900, 5));
  const auto worker = OpenWorker(options);
  const auto plain = Begin(*worker, model.prompt(300));
  const auto drafted = Begin(*worker, model.prompt(300));
  model.Pass(*plain, 300);
  model.Pass(*drafted, 300);
  for (int step = 0; plain->length() < 880; ++step) {
    if (step % 3 == 0) drafts.Pass(*drafted, drafted->length() + 1 + step % 9, 0);
    const auto expected = model.Pass(*plain, plain->length() + 1);
    const auto got = model.Pass(*drafted, drafted->length() + 1);
    ASSERT_TRUE(expected == got) << "position " << plain->length();
  }
}

TEST(ThreeSegmentTest, AcceptedDraftsAreAttendedLater) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(900, 6));
  const auto worker = OpenWorker(options);
  const auto sequence = Begin(*worker, model.prompt(300));
  model.Pass(*sequence, 300);
  for (int step = 0; sequence->length() < 850; ++step) {
    const int accepted = 1 + step % 9;
    model.Pass(*sequence, sequence->length() + 9, accepted);
    const int begin = sequence->length();
    const auto out = model.Pass(*sequence, begin + 1);
    if (step % 3 == 0) ExpectOutputs(model, options, 300, begin, begin + 1, out);
  }
}

TEST(ThreeSegmentTest, ForksGoTheirOwnWay) {
  const WorkerOptions options = SmallWorkerOptions();
  for (const int prompt : {30, 64, 700}) {
    const SequenceModel left(options, RandomTokens(prompt + 400, 8));
    std::vector<int32_t> tokens = RandomTokens(prompt + 400, 9);
    std::copy_n(left.tokens().begin(), prompt, tokens.begin());
    const SequenceModel right(options, tokens);
    const auto worker = OpenWorker(options);
    const auto sequence = Begin(*worker, left.prompt(prompt));
    left.Pass(*sequence, prompt);
    auto fork = sequence->Fork();
    ASSERT_TRUE(fork.ok()) << fork.status();
    while (sequence->length() < prompt + 390) {
      const int begin = sequence->length();
      const auto a = left.Pass(*sequence, begin + 1);
      const auto b = right.Pass(**fork, begin + 1);
      if (begin % 61 != 0) continue;
      ExpectOutputs(left, options, prompt, begin, begin + 1, a);
      ExpectOutputs(right, options, prompt, begin, begin + 1, b);
    }
  }
}

// Layer 0 has stored a window in the abandoned pass, layer 1 has not; the fork has not its page.
TEST(ThreeSegmentTest, AForkAfterAPassThatWasAbandonedHalfwayStoresAllLayersAgain) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(800, 16));
  const auto worker = OpenWorker(options);
  const auto plain = Begin(*worker, model.prompt(300));
  SequenceOptions salted;  // so that the two share no page
  salted.extra.push_back(Sha256(std::string_view("another")));
  const auto sequence = worker->Begin(model.prompt(300), salted).value();
  model.Pass(*plain, 300);
  model.Pass(*sequence, 300);
  while (plain->length() < 575) {
    model.Pass(*plain, plain->length() + 1);
    model.Pass(*sequence, sequence->length() + 1);
  }
  const auto k = model.Keys(0, 575, 576);
  ASSERT_TRUE(sequence->Append(0, 1, k.data(), model.Values(0, 575, 576).data()).ok());
  ASSERT_TRUE(sequence->Advance({}).ok());
  const auto fork = sequence->Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  while (plain->length() < 700) {
    const auto expected = model.Pass(*plain, plain->length() + 1);
    ASSERT_TRUE(expected == model.Pass(**fork, (*fork)->length() + 1)) << plain->length();
  }
}

TEST(ThreeSegmentTest, AFailedPassCanBeRepeated) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(1200, 10));
  const SequenceModel other(options, RandomTokens(1200, 11));
  const auto worker = OpenWorker(options);
  const auto sequence = Begin(*worker, model.prompt(1100));
  model.Pass(*sequence, 400);
  other.Pass(*sequence, 700, 0);  // it crosses a block's end, so that its windows were stored
  EXPECT_EQ(sequence->length(), 400);
  const auto out = model.Pass(*sequence, 1100);
  ExpectOutputs(model, options, 1100, 400, 1100, out);
  const auto next = model.Pass(*sequence, 1101);
  ExpectOutputs(model, options, 1100, 1100, 1101, next);
}

TEST(ThreeSegmentTest, SharesPagesOfLiveSequences) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(1200, 12));
  const auto worker = OpenWorker(options);
  auto first = Begin(*worker, model.prompt(1100));
  model.Pass(*first, 1100);
  const auto second = Begin(*worker, model.prompt(1100));
  EXPECT_EQ(second->cached_tokens(), 832);  // 1,100 - 256 rounded down to pages
  EXPECT_EQ(second->stats().hit_tokens_worker, 832);
  model.Pass(*second, 1100);
  EXPECT_TRUE(model.Pass(*first, 1101) == model.Pass(*second, 1101));
  ASSERT_TRUE(first->Finish().ok());
  first.reset();
  const auto expected = model.Pass(*second, 1102);
  ExpectOutputs(model, options, 1100, 1101, 1102, expected);
}

TEST(ThreeSegmentTest, PagesOfFinishedSequencesAreGone) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(700, 13));
  const auto worker = OpenWorker(options);
  auto first = Begin(*worker, model.prompt(600));
  model.Pass(*first, 600);
  ASSERT_TRUE(first->Finish().ok());
  EXPECT_EQ(Begin(*worker, model.prompt(600))->cached_tokens(), 0);
}

TEST(ThreeSegmentTest, ExtraDigestsSeparatePages) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(700, 14));
  const auto worker = OpenWorker(options);
  SequenceOptions salted;
  salted.extra.push_back(Sha256(std::string_view("salt")));
  const auto first = worker->Begin(model.prompt(600), salted).value();
  model.Pass(*first, 600);
  EXPECT_EQ(Begin(*worker, model.prompt(600))->cached_tokens(), 0);
  EXPECT_EQ(worker->Begin(model.prompt(600), salted).value()->cached_tokens(), 320);
}

TEST(ThreeSegmentTest, NonFiniteRowsStayInTheirSequence) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(700, 15));
  const auto worker = OpenWorker(options);
  const auto sequence = Begin(*worker, model.prompt(600));
  for (int layer = 0; layer < options.layers; ++layer) {
    auto k = model.Keys(layer, 0, 600);
    if (layer == 1) {
      k[130 * options.kv_heads * options.head_dim] =
          kernels::Bf16FromFloat(std::numeric_limits<float>::infinity());
    }
    ASSERT_TRUE(sequence->Append(layer, 600, k.data(), model.Values(layer, 0, 600).data()).ok());
  }
  ASSERT_TRUE(sequence->Advance(model.prompt(600)).ok());
  EXPECT_EQ(worker->counters().windows_refused, 1);
  // Pages before the damaged one (tokens 128 to 191) can be shared; that page and those behind it
  // cannot.
  EXPECT_EQ(Begin(*worker, model.prompt(600))->cached_tokens(), 128);
  for (const float value : model.Pass(*sequence, 601)) ASSERT_TRUE(std::isfinite(value));
}

TEST(ThreeSegmentTest, RefusesWhatItCannotDo) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(100, 16));
  const auto worker = OpenWorker(options);
  const auto sequence = Begin(*worker, model.prompt(80));
  const auto k = model.Keys(0, 0, 100);
  std::vector<float> out(100 * options.q_heads * options.head_dim);
  using absl::StatusCode;
  EXPECT_EQ(sequence->Append(2, 1, k.data(), k.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(sequence->Append(-1, 1, k.data(), k.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(sequence->Append(0, 81, k.data(), k.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(sequence->Append(0, 0, k.data(), k.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(sequence->Attend(0, 1, k.data(), out.data()).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(sequence->Advance(model.prompt(1)).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(sequence->Append(0, 80, k.data(), k.data()).ok());
  EXPECT_EQ(sequence->Append(0, 80, k.data(), k.data()).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(sequence->Append(1, 79, k.data(), k.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(sequence->Advance(model.prompt(80)).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(sequence->Fork().status().code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(sequence->Append(1, 80, k.data(), k.data()).ok());
  EXPECT_EQ(sequence->Advance(RandomTokens(80, 1)).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(sequence->Advance(model.prompt(80)).ok());
  EXPECT_EQ(sequence->Append(0, 10, k.data(), k.data()).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(sequence->Finish().ok());
  EXPECT_EQ(sequence->Append(0, 1, k.data(), k.data()).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(worker->Begin({}).status().code(), StatusCode::kInvalidArgument);
}

TEST(ThreeSegmentTest, FullPagePoolFailsAndRecovers) {
  WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(1300, 17));
  const size_t page = options.tile_shape().int2_bytes() * options.kv_heads * options.layers;
  const size_t sink = options.tile_shape().bf16_bytes() * options.kv_heads * options.layers;
  options.page_bytes_max = 2 * sink + 8 * page;
  const auto worker = OpenWorker(options);
  auto hog = Begin(*worker, model.prompt(512));
  model.Pass(*hog, 512);  // sink and three pages
  const SequenceModel other(options, RandomTokens(1300, 18));
  const auto sequence = Begin(*worker, other.prompt(700));
  other.Pass(*sequence, 500);
  const auto k = other.Keys(0, 500, 700);
  EXPECT_EQ(sequence->Append(0, 200, k.data(), k.data()).code(),
            absl::StatusCode::kResourceExhausted);
  hog.reset();
  const auto out = other.Pass(*sequence, 700);
  ExpectOutputs(other, options, 700, 500, 700, out);
}

TEST(ThreeSegmentTest, ParallelForGivesTheSameOutputs) {
  WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(700, 19));
  const auto serial = OpenWorker(options);
  options.parallel_for = [](int count, const std::function<void(int)>& body) {
    std::thread even([&] {
      for (int i = 0; i < count; i += 2) body(i);
    });
    for (int i = 1; i < count; i += 2) body(i);
    even.join();
  };
  const auto parallel = OpenWorker(options);
  const auto a = Begin(*serial, model.prompt(650));
  const auto b = Begin(*parallel, model.prompt(650));
  EXPECT_TRUE(model.Pass(*a, 650) == model.Pass(*b, 650));
  EXPECT_TRUE(model.Pass(*a, 651) == model.Pass(*b, 651));
}

TEST(ThreeSegmentTest, MeansComeBackInAttention) {
  WorkerOptions options = SmallWorkerOptions();
  RotationSet::Arrays arrays;
  arrays.layers = options.layers;
  arrays.kv_heads = options.kv_heads;
  arrays.head_dim = options.head_dim;
  for (int i = 0; i < options.layers * options.kv_heads * options.head_dim; ++i) {
    arrays.mean_k.push_back(0.3f * std::sin(0.7f * i));
    arrays.mean_v.push_back(0.2f * std::cos(0.3f * i));
  }
  options.rotations = RotationSet::Of("centred", arrays).value();
  const SequenceModel model(options, RandomTokens(700, 20));
  const auto worker = OpenWorker(options);
  const auto sequence = Begin(*worker, model.prompt(650));
  model.Pass(*sequence, 650);
  const auto out = model.Pass(*sequence, 651);
  ExpectOutputs(model, options, 650, 650, 651, out);
}

// All constants of a rotation file of the method crumb: a basis that is not orthogonal, means per
// position block, feedback and shifts.
TEST(ThreeSegmentTest, CrumbConstantsReachStoreAndAttention) {
  WorkerOptions options = SmallWorkerOptions();
  const int heads = options.layers * options.kv_heads, dim = options.head_dim;
  RotationFile file;
  file.method = "crumb";
  file.model = "test-model";
  file.layers = options.layers;
  file.kv_heads = options.kv_heads;
  file.q_heads = options.q_heads;
  file.head_dim = dim;
  file.position_blocks = 3;
  file.pages_per_position_block = 2;
  file.clip_k = 0.9f;
  file.clip_v = 0.95f;
  file.v_basis = "rotated";
  for (int i = 0; i < heads * 3 * dim; ++i) file.mean_k.push_back(0.5f * std::sin(0.7f * i));
  for (int i = 0; i < heads * dim; ++i) file.mean_v.push_back(0.2f * std::cos(0.3f * i));
  for (int i = 0; i < heads * dim * dim; ++i) {
    const int row = i / dim % dim, column = i % dim;
    file.feedback_k.push_back(row < column ? 0.2f * std::sin(1.3f * i) : 0.0f);
    // R = I + 1/2 on the first superdiagonal of each pair of channels, whose inverse has -1/2.
    const bool diagonal = row == column, beside = row % 2 == 0 && column == row + 1;
    file.rotation_k.push_back(diagonal ? 1.0f : beside ? 0.5f : 0.0f);
    file.dual_k.push_back(diagonal ? 1.0f : column % 2 == 0 && row == column + 1 ? -0.5f : 0.0f);
  }
  for (int i = 0; i < options.layers * options.q_heads; ++i) {
    file.shift.push_back(0.1f + 0.05f * i);
  }
  const std::string path =
      testing::TempDir() + "crumb_rotation_" + std::to_string(::getpid()) + ".safetensors";
  ASSERT_TRUE(WriteRotationFile(file, path).ok());
  const absl::Status used = options.UseRotationFile(path);
  std::filesystem::remove(path);
  ASSERT_TRUE(used.ok()) << used;
  EXPECT_EQ(options.method, kernels::Method::kCrumb);
  EXPECT_EQ(options.clip_v, 0.95f);
  EXPECT_EQ(options.v_basis, "rotated");
  EXPECT_EQ(HexEncode(options.rotations.digest()), RotationDigest(file));

  const SequenceModel model(options, RandomTokens(1000, 22));
  const auto worker = OpenWorker(options);
  const auto sequence = Begin(*worker, model.prompt(980));
  model.Pass(*sequence, 980);
  const auto out = model.Pass(*sequence, 981);
  ExpectOutputs(model, options, 980, 980, 981, out);

  options.q_heads *= 2;
  EXPECT_EQ(options.Validate().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ThreeSegmentTest, ReportsBitsPerElement) {
  const WorkerOptions options = SmallWorkerOptions();
  const SequenceModel model(options, RandomTokens(6000, 21));
  const auto worker = OpenWorker(options);
  const auto sequence = Begin(*worker, model.prompt(5952));
  for (int layer = 0; layer < options.layers; ++layer) {
    ASSERT_TRUE(sequence
                    ->Append(layer, 5952, model.Keys(layer, 0, 5952).data(),
                             model.Values(layer, 0, 5952).data())
                    .ok());
  }
  ASSERT_TRUE(sequence->Advance(model.prompt(5952)).ok());
  const SequenceStats stats = sequence->stats();
  // 64 + 256 tokens at 16 bits and 5,632 at 2.5 (two fp16 per 64 elements).
  EXPECT_NEAR(stats.bits_per_element(), (320 * 16.0 + 5632 * 2.5) / 5952, 1e-6);
}

}  // namespace
}  // namespace crumb::client
