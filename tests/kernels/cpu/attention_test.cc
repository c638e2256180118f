// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/reference.h"
#include "tests/kernels/cpu/attention_case.h"
#include "tests/kernels/cpu/each_isa.h"
#include "tests/kernels/shapes.h"

namespace crumb::kernels {
namespace {

class AttentionTest : public EachIsa {
 protected:
  void Check(const AttentionSizes& sizes) {
    AttentionCase attention(sizes, &random_);
    attention.ExpectMatchesReference();
  }

  RandomData random_;
};

INSTANTIATE_TEST_SUITE_P(Isas, AttentionTest, testing::ValuesIn(kAllIsas), IsaNameOf);

TEST_P(AttentionTest, EveryShapeInt2) {
  for (const TileShape& shape : AllShapes()) {
    SCOPED_TRACE(Name(shape));
    AttentionSizes sizes;
    sizes.shape = shape;
    sizes.heads = 3;
    sizes.q_tokens = 2;
    Check(sizes);
  }
}

TEST_P(AttentionTest, EveryShapeBf16) {
  for (const TileShape& shape : AllShapes()) {
    SCOPED_TRACE(Name(shape));
    AttentionSizes sizes;
    sizes.shape = shape;
    sizes.format = PageFormat::kBf16;
    sizes.heads = 3;
    Check(sizes);
  }
}

TEST_P(AttentionTest, AnyNumberOfQueryHeads) {
  for (int heads = 1; heads <= 16; ++heads) {
    SCOPED_TRACE(heads);
    AttentionSizes sizes;
    sizes.heads = heads;
    Check(sizes);
  }
  AttentionSizes sizes;
  sizes.shape = {64, 64, 64};
  sizes.heads = kMaxQueryHeadsPerKvHead;
  sizes.kv_heads = 1;
  Check(sizes);
}

TEST_P(AttentionTest, AnyNumberOfQueryTokens) {
  for (const int q_tokens : {1, 2, 8, 70}) {
    for (const int heads : {1, 4, 7}) {
      SCOPED_TRACE(testing::Message() << q_tokens << " tokens, " << heads << " heads");
      AttentionSizes sizes;
      sizes.shape = {64, 64, 32};
      sizes.kv_heads = 1;
      sizes.heads = heads;
      sizes.q_tokens = q_tokens;
      sizes.recent_tokens = 90;
      Check(sizes);
    }
  }
}

TEST_P(AttentionTest, QueriesBeforeTheRecentWindow) {
  // There are more queries than recent tokens: the first ones lie in the history and in the sink.
  AttentionSizes sizes;
  sizes.shape = {64, 64, 64};
  sizes.q_tokens = 190;
  sizes.recent_tokens = 50;
  sizes.kv_heads = 1;
  Check(sizes);
}

TEST_P(AttentionTest, SegmentsMayBeEmpty) {
  const int lengths[][3] = {{0, 2, 40}, {64, 0, 0}, {0, 0, 1},  {0, 0, 100}, {5, 0, 3},
                            {0, 3, 0},  {1, 1, 1},  {64, 2, 0}, {130, 1, 17}};
  for (const auto& [sink, pages, recent] : lengths) {
    for (const PageFormat format : {PageFormat::kInt2, PageFormat::kBf16}) {
      SCOPED_TRACE(testing::Message() << sink << ", " << pages << ", " << recent);
      AttentionSizes sizes;
      sizes.format = format;
      sizes.sink_tokens = sink;
      sizes.pages = pages;
      sizes.recent_tokens = recent;
      Check(sizes);
    }
  }
}

TEST_P(AttentionTest, RingMayBeginAnywhere) {
  for (const int begin : {0, 1, 59, 60, 63, 99}) {
    SCOPED_TRACE(begin);
    AttentionSizes sizes;
    sizes.recent_begin = begin;
    sizes.recent_tokens = 100;
    sizes.q_tokens = 3;
    Check(sizes);
  }
}

TEST_P(AttentionTest, WindowMayCutAnywhere) {
  // The sequence has 20 sink, 128 history and 40 recent tokens.
  for (const int window : {1, 3, 40, 41, 50, 64, 104, 105, 150, 168, 170, 187, 1000}) {
    for (const PageFormat format : {PageFormat::kInt2, PageFormat::kBf16}) {
      SCOPED_TRACE(window);
      AttentionSizes sizes;
      sizes.format = format;
      sizes.window = window;
      sizes.q_tokens = 9;
      Check(sizes);
    }
  }
}

TEST_P(AttentionTest, SoftCapSinkLogitAndScale) {
  for (const float soft_cap : {0.0f, 2.0f, 30.0f}) {
    for (const bool sink_logit : {false, true}) {
      AttentionSizes sizes;
      sizes.soft_cap = soft_cap;
      sizes.sink_logit = sink_logit;
      AttentionCase attention(sizes, &random_);
      attention.params.scale = soft_cap > 0.0f ? 0.3f : 0.05f;
      attention.ExpectMatchesReference();
    }
  }
}

TEST_P(AttentionTest, TransformsMayBeNullOneByOne) {
  AttentionSizes sizes;
  sizes.transforms = false;
  Check(sizes);
  for (int missing = 0; missing < 5; ++missing) {
    SCOPED_TRACE(missing);
    AttentionCase attention(AttentionSizes{}, &random_);
    AttentionParams& params = attention.params;
    if (missing == 0) params.rotation_k = nullptr;
    if (missing == 1) params.rotation_v = nullptr;
    if (missing == 2) params.mean_v = nullptr;
    if (missing == 3) params.offset = nullptr;
    if (missing == 4) params.shift = nullptr;
    attention.ExpectMatchesReference();
  }
}

TEST_P(AttentionTest, OffsetsFollowThePositionBlock) {
  AttentionSizes sizes;
  sizes.pages = 5;
  AttentionCase attention(sizes, &random_);
  attention.params.pages_per_position_block = 2;  // pages 4 and beyond use the last block
  attention.ExpectMatchesReference();
}

TEST_P(AttentionTest, LseMayBeNull) {
  AttentionCase attention(AttentionSizes{}, &random_);
  attention.params.lse = nullptr;
  attention.ExpectMatchesReference();
}

TEST_P(AttentionTest, OnlyTheRequestedHeadsAreWritten) {
  AttentionSizes sizes;
  sizes.kv_heads = 4;
  sizes.heads = 2;
  AttentionCase attention(sizes, &random_);
  std::vector<uint8_t> workspace(AttentionWorkspaceBytes(attention.params) + 64);
  void* aligned = workspace.data();
  size_t room = workspace.size();
  ASSERT_NE(std::align(64, room - 64, aligned, room), nullptr);
  Attend(attention.params, 1, 3, aligned);
  const int d = sizes.shape.head_dim;
  for (int head = 0; head < 8; ++head) {
    const bool written = head >= 2 && head < 6;
    EXPECT_EQ(attention.out[head * d] != -7.0f, written) << head;
    EXPECT_EQ(attention.lse[head] != -7.0f, written) << head;
  }
}

// A permutation of channels is an orthogonal matrix. It changes neither codes nor scales when the
// group is the whole row, so attention may change only by the order of sums.
TEST_P(AttentionTest, PermutingChannelsByRotationChangesNothing) {
  const int d = 128;
  AttentionSizes sizes;
  sizes.transforms = false;
  sizes.kv_heads = 1;
  const uint32_t seed = 1234;
  RandomData first(seed), second(seed);
  AttentionCase plain(sizes, &first);
  AttentionCase permuted(sizes, &second);
  std::vector<float> rotation(d * d, 0.0f);
  for (int i = 0; i < d; ++i) rotation[i * d + (37 * i + 5) % d] = 1.0f;
  for (int page = 0; page < sizes.pages; ++page) {
    const std::vector<uint8_t> before(plain.Tile(page, 0), plain.Tile(page, 0) + 4608);
    for (int t = 0; t < 64; ++t) {
      for (int i = 0; i < d; ++i) {
        for (const TilePart part : {TilePart::kKey, TilePart::kValue}) {
          WriteCode(sizes.shape, part, t, (37 * i + 5) % d,
                    ReadCode(sizes.shape, before.data(), part, t, i), permuted.Tile(page, 0));
        }
      }
    }
  }
  permuted.params.rotation_k = permuted.params.rotation_v = rotation.data();
  plain.Run();
  permuted.Run();
  for (size_t i = 0; i < plain.out.size(); ++i) ASSERT_NEAR(plain.out[i], permuted.out[i], 1e-4);
}

// The output of a token does not depend on tokens after it, bit by bit.
TEST_P(AttentionTest, LaterTokensDoNotMatter) {
  AttentionSizes sizes;
  sizes.q_tokens = 6;
  AttentionCase attention(sizes, &random_);
  attention.Run();
  const std::vector<float> before = attention.out;
  const int d = sizes.shape.head_dim;
  const int slot = (sizes.recent_begin + sizes.recent_tokens - 1) % sizes.recent_capacity;
  for (int head = 0; head < sizes.kv_heads; ++head) {
    const int at = (head * sizes.recent_capacity + slot) * d;
    for (int i = 0; i < d; ++i) {
      attention.recent_k[at + i] = Bf16FromFloat(9.0f);
      attention.recent_v[at + i] = Bf16FromFloat(-9.0f);
    }
  }
  attention.Run();
  const size_t earlier = before.size() / 6 * 5;
  for (size_t i = 0; i < earlier; ++i) ASSERT_EQ(attention.out[i], before[i]);
  EXPECT_NE(attention.out.back(), before.back());
}

// A block of query tokens has the output of the tokens one at a time.
TEST_P(AttentionTest, BlockedTokensEqualSingleOnes) {
  AttentionSizes sizes;
  sizes.q_tokens = 40;
  sizes.heads = 3;
  AttentionCase attention(sizes, &random_);
  attention.Run();
  const std::vector<float> together = attention.out;
  const int d = sizes.shape.head_dim, row = attention.params.q_heads * d;
  for (const int token : {0, 17, 39}) {
    // The token is attended alone, with the sequence cut after it.
    AttentionParams saved = attention.params;
    attention.params.q_tokens = 1;
    attention.params.q = attention.q.data() + token * row;
    attention.params.offset += token * attention.params.q_heads * attention.params.position_blocks;
    attention.params.recent_tokens = sizes.recent_tokens - (sizes.q_tokens - 1 - token);
    attention.Run();
    for (int i = 0; i < row; ++i) ASSERT_NEAR(attention.out[i], together[token * row + i], 2e-5);
    attention.params = saved;
  }
}

TEST_P(AttentionTest, LargeLogitsStayFinite) {
  for (const float deviation : {1e-3f, 30.0f, 1000.0f}) {
    SCOPED_TRACE(deviation);
    AttentionSizes sizes;
    sizes.key_deviation = deviation;
    AttentionCase attention(sizes, &random_);
    attention.Run();
    for (const float x : attention.out) ASSERT_TRUE(std::isfinite(x));
    for (const float x : attention.lse) ASSERT_TRUE(std::isfinite(x));
  }
}

// One key stands 14 nats above 100,000 others, whatever the size of the values.
TEST_P(AttentionTest, OneKeyFarAboveManyOthers) {
  const TileShape shape{64, 64, 64};
  const int d = shape.head_dim, many = 1600;
  for (const float deviation : {1e-3f, 1.0f, 1e3f}) {
    SCOPED_TRACE(deviation);
    const std::vector<Bf16> k = random_.Rows(64 * d, 0.1f), v = random_.Rows(64 * d, deviation);
    alignas(128) uint8_t common[2560], special[2560];
    ASSERT_EQ(shape.int2_bytes(), sizeof(common));
    QuantizeParams quantize;
    quantize.shape = shape;
    quantize.k = k.data();
    quantize.v = v.data();
    quantize.k_stride = quantize.v_stride = d;
    quantize.tile = common;
    ASSERT_EQ(QuantizeTile(quantize), 0u);
    std::vector<Bf16> q(d), peak = k;
    for (int i = 0; i < d; ++i) {
      q[i] = Bf16FromFloat(i % 2 == 0 ? 1.0f : -1.0f);
      peak[31 * d + i] = Bf16FromFloat(i % 2 == 0 ? 1.75f : -1.75f);  // 64 * 1.75 / 8 = 14
    }
    quantize.k = peak.data();
    quantize.tile = special;
    ASSERT_EQ(QuantizeTile(quantize), 0u);
    std::vector<uint64_t> pages(many, reinterpret_cast<uint64_t>(common));
    pages[many / 3] = reinterpret_cast<uint64_t>(special);
    std::vector<float> out(d), lse(1);
    AttentionParams params;
    params.shape = shape;
    params.q = q.data();
    params.out = out.data();
    params.lse = lse.data();
    params.pages = many;
    params.page_address = pages.data();
    std::vector<uint8_t> workspace(AttentionWorkspaceBytes(params) + 64);
    void* aligned = workspace.data();
    size_t room = workspace.size();
    ASSERT_NE(std::align(64, room - 64, aligned, room), nullptr);
    Attend(params, 0, 1, aligned);
    const reference::AttentionRow row = reference::Attend(params, 0, 0);
    double error = 0.0, norm = 0.0;
    for (int i = 0; i < d; ++i) {
      error += (out[i] - row.out[i]) * (out[i] - row.out[i]);
      norm += row.out[i] * row.out[i];
    }
    EXPECT_LE(std::sqrt(error / norm), 5e-4);
    EXPECT_NEAR(lse[0], row.lse, 1e-4);
  }
}

}  // namespace
}  // namespace crumb::kernels
