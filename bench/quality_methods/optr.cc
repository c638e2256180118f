// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_methods/optr.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "calibration/history_windows.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "kernels/bf16.h"

namespace crumb::bench {
namespace {

constexpr int kSink = calibration::kSinkTokens;
constexpr int kExactTail = calibration::kRecentTokens;

// Adam's constants, and the number of steps between two looks at the held-out sequences.
constexpr float kMomentum = 0.9f;
constexpr float kVarianceDecay = 0.999f;
constexpr float kAdamEpsilon = 1e-8f;
constexpr int kStepsPerCheck = 20;
// The weight of the output's change beside the divergence of attention, the authors' value.
constexpr double kOutputWeight = 1.0;

// History rows behind the rotation, before and after rounding.
struct Rounded {
  WindowRows exact;   // y = x R
  WindowRows stored;  // levels
  std::vector<Int2Group> groups;
};

Eigen::Index HistoryRows(const WindowRows& rows) { return rows.rows() - kSink - kExactTail; }

Rounded RoundHistory(const WindowRows& rows, const WindowRows& rotation, float clip) {
  Rounded rounded;
  rounded.exact.noalias() = rows.middleRows(kSink, HistoryRows(rows)) * rotation;
  rounded.stored.resizeLike(rounded.exact);
  const Eigen::Index size = std::min(kInt2Group, rotation.cols());
  for (Eigen::Index row = 0; row < rounded.exact.rows(); ++row) {
    for (Eigen::Index begin = 0; begin < rotation.cols(); begin += size) {
      const auto values = rounded.exact.row(row).segment(begin, size);
      const Int2Group& group = rounded.groups.emplace_back(Int2Group::Of(values, clip));
      for (Eigen::Index j = 0; j < size; ++j) {
        rounded.stored(row, begin + j) =
            group.minimum + group.step * static_cast<float>(group.Code(values[j]));
      }
    }
  }
  return rounded;
}

// Turns the gradient by one group's levels into that by its values: a level is the clipped value
// plus a constant number of steps, and the threshold is constant too. A value at the threshold
// moves in one direction only, so it gets half.
void BackThroughRounding(const Eigen::Ref<const Eigen::RowVectorXf>& exact,
                         const Eigen::Ref<const Eigen::RowVectorXf>& stored, const Int2Group& group,
                         Eigen::Ref<Eigen::RowVectorXf> gradient) {
  float by_step = 0.0f;
  for (Eigen::Index j = 0; j < exact.size(); ++j) {
    by_step += gradient[j] * (stored[j] - group.Clipped(exact[j])) / group.step;
  }
  Eigen::Index least = 0, most = 0;
  exact.minCoeff(&least);
  exact.maxCoeff(&most);
  gradient[most] += by_step / 3.0f;
  gradient[least] -= by_step / 3.0f;
  for (Eigen::Index j = 0; j < exact.size(); ++j) {
    const float magnitude = std::abs(exact[j]);
    if (magnitude > group.threshold) gradient[j] = 0.0f;
    if (magnitude == group.threshold) gradient[j] *= 0.5f;
  }
}

// Adds the gradient by R to `gradient` that reaches R by y = x R, given that by the levels.
void BackThroughRotation(const WindowRows& rows, const Rounded& rounded, WindowRows by_levels,
                         WindowRows& gradient) {
  const Eigen::Index dim = by_levels.cols(), size = std::min(kInt2Group, dim);
  size_t group = 0;
  for (Eigen::Index row = 0; row < by_levels.rows(); ++row) {
    for (Eigen::Index begin = 0; begin < dim; begin += size) {
      BackThroughRounding(rounded.exact.row(row).segment(begin, size),
                          rounded.stored.row(row).segment(begin, size), rounded.groups[group++],
                          by_levels.row(row).segment(begin, size));
    }
  }
  gradient.noalias() += rows.middleRows(kSink, by_levels.rows()).transpose() * by_levels;
}

// Replaces logits by their softmax. Row r is a query that sees all but the last rows - 1 - r keys.
void Softmax(WindowRows& logits) {
  for (Eigen::Index row = 0; row < logits.rows(); ++row) {
    const Eigen::Index hidden = logits.rows() - 1 - row;
    auto seen = logits.row(row).head(logits.cols() - hidden);
    seen = (seen.array() - seen.maxCoeff()).exp();
    seen /= seen.sum();
    logits.row(row).tail(hidden).setZero();
  }
}

double Divergence(const WindowRows& from, const WindowRows& to) {
  // The least probability whose logarithm is taken.
  constexpr float kLeast = 1e-12f;
  const auto logs = from.array().max(kLeast).log() - to.array().max(kLeast).log();
  return (from.array() * logs).cast<double>().sum();
}

}  // namespace

WindowRows AttentionWeightsOf(const WindowRows& queries, const WindowRows& keys,
                              float logit_scale) {
  WindowRows weights = queries * keys.transpose() * logit_scale;
  Softmax(weights);
  return weights;
}

WindowRows StoredRows(const WindowRows& rows, const WindowRows& rotation, float clip) {
  WindowRows stored = rows;
  stored.middleRows(kSink, HistoryRows(rows)) =
      RoundHistory(rows, rotation, clip).stored * rotation.transpose();
  return stored;
}

double KeyLoss(const OptrSequence& sequence, const OptrOutput& output, const WindowRows& rotation,
               float clip, WindowRows* gradient) {
  const Rounded rounded = RoundHistory(sequence.keys, rotation, clip);
  const Eigen::Index history = rounded.stored.rows();
  const auto heads = static_cast<double>(sequence.queries.size());
  WindowRows by_levels = WindowRows::Zero(history, rotation.cols());
  double loss = 0.0;
  for (size_t head = 0; head < sequence.queries.size(); ++head) {
    const WindowRows& queries = sequence.queries[head];
    const WindowRows& exact = sequence.attention[head];
    const double terms = heads * static_cast<double>(queries.rows());
    // A stored key is z R', so its logit is that of the rotated query with z.
    const WindowRows rotated = queries * rotation;
    WindowRows weights(queries.rows(), sequence.keys.rows());
    weights.leftCols(kSink).noalias() = queries * sequence.keys.topRows(kSink).transpose();
    weights.middleCols(kSink, history).noalias() = rotated * rounded.stored.transpose();
    weights.rightCols(kExactTail).noalias() =
        queries * sequence.keys.bottomRows(kExactTail).transpose();
    weights *= output.logit_scale;
    Softmax(weights);
    const WindowRows change = (weights - exact) * sequence.values;
    const WindowRows by_change = change * output.grams[head];
    loss += Divergence(exact, weights) / terms;
    loss += kOutputWeight * change.cwiseProduct(by_change).cast<double>().sum() / terms;
    if (gradient == nullptr) continue;
    // The divergence has the gradient p' - p by the logits; the output's goes through the softmax.
    const WindowRows by_weights =
        by_change * sequence.values.transpose() * static_cast<float>(2.0 * kOutputWeight);
    const Eigen::VectorXf mean = by_weights.cwiseProduct(weights).rowwise().sum();
    WindowRows by_logits = (weights - exact) + weights.cwiseProduct(by_weights.colwise() - mean);
    by_logits *= output.logit_scale / static_cast<float>(terms);
    const auto by_history = by_logits.middleCols(kSink, history);
    by_levels.noalias() += by_history.transpose() * rotated;
    gradient->noalias() += queries.transpose() * (by_history * rounded.stored);
  }
  if (gradient != nullptr) {
    BackThroughRotation(sequence.keys, rounded, std::move(by_levels), *gradient);
  }
  return loss;
}

double ValueLoss(const OptrSequence& sequence, const OptrOutput& output, const WindowRows& rotation,
                 float clip, WindowRows* gradient) {
  const Rounded rounded = RoundHistory(sequence.values, rotation, clip);
  const Eigen::Index history = rounded.stored.rows();
  const auto exact = sequence.values.middleRows(kSink, history);
  WindowRows by_levels = WindowRows::Zero(history, rotation.cols());
  double loss = 0.0;
  for (size_t head = 0; head < sequence.attention.size(); ++head) {
    const auto weights = sequence.attention[head].middleCols(kSink, history);
    const double terms =
        static_cast<double>(sequence.attention.size()) * static_cast<double>(weights.rows());
    const WindowRows levels = weights * rounded.stored;
    const WindowRows change = levels * rotation.transpose() - weights * exact;
    const WindowRows by_change = change * output.grams[head];
    loss += change.cwiseProduct(by_change).cast<double>().sum() / terms;
    if (gradient == nullptr) continue;
    const WindowRows by_output = by_change * static_cast<float>(2.0 / terms);
    by_levels.noalias() += weights.transpose() * (by_output * rotation);
    gradient->noalias() += by_output.transpose() * levels;
  }
  if (gradient != nullptr) {
    BackThroughRotation(sequence.values, rounded, std::move(by_levels), *gradient);
  }
  return loss;
}

namespace {

// Adam over the skew matrices A of R exp(A), taken again at every R. The exponential is the Cayley
// transform, which is orthogonal for every A.
class SkewAdam {
 public:
  SkewAdam(Eigen::Index dim, float rate)
      : rate_(rate), first_(WindowRows::Zero(dim, dim)), second_(WindowRows::Zero(dim, dim)) {}

  WindowRows Step(const WindowRows& rotation, const WindowRows& gradient) {
    const WindowRows product = rotation.transpose() * gradient;
    const WindowRows skew = product - product.transpose();
    first_ = kMomentum * first_ + (1.0f - kMomentum) * skew;
    second_ = kVarianceDecay * second_ + (1.0f - kVarianceDecay) * skew.cwiseAbs2();
    ++steps_;
    const float bias_first = 1.0f - std::pow(kMomentum, steps_);
    const float bias_second = 1.0f - std::pow(kVarianceDecay, steps_);
    // A generator and its negative transpose both move, as in exp(A - A').
    const Eigen::MatrixXd half = (-rate_ / bias_first * first_.array() /
                                  ((second_.array() / bias_second).sqrt() + kAdamEpsilon))
                                     .matrix()
                                     .cast<double>();
    const auto identity = Eigen::MatrixXd::Identity(half.rows(), half.cols());
    const Eigen::MatrixXd turn = (identity - half).partialPivLu().solve(identity + half);
    return (rotation.cast<double>() * turn).cast<float>();
  }

 private:
  const float rate_;
  WindowRows first_, second_;
  float steps_ = 0.0f;
};

}  // namespace

WindowRows LearnRotation(const WindowRows& base, int learned, int held, const OptrLoss& loss,
                         const OptrOptions& options) {
  const auto held_loss = [&](const WindowRows& rotation) {
    double sum = 0.0;
    for (int i = 0; i < held; ++i) sum += loss(learned + i, rotation, nullptr);
    return sum;
  };
  WindowRows rotation = base, best = base;
  double least = held_loss(base);
  SkewAdam adam(base.rows(), options.rate);
  for (int step = 0; step < options.steps; ++step) {
    WindowRows gradient = WindowRows::Zero(base.rows(), base.cols());
    for (int i = 0; i < options.step_sequences; ++i) {
      loss((step * options.step_sequences + i) % learned, rotation, &gradient);
    }
    rotation = adam.Step(rotation, gradient);
    if ((step + 1) % kStepsPerCheck != 0 && step + 1 != options.steps) continue;
    const double now = held_loss(rotation);
    if (now < least) {
      least = now;
      best = rotation;
    }
  }
  return best;
}

namespace {

WindowRows HeadRows(const kernels::Bf16* rows, int tokens, int heads, int head, int dim) {
  WindowRows own(tokens, dim);
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < dim; ++i) {
      own(t, i) = kernels::Bf16ToFloat(rows[(int64_t{t} * heads + head) * dim + i]);
    }
  }
  return own;
}

// The sequences of all (layer, KV head) pairs, and the keys' means over the tokens behind the sink.
struct OptrData {
  std::vector<std::vector<OptrSequence>> sequences;  // [layers * kv_heads]
  std::vector<Eigen::RowVectorXd> key_sums;          // [layers * kv_heads]
  std::vector<int64_t> key_tokens;
};

absl::StatusOr<OptrData> Collect(calibration::ActivationSource& source,
                                 const OptrOptions& options) {
  const calibration::ModelShape& shape = source.shape();
  const int heads = shape.kv_heads, dim = shape.head_dim, group = shape.q_heads / heads;
  OptrData data;
  data.sequences.resize(size_t{1} * shape.layers * heads);
  data.key_sums.assign(data.sequences.size(), Eigen::RowVectorXd::Zero(dim));
  data.key_tokens.assign(data.sequences.size(), 0);
  CRUMB_RETURN_IF_ERROR(source.ForEach(
      0, shape.layers, [&](const calibration::SequenceActivations& from) -> absl::Status {
        if (from.tokens <= kSink + kExactTail + options.queries) {
          return absl::InvalidArgumentError(
              fmt::format("optr: calibration sequences of {} tokens have too little history; use "
                          "a longer --context",
                          from.tokens));
        }
        for (int head = 0; head < heads; ++head) {
          const size_t item = size_t{1} * from.layer * heads + head;
          OptrSequence own{.keys = HeadRows(from.k, from.tokens, heads, head, dim),
                           .values = {},
                           .queries = {},
                           .attention = {}};
          data.key_sums[item] +=
              own.keys.bottomRows(from.tokens - kSink).cast<double>().colwise().sum();
          data.key_tokens[item] += from.tokens - kSink;
          if (static_cast<int>(data.sequences[item].size()) >= options.learned + options.held) {
            continue;
          }
          own.values = HeadRows(from.v, from.tokens, heads, head, dim);
          for (int g = 0; g < group; ++g) {
            own.queries.push_back(
                HeadRows(from.q, from.tokens, shape.q_heads, head * group + g, dim)
                    .bottomRows(options.queries));
          }
          data.sequences[item].push_back(std::move(own));
        }
        return absl::OkStatus();
      }));
  return data;
}

WindowRows RotationOf(const std::vector<float>& rotations, const RotationFile& file, int layer,
                      int head) {
  const int64_t dim = file.head_dim;
  const int64_t item = int64_t{layer} * file.kv_heads + (file.kv_heads == 1 ? 0 : head);
  return Eigen::Map<const WindowRows>(rotations.data() + item * dim * dim, dim, dim);
}

// Attention of all sequences over keys as they are, or as they are stored with a rotation.
void SetAttention(std::vector<OptrSequence>& sequences, float logit_scale,
                  const WindowRows* rotation, float clip) {
  for (OptrSequence& sequence : sequences) {
    const WindowRows keys =
        rotation == nullptr ? sequence.keys : StoredRows(sequence.keys, *rotation, clip);
    sequence.attention.clear();
    for (const WindowRows& queries : sequence.queries) {
      sequence.attention.push_back(AttentionWeightsOf(queries, keys, logit_scale));
    }
  }
}

// Learns the rotation of keys, then that of values behind those keys.
void LearnHead(std::vector<OptrSequence>& sequences, const OptrOutput& output,
               const OptrOptions& options, RotatedInt2::Transform& k, RotatedInt2::Transform& v) {
  const int count = static_cast<int>(sequences.size());
  const int held = std::clamp(count / 3, 1, options.held);
  const int learned = std::min(count - held, options.learned);
  for (OptrSequence& sequence : sequences) sequence.keys.rowwise() -= k.mean;
  SetAttention(sequences, output.logit_scale, nullptr, 0.0f);
  k.rotation = LearnRotation(
      k.rotation, learned, held,
      [&](int index, const WindowRows& rotation, WindowRows* gradient) {
        return KeyLoss(sequences[index], output, rotation, k.clip, gradient);
      },
      options);
  SetAttention(sequences, output.logit_scale, &k.rotation, k.clip);
  v.rotation = LearnRotation(
      v.rotation, learned, held,
      [&](int index, const WindowRows& rotation, WindowRows* gradient) {
        return ValueLoss(sequences[index], output, rotation, v.clip, gradient);
      },
      options);
}

}  // namespace

absl::StatusOr<std::vector<std::shared_ptr<const WindowCodec>>> LearnOptr(
    calibration::ActivationSource& source, const RotationFile& oscar, const OutputGrams& grams,
    const calibration::ParallelFor& parallel_for, const OptrOptions& options) {
  const calibration::ModelShape& shape = source.shape();
  const int heads = shape.kv_heads, group = shape.q_heads / heads;
  CRUMB_ASSIGN_OR_RETURN(OptrData data, Collect(source, options));
  if (options.steps > 0 && data.sequences.front().size() < 2) {
    return absl::InvalidArgumentError(
        "optr: one calibration sequence to learn from and another to choose by are needed; give "
        "more calibration text or a larger --calibration-tokens");
  }
  std::vector<std::vector<Eigen::MatrixXf>> layer_grams;
  for (int layer = 0; layer < shape.layers; ++layer) {
    CRUMB_ASSIGN_OR_RETURN(layer_grams.emplace_back(), grams(layer));
  }
  std::vector<std::shared_ptr<const WindowCodec>> codecs(data.sequences.size());
  parallel_for(static_cast<int>(codecs.size()), [&](int item) {
    const int layer = item / heads, head = item % heads;
    const auto first = layer_grams[layer].begin() + head * group;
    const OptrOutput output{.grams = {first, first + group},
                            .logit_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim))};
    const double tokens = static_cast<double>(data.key_tokens[item]);
    RotatedInt2::Transform k{.rotation = RotationOf(oscar.rotation_k, oscar, layer, head),
                             .mean = (data.key_sums[item] / tokens).cast<float>(),
                             .clip = oscar.clip_k};
    RotatedInt2::Transform v{.rotation = RotationOf(oscar.rotation_v, oscar, layer, head),
                             .mean = Eigen::RowVectorXf::Zero(shape.head_dim),
                             .clip = oscar.clip_v};
    if (options.steps > 0) LearnHead(data.sequences[item], output, options, k, v);
    codecs[item] = std::make_shared<RotatedInt2>(std::move(k), std::move(v));
  });
  return codecs;
}

}  // namespace crumb::bench
