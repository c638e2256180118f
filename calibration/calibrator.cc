// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/calibrator.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "calibration/eigenbasis.h"
#include "calibration/head_moments.h"
#include "calibration/mass_shift.h"
#include "common/status_macros.h"

namespace crumb::calibration {
namespace {

constexpr int kSinkTokens = 64;
constexpr int kPageTokens = 64;
constexpr int kTokensPerDimension = 4;  // least number of calibration tokens per channel

void AppendMatrix(const Eigen::MatrixXd& matrix, std::vector<float>& out) {
  for (Eigen::Index i = 0; i < matrix.rows(); ++i) {
    for (Eigen::Index j = 0; j < matrix.cols(); ++j) {
      out.push_back(static_cast<float>(matrix(i, j)));
    }
  }
}

class Calibrator {
 public:
  Calibrator(ActivationSource& source, const CalibrationOptions& options,
             const CalibrationProgress& progress)
      : source_(source),
        shape_(source.shape()),
        options_(options),
        progress_(progress),
        crumb_(options.method == kernels::Method::kCrumb),
        pairs_(crumb_ ? shape_.rotary : HalfSplitPairs(shape_.head_dim, {})),
        begin_(crumb_ ? kSinkTokens : 0) {}

  absl::StatusOr<RotationFile> Run() {
    CRUMB_RETURN_IF_ERROR(CheckOptions());
    DescribeFile();
    CRUMB_RETURN_IF_ERROR(Gather());
    CRUMB_RETURN_IF_ERROR(CheckCounts());
    MakeCovariances();
    CRUMB_RETURN_IF_ERROR(Walk([this](const SequenceActivations& s) { return AddValues(s); }));
    WriteBases();
    if (crumb_) {
      WriteMeans();
      MassShift shift(shape_, file_);
      CRUMB_RETURN_IF_ERROR(Walk([&](const SequenceActivations& s) { return shift.Add(s); }));
      file_.shift = shift.Shifts();
    }
    return std::move(file_);
  }

 private:
  size_t heads() const { return static_cast<size_t>(shape_.layers) * shape_.kv_heads; }
  size_t HeadAt(int layer, int head) const {
    return static_cast<size_t>(layer) * shape_.kv_heads + head;
  }

  absl::Status CheckOptions() const {
    if (!std::has_single_bit(static_cast<unsigned>(shape_.head_dim))) {
      return absl::InvalidArgumentError(
          "calibration needs a head_dim that is a power of two, not " +
          std::to_string(shape_.head_dim));
    }
    if (crumb_ && options_.positions <= kSinkTokens) {
      return absl::InvalidArgumentError("calibration for " + std::to_string(options_.positions) +
                                        " positions: more than the sink's 64 are needed");
    }
    return absl::OkStatus();
  }

  void DescribeFile() {
    file_.method = std::string(kernels::MethodName(options_.method));
    file_.model = shape_.name;
    file_.layers = shape_.layers;
    file_.kv_heads = crumb_ ? shape_.kv_heads : 1;
    file_.head_dim = shape_.head_dim;
    file_.clip_k = options_.clip_k;
    file_.clip_v = options_.clip_v;
    file_.rope = shape_.rope;
    if (!crumb_) return;
    file_.q_heads = shape_.q_heads;
    file_.positions = options_.positions;
    const int pages = (options_.positions - kSinkTokens + kPageTokens - 1) / kPageTokens;
    file_.pages_per_position_block =
        (pages + options_.position_blocks - 1) / options_.position_blocks;
    file_.position_blocks =
        (pages + file_.pages_per_position_block - 1) / file_.pages_per_position_block;
  }

  // Walks the source once; every walk is one of `passes` equal parts of the work.
  absl::Status Walk(const ActivationSource::Visitor& visit) {
    const int passes = crumb_ ? 3 : 2;
    int64_t visited = 0;
    const absl::Status status = source_.ForEach([&](const SequenceActivations& sequence) {
      CRUMB_RETURN_IF_ERROR(visit(sequence));
      ++visited;
      if (pass_ == 0) {
        visits_ = visited;  // how many there are shows at the end of the first walk
      } else if (progress_) {
        progress_((pass_ + static_cast<double>(visited) / static_cast<double>(visits_)) / passes);
      }
      return absl::OkStatus();
    });
    ++pass_;
    return status;
  }

  absl::Status Gather() {
    moments_.assign(heads(), HeadMoments(shape_.head_dim));
    return Walk([this](const SequenceActivations& sequence) {
      for (int head = 0; head < shape_.kv_heads; ++head) {
        CRUMB_RETURN_IF_ERROR(
            moments_[HeadAt(sequence.layer, head)].Add(shape_, pairs_, sequence, head, begin_));
      }
      return absl::OkStatus();
    });
  }

  absl::Status CheckCounts() {
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const int64_t tokens = moments_[HeadAt(layer, 0)].tokens();
      if (tokens < int64_t{kTokensPerDimension} * shape_.head_dim) {
        return absl::InvalidArgumentError("layer " + std::to_string(layer) + ": only " +
                                          std::to_string(tokens) + " calibration tokens, " +
                                          std::to_string(kTokensPerDimension * shape_.head_dim) +
                                          " are needed");
      }
      file_.tokens = tokens;
    }
    return absl::OkStatus();
  }

  // Query covariances after RoPE per KV head, over the serving positions.
  void MakeCovariances() {
    for (const HeadMoments& moments : moments_) {
      const Eigen::MatrixXd moment = moments.query_moment();
      covariance_k_.push_back(
          crumb_ ? MomentOverPositions(pairs_, moment, kSinkTokens, options_.positions) : moment);
    }
    covariance_v_.assign(heads(), Eigen::MatrixXd::Zero(shape_.head_dim, shape_.head_dim));
    weight_v_.assign(heads(), 0.0);
  }

  // Values weighted by the expected square of their key's score.
  absl::Status AddValues(const SequenceActivations& sequence) {
    for (int head = 0; head < shape_.kv_heads; ++head) {
      const size_t at = HeadAt(sequence.layer, head);
      CRUMB_ASSIGN_OR_RETURN(const Eigen::MatrixXf k, KeyRows(shape_, sequence, head, begin_));
      CRUMB_ASSIGN_OR_RETURN(const Eigen::MatrixXf v, ValueRows(shape_, sequence, head, begin_));
      const Eigen::MatrixXf scored = k * covariance_k_[at].cast<float>();
      const Eigen::VectorXf weight = scored.cwiseProduct(k).rowwise().sum().cwiseMax(0.0f);
      covariance_v_[at] += (v.transpose() * weight.asDiagonal() * v).cast<double>();
      weight_v_[at] += weight.cast<double>().sum();
    }
    return absl::OkStatus();
  }

  // The covariance a file's head stands for: one KV head's, or the layer's mean.
  Eigen::MatrixXd FileCovariance(const std::vector<Eigen::MatrixXd>& covariances, int layer,
                                 int head) const {
    if (crumb_) return covariances[HeadAt(layer, head)];
    Eigen::MatrixXd sum = covariances[HeadAt(layer, 0)];
    for (int h = 1; h < shape_.kv_heads; ++h) sum += covariances[HeadAt(layer, h)];
    return sum / shape_.kv_heads;
  }

  void WriteBases() {
    for (size_t at = 0; at < heads(); ++at) {
      covariance_v_[at] /= std::max(weight_v_[at], 1e-12);
    }
    for (int layer = 0; layer < shape_.layers; ++layer) {
      for (int head = 0; head < file_.kv_heads; ++head) {
        const Eigen::MatrixXd covariance = FileCovariance(covariance_k_, layer, head);
        const Eigenbasis k = MakeEigenbasis(covariance);
        const Eigenbasis v = MakeEigenbasis(FileCovariance(covariance_v_, layer, head));
        AppendMatrix(k.rotation, file_.rotation_k);
        AppendMatrix(v.rotation, file_.rotation_v);
        AppendMatrix(covariance, file_.covariance_k);
        AppendMatrix(k.eigenvalues, file_.eigenvalues_k);
        AppendMatrix(v.eigenvalues, file_.eigenvalues_v);
        if (crumb_) {
          AppendMatrix(FeedbackFactor(covariance, k.rotation, options_.damp, nullptr),
                       file_.feedback_k);
        }
      }
    }
  }

  void WriteMeans() {
    const int block_tokens = file_.pages_per_position_block * kPageTokens;
    for (const HeadMoments& moments : moments_) {
      const Eigen::VectorXd mean = moments.key_mean();
      for (int block = 0; block < file_.position_blocks; ++block) {
        const int begin = kSinkTokens + block * block_tokens;
        const int end = std::min(begin + block_tokens, options_.positions);
        AppendMatrix(MeanOverPositions(pairs_, mean, begin, end), file_.mean_k);
      }
      AppendMatrix(moments.value_mean(), file_.mean_v);
    }
  }

  ActivationSource& source_;
  const ModelShape& shape_;
  const CalibrationOptions& options_;
  const CalibrationProgress& progress_;
  const bool crumb_;
  const RotaryPairs pairs_;
  const int begin_;  // first position that counts
  RotationFile file_;
  std::vector<HeadMoments> moments_;
  std::vector<Eigen::MatrixXd> covariance_k_;  // [layers * kv_heads]
  std::vector<Eigen::MatrixXd> covariance_v_;
  std::vector<double> weight_v_;
  int pass_ = 0;
  int64_t visits_ = 0;
};

}  // namespace

CalibrationOptions DefaultCalibration(kernels::Method method) {
  CalibrationOptions options;
  options.method = method;
  options.clip_k = method == kernels::Method::kCrumb ? 0.92f : 0.96f;
  options.clip_v = 0.92f;
  return options;
}

absl::StatusOr<RotationFile> Calibrate(ActivationSource& source, const CalibrationOptions& options,
                                       const CalibrationProgress& progress) {
  return Calibrator(source, options, progress).Run();
}

absl::StatusOr<RotationFile> HadamardRotations(int head_dim) {
  if (head_dim < 1 || !std::has_single_bit(static_cast<unsigned>(head_dim))) {
    return absl::InvalidArgumentError("a Hadamard rotation needs a power of two, head_dim is " +
                                      std::to_string(head_dim));
  }
  RotationFile file;
  file.method = "hadamard";
  file.layers = file.kv_heads = 1;
  file.head_dim = head_dim;
  const CalibrationOptions defaults = DefaultCalibration(kernels::Method::kHadamard);
  file.clip_k = defaults.clip_k;
  file.clip_v = defaults.clip_v;
  AppendMatrix(HadamardMatrix(head_dim), file.rotation_k);
  file.rotation_v = file.rotation_k;
  return file;
}

}  // namespace crumb::calibration
