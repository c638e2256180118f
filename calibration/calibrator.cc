// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/calibrator.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "calibration/eigenbasis.h"
#include "calibration/head_moments.h"
#include "calibration/history_windows.h"
#include "common/status_macros.h"

namespace crumb::calibration {
namespace {

// The least number of windows for an expected error: the quality watch averages as many.
constexpr int kWindowsMin = 32;

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
    ReserveArrays();
    MassShift shift(shape_, file_);
    ExpectedError error(shape_, file_);
    const int step = std::clamp(source_.layers_per_walk(), 1, shape_.layers);
    for (first_ = 0; first_ < shape_.layers; first_ += step) {
      count_ = std::min(step, shape_.layers - first_);
      CRUMB_RETURN_IF_ERROR(RunLayers(shift, error));
    }
    if (crumb_) file_.shift = shift.Shifts();
    file_.attention_error = error.Errors(kWindowsMin);
    WarnOfFewWindows(error.windows());
    return std::move(file_);
  }

 private:
  bool whitens_k() const { return crumb_ && options_.whitening_k > 0.0; }
  bool whitens_v() const {
    return crumb_ && options_.whitening_v > 0.0 && options_.value_hessians != nullptr;
  }
  // Walks over the source: moments, weighted values for orthogonal bases, errors.
  int walks() const { return whitens_v() ? 2 : 3; }
  size_t heads() const { return static_cast<size_t>(count_) * shape_.kv_heads; }
  size_t HeadAt(int layer, int head) const {
    return static_cast<size_t>(layer - first_) * shape_.kv_heads + head;
  }

  // Calibrates layers [first_, first_ + count_).
  absl::Status RunLayers(MassShift& shift, ExpectedError& error) {
    CRUMB_RETURN_IF_ERROR(Gather());
    CRUMB_RETURN_IF_ERROR(CheckCounts());
    MakeCovariances();
    if (!whitens_v()) {
      CRUMB_RETURN_IF_ERROR(
          WalkHeads([this](const SequenceActivations& s, int head) { return AddValues(s, head); }));
    }
    CRUMB_RETURN_IF_ERROR(WriteBases());
    if (crumb_) WriteMeans();
    return WalkHeads([&](const SequenceActivations& s, int head) -> absl::Status {
      if (crumb_) CRUMB_RETURN_IF_ERROR(shift.Add(s, head));
      return error.Add(s, head);
    });
  }

  void WarnOfFewWindows(int64_t windows) const {
    if (!options_.warn || windows >= kWindowsMin) return;
    const std::string lacks =
        crumb_ && windows == 0
            ? "the mass shift could not be measured and is 0, and the file has no "
              "expected attention error"
            : "the file has no expected attention error";
    options_.warn("only " + std::to_string(windows) + " windows to measure on, " +
                  std::to_string(kWindowsMin) + " are needed: " + lacks +
                  ". Calibrate on more sequences of at least " + std::to_string(kMeasuredTokens) +
                  " tokens (64 more for each further window)");
  }

  void InParallel(int count, const std::function<void(int)>& body) const {
    if (options_.parallel_for) return options_.parallel_for(count, body);
    for (int i = 0; i < count; ++i) body(i);
  }

  absl::Status CheckOptions() const {
    for (const double whitening : {options_.whitening_k, options_.whitening_v}) {
      if (whitening >= 0.0 && whitening <= 1.0) continue;
      return absl::InvalidArgumentError("a whitening is " + std::to_string(whitening) +
                                        "; it is an exponent from 0 to 1");
    }
    if (!(options_.query_floor >= 0.0 && options_.query_floor <= 1000.0)) {
      return absl::InvalidArgumentError("the query floor is " +
                                        std::to_string(options_.query_floor) +
                                        "; it lies between 0 and 1,000");
    }
    if (!std::has_single_bit(static_cast<unsigned>(shape_.head_dim))) {
      return absl::InvalidArgumentError(
          "calibration needs a head_dim that is a power of two, not " +
          std::to_string(shape_.head_dim));
    }
    if (crumb_ && options_.positions <= kSinkTokens) {
      return absl::InvalidArgumentError(
          "calibration for " + std::to_string(options_.positions) +
          " positions is not possible: more than the 64 of the sink are needed");
    }
    return absl::OkStatus();
  }

  void DescribeFile() {
    file_.method = std::string(kernels::MethodName(options_.method));
    file_.model = shape_.name;
    file_.layers = shape_.layers;
    file_.layer_ids = shape_.layer_ids;
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

  // Reserves the arrays of all layers, because growing arrays take up to three times their size.
  void ReserveArrays() {
    const size_t dim = shape_.head_dim;
    const size_t matrices = static_cast<size_t>(shape_.layers) * file_.kv_heads * dim * dim;
    for (auto* array :
         {&file_.rotation_k, &file_.rotation_v, &file_.covariance_k, &file_.covariance_v}) {
      array->reserve(matrices);
    }
    if (crumb_) file_.feedback_k.reserve(matrices);
    if (crumb_ && options_.value_hessians) file_.feedback_v.reserve(matrices);
    if (whitens_k()) file_.dual_k.reserve(matrices);
    if (whitens_v()) file_.dual_v.reserve(matrices);
  }

  // Walks layers [first_, first_ + count_) of the source once.
  absl::Status Walk(const ActivationSource::Visitor& visit) {
    return source_.ForEach(first_, count_, [&](const SequenceActivations& sequence) {
      CRUMB_RETURN_IF_ERROR(visit(sequence));
      ++visited_;
      const double all = static_cast<double>(source_.visits()) * walks();
      if (progress_) progress_(static_cast<double>(visited_) / all);
      return absl::OkStatus();
    });
  }

  // Walks the same layers and visits every KV head of every sequence, heads in parallel.
  using HeadVisitor = std::function<absl::Status(const SequenceActivations&, int head)>;
  absl::Status WalkHeads(const HeadVisitor& visit) {
    return Walk([&](const SequenceActivations& sequence) { return VisitHeads(sequence, visit); });
  }
  absl::Status VisitHeads(const SequenceActivations& sequence, const HeadVisitor& visit) {
    std::vector<absl::Status> statuses(shape_.kv_heads);
    InParallel(shape_.kv_heads, [&](int head) { statuses[head] = visit(sequence, head); });
    for (const absl::Status& status : statuses) CRUMB_RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }

  // Returns the first token of a sequence that is part of the statistics.
  int BeginOf(const SequenceActivations& sequence) const {
    return std::max(0, begin_ - sequence.first_position);
  }

  // Checks tokens [0, end), which are not part of the statistics.
  absl::Status CheckFinite(const SequenceActivations& sequence, int head, int end) const {
    const int count = std::min(end, sequence.tokens);
    CRUMB_RETURN_IF_ERROR(QueryRows(shape_, sequence, head, 0, count).status());
    CRUMB_RETURN_IF_ERROR(KeyRows(shape_, sequence, head, 0, count).status());
    return ValueRows(shape_, sequence, head, 0, count).status();
  }

  absl::Status Gather() {
    moments_.assign(heads(), HeadMoments(shape_.head_dim));
    return Walk([this](const SequenceActivations& sequence) {
      const PositionRotations rotations(pairs_, sequence.first_position, sequence.tokens);
      return VisitHeads(sequence, [&](const SequenceActivations& s, int head) -> absl::Status {
        CRUMB_RETURN_IF_ERROR(CheckFinite(s, head, BeginOf(s)));
        return moments_[HeadAt(s.layer, head)].Add(shape_, rotations, s, head, BeginOf(s));
      });
    });
  }

  absl::Status CheckCounts() {
    for (int layer = first_; layer < first_ + count_; ++layer) {
      const int64_t tokens = moments_[HeadAt(layer, 0)].tokens();
      if (tokens < int64_t{kTokensPerDimension} * shape_.head_dim) {
        return absl::InvalidArgumentError(
            "layer " + std::to_string(shape_.LayerId(layer)) + ": only " + std::to_string(tokens) +
            " calibration tokens" + (crumb_ ? " behind position 64; " : "; ") +
            std::to_string(kTokensPerDimension * shape_.head_dim) + " are needed: give more text");
      }
      file_.tokens = layer == 0 ? tokens : std::min(file_.tokens, tokens);
    }
    return absl::OkStatus();
  }

  // Makes the query covariances after RoPE per KV head, over the serving positions.
  void MakeCovariances() {
    covariance_k_.assign(heads(), {});
    InParallel(static_cast<int>(heads()), [this](int i) {
      const Eigen::MatrixXd moment = moments_[i].query_moment();
      covariance_k_[i] =
          crumb_ ? MomentOverPositions(pairs_, moment, kSinkTokens, options_.positions) : moment;
    });
    covariance_v_.assign(heads(), Eigen::MatrixXd::Zero(shape_.head_dim, shape_.head_dim));
    weight_v_.assign(heads(), 0.0);
  }

  // Adds values, weighted by the expected square of their key's score.
  absl::Status AddValues(const SequenceActivations& sequence, int head) {
    const size_t at = HeadAt(sequence.layer, head);
    const Eigen::MatrixXf covariance = covariance_k_[at].cast<float>();
    return ForTokenBlocks(BeginOf(sequence), sequence.tokens, [&](int begin, int count) {
      return AddValueBlock(sequence, head, begin, count, covariance, at);
    });
  }
  absl::Status AddValueBlock(const SequenceActivations& sequence, int head, int begin, int count,
                             const Eigen::MatrixXf& covariance, size_t at) {
    CRUMB_ASSIGN_OR_RETURN(const Eigen::MatrixXf k, KeyRows(shape_, sequence, head, begin, count));
    CRUMB_ASSIGN_OR_RETURN(const Eigen::MatrixXf v,
                           ValueRows(shape_, sequence, head, begin, count));
    const Eigen::MatrixXf scored = k * covariance;
    const Eigen::VectorXf weight = scored.cwiseProduct(k).rowwise().sum().cwiseMax(0.0f);
    covariance_v_[at] += (v.transpose() * weight.asDiagonal() * v).cast<double>();
    weight_v_[at] += weight.cast<double>().sum();
    return absl::OkStatus();
  }

  // Returns the covariance for a head of the file: that of one KV head, or the mean of the layer.
  Eigen::MatrixXd FileCovariance(const std::vector<Eigen::MatrixXd>& covariances, int layer,
                                 int head) const {
    if (crumb_) return covariances[HeadAt(layer, head)];
    Eigen::MatrixXd sum = covariances[HeadAt(layer, 0)];
    for (int h = 1; h < shape_.kv_heads; ++h) sum += covariances[HeadAt(layer, h)];
    return sum / shape_.kv_heads;
  }

  // The matrices of one head of the file.
  struct HeadBases {
    Eigen::MatrixXd covariance_k, covariance_v;
    Eigenbasis k, v;
    Eigen::MatrixXd dual_k, dual_v;          // empty: the rotation is orthogonal
    Eigen::MatrixXd feedback_k, feedback_v;  // empty: none
  };

  absl::Status WriteBases() {
    for (size_t at = 0; at < heads(); ++at) {
      covariance_v_[at] /= std::max(weight_v_[at], 1e-12);
    }
    for (int layer = first_; layer < first_ + count_; ++layer) {
      std::vector<Eigen::MatrixXd> hessians;
      if (crumb_ && options_.value_hessians) {
        CRUMB_ASSIGN_OR_RETURN(hessians, options_.value_hessians(layer));
      }
      std::vector<HeadBases> bases(file_.kv_heads);
      InParallel(file_.kv_heads, [&](int head) {
        bases[head] = MakeBases(layer, head, hessians.empty() ? nullptr : &hessians[head]);
      });
      for (const HeadBases& head : bases) AppendBases(head);
    }
    return absl::OkStatus();
  }

  HeadBases MakeBases(int layer, int head, const Eigen::MatrixXd* hessian) const {
    HeadBases bases;
    MakeKeyBasis(layer, head, bases);
    MakeValueBasis(layer, head, hessian, bases);
    return bases;
  }

  void MakeKeyBasis(int layer, int head, HeadBases& bases) const {
    bases.covariance_k = FileCovariance(covariance_k_, layer, head);
    bases.k = MakeEigenbasis(bases.covariance_k);
    if (!crumb_) return;
    if (!whitens_k()) {
      bases.feedback_k = FeedbackAlone(bases.covariance_k, bases.k.rotation);
      return;
    }
    const Eigen::MatrixXd keys = MomentOverPositions(
        pairs_, moments_[HeadAt(layer, head)].key_covariance(), kSinkTokens, options_.positions);
    DualBasis basis = MakeDualBasis(bases.covariance_k, keys, options_.whitening_k);
    Eigen::MatrixXd weights = bases.covariance_k;
    weights.diagonal().array() += options_.query_floor * weights.diagonal().mean();
    bases.feedback_k = FeedbackFactor(weights, basis.dual, options_.damp, nullptr);
    bases.k.rotation = std::move(basis.rotation);
    bases.dual_k = std::move(basis.dual);
  }

  // A basis that whitens has the eigenvalues of the values' own covariance in the file.
  void MakeValueBasis(int layer, int head, const Eigen::MatrixXd* hessian, HeadBases& bases) const {
    if (!whitens_v()) {
      bases.covariance_v = FileCovariance(covariance_v_, layer, head);
      bases.v = MakeEigenbasis(bases.covariance_v);
      if (hessian != nullptr) bases.feedback_v = FeedbackAlone(*hessian, bases.v.rotation);
      return;
    }
    const Eigen::MatrixXd values = moments_[HeadAt(layer, head)].value_covariance();
    DualBasis basis = MakeDualBasis(*hessian, values, options_.whitening_v);
    bases.feedback_v = FeedbackFactor(*hessian, basis.dual, options_.damp, nullptr);
    bases.v.eigenvalues = MakeEigenbasis(values).eigenvalues;
    bases.v.rotation = std::move(basis.rotation);
    bases.dual_v = std::move(basis.dual);
  }

  // Returns feedback without the weights of a metric.
  Eigen::MatrixXd FeedbackAlone(const Eigen::MatrixXd& weights,
                                const Eigen::MatrixXd& basis) const {
    Eigen::MatrixXd feedback = FeedbackFactor(weights, basis, options_.damp, nullptr);
    feedback.diagonal().setZero();
    return feedback;
  }

  void AppendBases(const HeadBases& bases) {
    AppendMatrix(bases.k.rotation, file_.rotation_k);
    AppendMatrix(bases.v.rotation, file_.rotation_v);
    AppendMatrix(bases.dual_k, file_.dual_k);
    AppendMatrix(bases.dual_v, file_.dual_v);
    AppendMatrix(bases.covariance_k, file_.covariance_k);
    AppendMatrix(bases.covariance_v, file_.covariance_v);
    AppendMatrix(bases.k.eigenvalues, file_.eigenvalues_k);
    AppendMatrix(bases.v.eigenvalues, file_.eigenvalues_v);
    AppendMatrix(bases.feedback_k, file_.feedback_k);
    AppendMatrix(bases.feedback_v, file_.feedback_v);
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
  const int begin_;  // first position that is part of the statistics
  RotationFile file_;
  std::vector<HeadMoments> moments_;
  std::vector<Eigen::MatrixXd> covariance_k_;  // [count_ * kv_heads]
  std::vector<Eigen::MatrixXd> covariance_v_;
  std::vector<double> weight_v_;
  int first_ = 0;  // layers [first_, first_ + count_) are being calibrated
  int count_ = 0;
  int64_t visited_ = 0;
};

}  // namespace

CalibrationOptions DefaultCalibration(kernels::Method method) {
  CalibrationOptions options;
  options.method = method;
  const bool crumb = method == kernels::Method::kCrumb;
  options.clip_k = crumb ? 0.92f : 0.96f;
  options.clip_v = 0.92f;
  options.whitening_k = crumb ? 0.5 : 0.0;
  options.whitening_v = crumb ? 0.25 : 0.0;
  options.query_floor = crumb ? 0.5 : 0.0;
  return options;
}

absl::StatusOr<RotationFile> Calibrate(ActivationSource& source, const CalibrationOptions& options,
                                       const CalibrationProgress& progress) {
  return Calibrator(source, options, progress).Run();
}

absl::StatusOr<RotationFile> NaiveRotations(int head_dim) {
  if (head_dim < 1 || !std::has_single_bit(static_cast<unsigned>(head_dim))) {
    return absl::InvalidArgumentError("head_dim is " + std::to_string(head_dim) +
                                      ", which is no power of two");
  }
  RotationFile file;
  file.method = "naive";
  file.layers = file.kv_heads = 1;
  file.head_dim = head_dim;
  return file;
}

absl::StatusOr<RotationFile> HadamardRotations(int head_dim) {
  CRUMB_ASSIGN_OR_RETURN(RotationFile file, NaiveRotations(head_dim));
  file.method = "hadamard";
  const CalibrationOptions defaults = DefaultCalibration(kernels::Method::kHadamard);
  file.clip_k = defaults.clip_k;
  file.clip_v = defaults.clip_v;
  AppendMatrix(HadamardMatrix(head_dim), file.rotation_k);
  file.rotation_v = file.rotation_k;
  return file;
}

}  // namespace crumb::calibration
