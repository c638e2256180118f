// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Compares OptR's losses and gradients with their definitions in double precision.
#include "bench/quality_methods/optr.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/bench/random_rows.h"

namespace crumb::bench {
namespace {

using kernels::TilePart;

constexpr int kSmallDim = 16;
constexpr int kTokens = 400;  // 80 of them history
constexpr int kHistory = kTokens - 64 - 256;

struct Problem {
  OptrSequence sequence;
  OptrOutput output;
  std::vector<Eigen::MatrixXf> weights;  // W_o of each head, [hidden, head_dim]
};

// Keys have one large channel, and the queries look at history.
Problem MakeProblem(uint32_t seed) {
  Problem problem;
  problem.output.logit_scale = 0.25f;
  problem.sequence.keys = NormalRows(kTokens, kSmallDim, seed);
  problem.sequence.keys.col(2) *= 6.0f;
  problem.sequence.values = NormalRows(kTokens, kSmallDim, seed + 1);
  problem.sequence.values.col(5) *= 6.0f;
  for (uint32_t head = 0; head < 2; ++head) {
    WindowRows queries = NormalRows(8, kSmallDim, seed + 2 + head);
    for (int row = 0; row < 8; ++row) queries.row(row) += problem.sequence.keys.row(70 + 5 * row);
    problem.sequence.attention.push_back(
        AttentionWeightsOf(queries, problem.sequence.keys, problem.output.logit_scale));
    problem.sequence.queries.push_back(queries);
    problem.weights.push_back(NormalRows(24, kSmallDim, seed + 4 + head));
    problem.output.grams.push_back(problem.weights[head].transpose() * problem.weights[head] /
                                   24.0f);
  }
  return problem;
}

using Doubles = Eigen::MatrixXd;

// The loss in double precision with the thresholds and the numbers of steps by which levels
// differ from clipped values fixed at the rotation `at`. At `at` it is the loss; its gradient is
// the straight-through one.
class Surrogate {
 public:
  Surrogate(const WindowRows& rows, const WindowRows& at, float clip)
      : rows_(rows.cast<double>()), offset_(kHistory, kSmallDim), threshold_(kHistory) {
    const Doubles y = History() * at.cast<double>();
    for (int t = 0; t < kHistory; ++t) {
      std::vector<double> sorted;
      for (int j = 0; j < kSmallDim; ++j) sorted.push_back(std::abs(y(t, j)));
      std::sort(sorted.begin(), sorted.end());
      threshold_[t] = sorted[static_cast<int>(clip * kSmallDim)];
      const auto [lo, step] = Range(y, t);
      for (int j = 0; j < kSmallDim; ++j) {
        const double place = (Clip(y(t, j), t) - lo) / step;
        offset_(t, j) = std::clamp(std::floor(place + 0.5), 0.0, 3.0) - place;
      }
    }
  }

  Doubles Stored(const Doubles& rotation) const {
    const Doubles y = History() * rotation;
    Doubles levels(kHistory, kSmallDim);
    for (int t = 0; t < kHistory; ++t) {
      const double step = Range(y, t).second;
      for (int j = 0; j < kSmallDim; ++j) levels(t, j) = Clip(y(t, j), t) + offset_(t, j) * step;
    }
    Doubles stored = rows_;
    stored.middleRows(64, kHistory) = levels * rotation.transpose();
    return stored;
  }

 private:
  Doubles History() const { return rows_.middleRows(64, kHistory); }
  double Clip(double value, int t) const {
    return std::clamp(value, -threshold_[t], threshold_[t]);
  }
  std::pair<double, double> Range(const Doubles& y, int t) const {
    double lo = 1e9, hi = -1e9;
    for (int j = 0; j < kSmallDim; ++j) {
      lo = std::min(lo, Clip(y(t, j), t));
      hi = std::max(hi, Clip(y(t, j), t));
    }
    return {lo, (hi - lo) / 3.0};
  }

  const Doubles rows_;
  Doubles offset_;
  Eigen::VectorXd threshold_;
};

Doubles Softmax(const Doubles& queries, const Doubles& keys, double scale) {
  Doubles weights = Doubles::Zero(queries.rows(), keys.rows());
  for (int row = 0; row < queries.rows(); ++row) {
    const int seen = static_cast<int>(keys.rows() - queries.rows()) + row + 1;
    double sum = 0.0;
    for (int t = 0; t < seen; ++t) {
      weights(row, t) = std::exp(scale * queries.row(row).dot(keys.row(t)));
      sum += weights(row, t);
    }
    weights.row(row) /= sum;
  }
  return weights;
}

double KeyLossInDoubles(const Problem& problem, const Surrogate& keys, const Doubles& rotation) {
  const Doubles stored = keys.Stored(rotation), exact = problem.sequence.keys.cast<double>();
  double loss = 0.0;
  for (int head = 0; head < 2; ++head) {
    const Doubles queries = problem.sequence.queries[head].cast<double>();
    const Doubles p = Softmax(queries, exact, 0.25), q = Softmax(queries, stored, 0.25);
    const Doubles output = (q - p) * problem.sequence.values.cast<double>() *
                           problem.weights[head].cast<double>().transpose();
    double divergence = 0.0;
    for (int row = 0; row < 8; ++row) {
      for (int t = 0; t < kTokens; ++t) {
        if (p(row, t) > 0) divergence += p(row, t) * std::log(p(row, t) / q(row, t));
      }
    }
    loss += (divergence / 8 + output.squaredNorm() / (8 * 24)) / 2;
  }
  return loss;
}

double ValueLossInDoubles(const Problem& problem, const Surrogate& values,
                          const Doubles& rotation) {
  const Doubles error = values.Stored(rotation) - problem.sequence.values.cast<double>();
  double loss = 0.0;
  for (int head = 0; head < 2; ++head) {
    const Doubles output = problem.sequence.attention[head].cast<double>() * error *
                           problem.weights[head].cast<double>().transpose();
    loss += output.squaredNorm() / (8 * 24) / 2;
  }
  return loss;
}

// Compares a loss with its surrogate, and the gradient with the surrogate's differences along
// random directions.
template <typename Loss, typename Expected>
void ExpectLossAndGradient(const WindowRows& rotation, const Loss& loss, const Expected& expected) {
  WindowRows gradient = WindowRows::Zero(kSmallDim, kSmallDim);
  const double found = loss(rotation, &gradient);
  const Doubles at = rotation.cast<double>();
  EXPECT_NEAR(found, expected(at), 1e-4 * found);
  EXPECT_EQ(loss(rotation, nullptr), found);
  constexpr double kStep = 1e-5;
  for (uint32_t seed = 0; seed < 6; ++seed) {
    const Doubles direction = NormalRows(kSmallDim, kSmallDim, 100 + seed).cast<double>();
    const double slope =
        (expected(at + kStep * direction) - expected(at - kStep * direction)) / (2 * kStep);
    const double product = direction.cwiseProduct(gradient.cast<double>()).sum();
    EXPECT_NEAR(product, slope, 2e-3 * gradient.norm() * direction.norm()) << seed;
  }
}

TEST(OptrTest, KeyLossAndGradientAreThoseOfTheDefinition) {
  const Problem problem = MakeProblem(40);
  const WindowRows rotation = RandomOrthogonal(kSmallDim, 41);
  for (const float clip : {0.99f, 0.85f}) {
    const Surrogate keys(problem.sequence.keys, rotation, clip);
    ExpectLossAndGradient(
        rotation,
        [&](const WindowRows& r, WindowRows* gradient) {
          return KeyLoss(problem.sequence, problem.output, r, clip, gradient);
        },
        [&](const Doubles& r) { return KeyLossInDoubles(problem, keys, r); });
  }
}

TEST(OptrTest, ValueLossAndGradientAreThoseOfTheDefinition) {
  const Problem problem = MakeProblem(50);
  const WindowRows rotation = RandomOrthogonal(kSmallDim, 51);
  for (const float clip : {0.99f, 0.85f}) {
    const Surrogate values(problem.sequence.values, rotation, clip);
    ExpectLossAndGradient(
        rotation,
        [&](const WindowRows& r, WindowRows* gradient) {
          return ValueLoss(problem.sequence, problem.output, r, clip, gradient);
        },
        [&](const Doubles& r) { return ValueLossInDoubles(problem, values, r); });
  }
}

TEST(OptrTest, LearnedRotationsAreOrthogonalAndBetterOnOtherSequences) {
  std::vector<Problem> problems;
  for (uint32_t seed = 60; seed < 120; seed += 10) problems.push_back(MakeProblem(seed));
  const OptrLoss loss = [&](int index, const WindowRows& rotation, WindowRows* gradient) {
    return KeyLoss(problems[index].sequence, problems[0].output, rotation, 0.96f, gradient);
  };
  const WindowRows base = WindowRows::Identity(kSmallDim, kSmallDim);
  const WindowRows learned = LearnRotation(base, 3, 2, loss, OptrOptions());
  EXPECT_LT((learned.transpose() * learned - base).cwiseAbs().maxCoeff(), 1e-4f);
  EXPECT_GT((learned - base).norm(), 0.5f);
  EXPECT_LT(loss(5, learned, nullptr), 0.7 * loss(5, base, nullptr));
}

TEST(OptrTest, WithoutABetterOneTheBaseStays) {
  const OptrLoss worse_when_turned = [](int, const WindowRows& rotation, WindowRows* gradient) {
    if (gradient != nullptr) *gradient += NormalRows(kSmallDim, kSmallDim, 3);
    return static_cast<double>((rotation - WindowRows::Identity(kSmallDim, kSmallDim)).norm());
  };
  const WindowRows base = WindowRows::Identity(kSmallDim, kSmallDim);
  EXPECT_EQ(LearnRotation(base, 1, 1, worse_when_turned, OptrOptions()), base);
}

class LearnOptrTest : public testing::Test {
 protected:
  LearnOptrTest() {
    oscar_.head_dim = 8;
    oscar_.kv_heads = 1;  // one rotation per layer
    oscar_.clip_k = 0.96f;
    oscar_.clip_v = 0.92f;
    for (const uint32_t seed : {1u, 2u}) {
      const WindowRows rotation = RandomOrthogonal(8, seed);
      oscar_.rotation_k.insert(oscar_.rotation_k.end(), rotation.data(), rotation.data() + 64);
    }
    oscar_.rotation_v = oscar_.rotation_k;
  }

  auto Learn(FakeSource source, const OptrOptions& options) {
    return LearnOptr(
        source, oscar_,
        [](int) { return std::vector<Eigen::MatrixXf>(4, Eigen::MatrixXf::Identity(8, 8)); },
        [](int count, const std::function<void(int)>& body) {
          for (int i = 0; i < count; ++i) body(i);
        },
        options);
  }

  RotationFile oscar_;
};

TEST_F(LearnOptrTest, EveryHeadHasItsRotationsAndItsMean) {
  OptrOptions none{.steps = 0};
  const auto plain = Learn(FakeSource(3, 400), none), learned = Learn(FakeSource(3, 400), {});
  ASSERT_TRUE(plain.ok()) << plain.status();
  ASSERT_TRUE(learned.ok()) << learned.status();
  ASSERT_EQ(learned->size(), 4u);
  int turns = 0;
  for (int item = 0; item < 4; ++item) {
    const auto& base = dynamic_cast<const RotatedInt2&>(*(*plain)[item]);
    const auto& turned = dynamic_cast<const RotatedInt2&>(*(*learned)[item]);
    const WindowRows expected =
        Eigen::Map<const WindowRows>(oscar_.rotation_k.data() + item / 2 * 64, 8, 8);
    for (const TilePart part : {TilePart::kKey, TilePart::kValue}) {
      const WindowRows& rotation = turned.Of(part).rotation;
      EXPECT_EQ(base.Of(part).rotation, expected);
      turns += rotation != expected ? 1 : 0;
      EXPECT_LT((rotation.transpose() * rotation - WindowRows::Identity(8, 8)).norm(), 1e-4f);
      EXPECT_EQ(turned.Of(part).clip, part == TilePart::kKey ? 0.96f : 0.92f);
    }
    EXPECT_NEAR(turned.Of(TilePart::kKey).mean[3], 5.0f, 0.5f);
    EXPECT_EQ(turned.Of(TilePart::kValue).mean.norm(), 0.0f);
  }
  EXPECT_GT(turns, 0);  // a head keeps its base if nothing better was seen
}

TEST_F(LearnOptrTest, TooLittleTextIsNamed) {
  EXPECT_THAT(std::string(Learn(FakeSource(1, 400), {}).status().message()),
              testing::HasSubstr("--calibration-tokens"));
  EXPECT_THAT(std::string(Learn(FakeSource(3, 384), {}).status().message()),
              testing::HasSubstr("384 tokens have too little history"));
}

}  // namespace
}  // namespace crumb::bench
