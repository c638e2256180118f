// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Typical mistakes of decode attention over INT2 pages, in every form of the kernel: heads that do
// not fill a block, sequences of a sink alone, long flat histories under one key, queries that are
// not finite.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "tests/kernels/cuda/decode/decode_case.h"

namespace crumb::kernels::cuda {
namespace {

struct Way {
  const char* name;
  DecodeForm form;
  CopyPath copies = CopyPath::kAuto;
};
constexpr Way kWays[] = {{"auto", DecodeForm::kAuto},
                         {"plan", DecodeForm::kPlanned},
                         {"plan, 16-byte copies", DecodeForm::kPlanned, CopyPath::kAsync16},
                         {"clusters", DecodeForm::kClusters}};

// Returns whether the device supports the way, for head_dim and groups of 128.
bool Serves(const Way& way, int query_rows) {
  if (way.form != DecodeForm::kClusters) return true;
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
         major >= 9 && query_rows <= 16;
}

// Query heads per KV head are no powers of two; there are several KV heads, one sequence and many.
// Each query head must read the data of its own KV head.
TEST(DecodeHazards, EveryQueryHeadReadsItsOwnKvHead) {
  CRUMB_NEEDS_DEVICE();
  for (const int group : {3, 5, 6, 7, 12, 40}) {
    for (const int batch : {1, 17}) {
      DecodeOptions options;
      options.group = group;
      options.kv_heads = batch == 1 ? 8 : 2;
      options.seed = 10 * group + batch;
      for (int s = 0; s < batch; ++s) {
        options.sequences.push_back({64, 1 + s % 3, 20 + 13 * (s % 5)});
      }
      for (const Way& way : kWays) {
        if (!Serves(way, group)) continue;
        options.form = way.form;
        options.copy_path = way.copies;
        DecodeCase run(options);
        run.Run();
        EXPECT_LE(run.WorstError(), 5e-4) << way.name << ": " << group << " heads, batch " << batch;
      }
    }
  }
}

// The first 64 tokens of a sequence lie in the sink, the query's own among them.
TEST(DecodeHazards, SequencesOfASinkAlone) {
  CRUMB_NEEDS_DEVICE();
  const std::vector<std::vector<SequenceLengths>> batches = {
      {{40, 0, 0}},
      {{64, 0, 0}},
      {{5, 0, 0}, {64, 0, 0}, {0, 0, 0}, {33, 0, 0}, {64, 0, 2}, {64, 9, 80}},
  };
  for (const auto& sequences : batches) {
    for (const int q_tokens : {1, 3}) {
      for (const Way& way : kWays) {
        if (!Serves(way, 4 * q_tokens)) continue;
        DecodeOptions options;
        options.kv_heads = 2;
        options.group = 4;
        options.q_tokens = q_tokens;
        options.sequences = sequences;
        options.form = way.form;
        options.copy_path = way.copies;
        DecodeCase run(options);
        run.Run();
        EXPECT_LE(run.WorstError(), 5e-4)
            << way.name << ", " << q_tokens << " query tokens, batch " << sequences.size();
      }
    }
  }
}

// Every KV head reads the tiles of the first one, so that many problems are tested without memory
// for each: there are more problems than workers, and one worker sums 100k tokens.
class ManyHeads {
 public:
  ManyHeads(DecodeCase& one, int heads)
      : one_(one),
        heads_(heads),
        rows_(one.options().group),
        elements_(static_cast<size_t>(rows_) * one.options().tile.head_dim),
        params_(one.Params()) {
    std::vector<Bf16> q(elements_);
    EXPECT_EQ(cudaMemcpy(q.data(), params_.q, 2 * elements_, cudaMemcpyDeviceToHost), cudaSuccess);
    std::vector<Bf16> all;
    for (int h = 0; h < heads; ++h) all.insert(all.end(), q.begin(), q.end());
    q_.Upload(all);
    out_.Allocate(heads * elements_ * sizeof(float));
    lse_.Allocate(heads * rows_ * sizeof(float));
    params_.shape.kv_heads = heads;
    params_.shape.q_heads = heads * rows_;
    params_.page_head_stride = params_.sink.head_stride = params_.recent.head_stride = 0;
    plan_.Allocate(DecodePlanBytes(params_.shape, one_.Tuning()));
    workspace_.Allocate(DecodeWorkspaceBytes(params_.shape, one_.Tuning()));
    workspace_.Fill(0);
    params_.q = q_.as<void>();
    params_.out = out_.as<void>();
    params_.lse = lse_.as<float>();
    params_.plan = plan_.as<void>();
    params_.workspace = workspace_.as<void>();
  }

  void Run() {
    out_.Fill(0xff);
    lse_.Fill(0xff);
    ASSERT_CUDA(
        PlanDecode(params_.shape, params_.lengths, 0, plan_.as<void>(), nullptr, one_.Tuning()));
    ASSERT_CUDA(DecodeAttention(params_, nullptr, one_.Tuning()));
    ASSERT_CUDA(cudaDeviceSynchronize());
  }
  // Returns the error of up to two rows of one KV head against the oracle.
  double Error(int head) {
    EXPECT_EQ(cudaMemcpy(one_.Params().out, out_.as<float>() + head * elements_,
                         elements_ * sizeof(float), cudaMemcpyDeviceToDevice),
              cudaSuccess);
    EXPECT_EQ(cudaMemcpy(one_.Params().lse, lse_.as<float>() + head * rows_, rows_ * sizeof(float),
                         cudaMemcpyDeviceToDevice),
              cudaSuccess);
    return one_.WorstError(2);
  }
  int heads() const { return heads_; }

 private:
  DecodeCase& one_;
  const int heads_;
  const int rows_;         // rows per KV head
  const size_t elements_;  // elements of these rows
  DecodeAttentionParams params_;
  DeviceBuffer q_, out_, lse_, plan_, workspace_;
};

TEST(DecodeHazards, ALongFlatRestOfOneSplit) {
  CRUMB_NEEDS_DEVICE();
  for (const Way& way : kWays) {
    if (way.form == DecodeForm::kAuto || !Serves(way, 1)) continue;
    for (const double nats : {8.0, 12.0, 16.0}) {
      for (const double value_std : {1.0, 1e-4}) {
        DecodeOptions options;
        options.sequences = {{64, 1562, 64}};
        options.logit_std = 0.05;
        options.value_std = value_std;
        options.transforms = false;
        options.form = way.form;
        options.copy_path = way.copies;
        DecodeCase one(options);
        one.PeakAt(0, 3, 0, 17, nats);
        ManyHeads many(one, way.form == DecodeForm::kClusters ? 70 : 800);
        many.Run();
        for (const int head : {0, many.heads() / 2 + 1}) {
          EXPECT_LE(many.Error(head), 5e-4)
              << way.name << ": " << nats << " nats, V " << value_std << ", head " << head;
        }
      }
    }
  }
}

struct Instance {
  int head_dim, group_size, query_rows;
};

// ManyHeads in every instance of the planned schedule.
class ALongFlatRest : public testing::TestWithParam<Instance> {};

TEST_P(ALongFlatRest, OfOneSplit) {
  CRUMB_NEEDS_DEVICE();
  for (const Way& way : kWays) {
    if (way.form != DecodeForm::kPlanned) continue;
    DecodeOptions options;
    options.tile.head_dim = GetParam().head_dim;
    options.tile.group_size = GetParam().group_size;
    options.group = GetParam().query_rows;
    options.sequences = {{64, 1562, 64}};
    options.logit_std = 0.05;
    options.transforms = false;
    options.form = way.form;
    options.copy_path = way.copies;
    DecodeCase one(options);
    one.LevelQuery();  // the test is about sums of values, not about the peak's logit
    one.PeakAt(0, 3, 0, 17, 8.0);
    ManyHeads many(one, 800);
    many.Run();
    EXPECT_LE(many.Error(401), 5e-4) << way.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Instances, ALongFlatRest,
                         testing::Values(Instance{128, 128, 8}, Instance{128, 128, 12},
                                         Instance{128, 128, 16}, Instance{128, 64, 4},
                                         Instance{128, 64, 8}, Instance{128, 32, 4},
                                         Instance{128, 32, 8}, Instance{64, 64, 4},
                                         Instance{64, 64, 8}, Instance{256, 128, 4},
                                         Instance{256, 128, 8}),
                         [](const auto& instance) {
                           return "D" + std::to_string(instance.param.head_dim) + "G" +
                                  std::to_string(instance.param.group_size) + "C" +
                                  std::to_string(instance.param.query_rows);
                         });

constexpr int kKvHeads = 2;

class NotFinite : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { CRUMB_NEEDS_DEVICE(); }

  static DecodeOptions Options(const Way& way, int group) {
    DecodeOptions options;
    options.kv_heads = kKvHeads;
    options.group = group;
    options.sequences = {{64, 20, 100}, {64, 3, 70}, {0, 0, 40}, {0, 4, 0}};
    options.form = way.form;
    options.copy_path = way.copies;
    return options;
  }
  // Returns ||after - before|| / ||before|| of row `row`.
  static double Change(const std::vector<float>& before, const std::vector<float>& after,
                       size_t row) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = row * 128; i < (row + 1) * 128; ++i) {
      difference += (after[i] - before[i]) * (after[i] - before[i]);
      norm += before[i] * before[i];
    }
    return std::sqrt(difference / norm);
  }
  static bool SameBits(const std::vector<float>& before, const std::vector<float>& after,
                       size_t row) {
    return std::memcmp(&before[row * 128], &after[row * 128], 128 * sizeof(float)) == 0;
  }
};

constexpr uint16_t kNotNumbers[] = {0x7fc0, 0x7f80, 0xff80};

TEST_P(NotFinite, AQueryRowSpoilsItselfAlone) {
  const int group = GetParam();
  for (const Way& way : kWays) {
    if (!Serves(way, group)) continue;
    DecodeCase run(Options(way, group));
    run.Run();
    const std::vector<float> before = run.Out();
    for (size_t sequence = 0; sequence < run.options().sequences.size(); ++sequence) {
      const size_t problem = sequence * kKvHeads, spoiled = problem * group + group / 2;
      Bf16* element =
          const_cast<Bf16*>(static_cast<const Bf16*>(run.Params().q)) + spoiled * 128 + 7;
      uint16_t was = 0;
      ASSERT_CUDA(cudaMemcpy(&was, element, 2, cudaMemcpyDeviceToHost));
      for (const uint16_t bits : kNotNumbers) {
        ASSERT_CUDA(cudaMemcpy(element, &bits, 2, cudaMemcpyHostToDevice));
        run.Run();
        const std::vector<float> after = run.Out();
        for (size_t i = spoiled * 128; i < (spoiled + 1) * 128; ++i) {
          ASSERT_TRUE(std::isnan(after[i]))
              << way.name << ", bits " << bits << ", sequence " << sequence << ": " << after[i];
        }
        for (size_t row = 0; row < before.size() / 128; ++row) {
          if (row == spoiled) continue;
          // Rows of one problem raise their running max at the same time, so they may change a
          // little.
          if (row / group == problem) {
            EXPECT_LE(Change(before, after, row), 1e-3)
                << way.name << ", bits " << bits << " row " << row;
          } else {
            EXPECT_TRUE(SameBits(before, after, row))
                << way.name << ", bits " << bits << " row " << row;
          }
        }
      }
      ASSERT_CUDA(cudaMemcpy(element, &was, 2, cudaMemcpyHostToDevice));
    }
  }
}

TEST_P(NotFinite, AWindowSpoilsItsOwnProblemAlone) {
  const int group = GetParam();
  for (const Way& way : kWays) {
    if (!Serves(way, group)) continue;
    DecodeCase run(Options(way, group));
    run.Run();
    const std::vector<float> before = run.Out();
    const DecodeAttentionParams p = run.Params();
    uint64_t address[3];
    int32_t begin[3];
    ASSERT_CUDA(cudaMemcpy(address, p.recent.address, sizeof(address), cudaMemcpyDeviceToHost));
    ASSERT_CUDA(cudaMemcpy(begin, p.lengths.recent_begin, sizeof(begin), cudaMemcpyDeviceToHost));
    // The element is one of a key, then one of a value, of the second sequence's second KV head.
    for (const int64_t part : {int64_t{0}, p.recent.v_offset}) {
      const uint64_t row = address[1] + p.recent.head_stride + part +
                           (begin[1] + 5) % p.recent_capacity * p.recent.token_stride;
      uint16_t was = 0;
      ASSERT_CUDA(cudaMemcpy(&was, reinterpret_cast<void*>(row), 2, cudaMemcpyDeviceToHost));
      for (const uint16_t bits : kNotNumbers) {
        ASSERT_CUDA(cudaMemcpy(reinterpret_cast<void*>(row), &bits, 2, cudaMemcpyHostToDevice));
        run.Run();
        const std::vector<float> after = run.Out();
        for (size_t i = 0; i < before.size() / 128; ++i) {
          if (i / group == 1 * kKvHeads + 1) continue;
          EXPECT_TRUE(SameBits(before, after, i))
              << way.name << ", bits " << bits << (part == 0 ? " key" : " value") << ", row " << i;
        }
      }
      ASSERT_CUDA(cudaMemcpy(reinterpret_cast<void*>(row), &was, 2, cudaMemcpyHostToDevice));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Groups, NotFinite, testing::Values(4, 8, 12, 16, 40));

}  // namespace
}  // namespace crumb::kernels::cuda
