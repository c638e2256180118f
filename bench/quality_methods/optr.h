// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Dense>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/quality_methods/rotated_int2.h"
#include "bench/quality_methods/window_codecs.h"
#include "calibration/activation_source.h"
#include "calibration/calibrator.h"
#include "common/rotation_file.h"

// OptR (Yun et al., 2026, arXiv 2608.02691): rotations of OSCAR, one per KV head, that are turned
// so that the attention output behind o_proj changes least, and keys without their mean, which
// leaves the softmax as it is. The gradient of the loss passes the rounding as if it were not
// there.
namespace crumb::bench {

// One calibration sequence of one KV head.
struct OptrSequence {
  WindowRows keys;    // [tokens, head_dim], without their mean
  WindowRows values;  // [tokens, head_dim]
  // The last tokens' rows of every query head of the group: [queries, head_dim].
  std::vector<WindowRows> queries;
  // The attention weights of those queries, for every query head: [queries, tokens]. KeyLoss takes
  // the exact ones, ValueLoss those of the quantized keys.
  std::vector<WindowRows> attention;
};

// The layer's output as the losses of one KV head see it.
struct OptrOutput {
  // W_o,h' W_o,h / hidden size, for every query head.
  std::vector<Eigen::MatrixXf> grams;
  float logit_scale = 0.0f;  // 1 / sqrt(head_dim)
};

// Returns the attention weights of one query head; `queries` are those of the last tokens, each of
// which attends itself and the tokens before it.
WindowRows AttentionWeightsOf(const WindowRows& queries, const WindowRows& keys, float logit_scale);

// Returns the rows as a cache holds them: sink 64 and the last 256 as they are, history stored by
// RotatedInt2 with this rotation and clip, with steps and minimums in fp32.
WindowRows StoredRows(const WindowRows& rows, const WindowRows& rotation, float clip);

// Returns the mean over query heads and queries of the divergence of the attention with stored keys
// from the exact one plus the mean square of the output's change behind o_proj, with exact values.
// Adds the gradient by the rotation to `gradient` unless it is null.
double KeyLoss(const OptrSequence& sequence, const OptrOutput& output, const WindowRows& rotation,
               float clip, WindowRows* gradient);

// Returns the mean square of the output's change behind o_proj by stored values.
double ValueLoss(const OptrSequence& sequence, const OptrOutput& output, const WindowRows& rotation,
                 float clip, WindowRows* gradient);

// The loss of sequence `index` at a rotation; adds its gradient unless `gradient` is null.
using OptrLoss = std::function<double(int index, const WindowRows& rotation, WindowRows* gradient)>;

struct OptrOptions {
  int steps = 80;          // the authors' number; 0: the mean only, OSCAR's rotations as they are
  float rate = 0.02f;      // Adam's step, the authors' value
  int step_sequences = 2;  // sequences of one step's gradient, taken in turn
  int learned = 8;         // most sequences to learn from
  int held = 4;            // most others that choose the best rotation
  int queries = 64;        // queries of each sequence, the authors' number
};

// Turns `base` by Adam over the skew matrices, and returns the rotation with the least mean loss on
// the held-out sequences [learned, learned + held) among the base and every 20th step's.
WindowRows LearnRotation(const WindowRows& base, int learned, int held, const OptrLoss& loss,
                         const OptrOptions& options);

// Returns W_o,h' W_o,h / hidden size of every query head of a layer.
using OutputGrams = std::function<absl::StatusOr<std::vector<Eigen::MatrixXf>>(int layer)>;

// Learns on the sequences of `source` and returns a codec for each (layer, KV head). `oscar` has
// the rotations and clips to begin with. kInvalidArgument: there are fewer than two sequences, or
// sequences have no history.
absl::StatusOr<std::vector<std::shared_ptr<const WindowCodec>>> LearnOptr(
    calibration::ActivationSource& source, const RotationFile& oscar, const OutputGrams& grams,
    const calibration::ParallelFor& parallel_for, const OptrOptions& options);

}  // namespace crumb::bench
