// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/calibrate.h"

#include <Eigen/Dense>
#include <algorithm>

#include "calibration/calibrator.h"
#include "calibration/eigenbasis.h"
#include "common/rotation_file.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "tools/model_activations.h"

namespace crumb::tools {
namespace {

constexpr double kOrthogonalTolerance = 1e-6;
constexpr double kDiagonalTolerance = 1e-4;  // of a product of f32 arrays, relative
constexpr double kDamp = 0.01;

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Matrix `index` of an array of square matrices.
Eigen::MatrixXd MatrixOf(const std::vector<float>& values, int64_t index, int dim) {
  return Eigen::Map<const RowMajor>(&values[index * dim * dim], dim, dim).cast<double>();
}

absl::StatusOr<RotationFile> MakeFile(const CalibrateCommand& command,
                                      const std::function<void(double)>& progress) {
  if (command.method == "hadamard") return calibration::HadamardRotations(command.head_dim);
  CRUMB_ASSIGN_OR_RETURN(const auto source, ModelActivations::Open({.model = command.model,
                                                                    .texts = command.texts,
                                                                    .context = command.context,
                                                                    .tokens = command.tokens,
                                                                    .threads = command.threads}));
  auto options = calibration::DefaultCalibration(*kernels::MethodNamed(command.method));
  options.positions = command.positions > 0 ? command.positions : source->config().max_positions;
  if (command.clip_k) options.clip_k = *command.clip_k;
  if (command.clip_v) options.clip_v = *command.clip_v;
  return calibration::Calibrate(*source, options, progress);
}

nlohmann::json Describe(const RotationFile& file) {
  return {{"method", file.method},
          {"model", file.model},
          {"rope", file.rope},
          {"layers", file.layers},
          {"kv_heads", file.kv_heads},
          {"q_heads", file.q_heads},
          {"head_dim", file.head_dim},
          {"positions", file.positions},
          {"tokens", file.tokens},
          {"position_blocks", file.position_blocks},
          {"clip_k", file.clip_k},
          {"clip_v", file.clip_v},
          {"digest", RotationDigest(file)}};
}

std::string DescribeText(const RotationFile& file) {
  return fmt::format(
      "method {}, model {}, {} layers, {} KV heads, head_dim {}\n"
      "{} calibration tokens, means for {} positions in {} blocks, clip {} and {}\ndigest {}\n",
      file.method, file.model.empty() ? "any" : file.model, file.layers, file.kv_heads,
      file.head_dim, file.tokens, file.positions, file.position_blocks, file.clip_k, file.clip_v,
      RotationDigest(file));
}

// Of one layer, averaged over its heads.
struct LayerSpectrum {
  double top_share = 0.0;  // of the eight largest eigenvalues in the trace
  double gain = 1.0;       // weighted error with feedback over that without
  double shift = 0.0;      // nats, mean over query heads
};

LayerSpectrum SpectrumOf(const RotationFile& file, int layer) {
  LayerSpectrum spectrum;
  for (int head = 0; head < file.kv_heads; ++head) {
    const int64_t at = int64_t{layer} * file.kv_heads + head;
    const Eigen::Map<const Eigen::VectorXf> values(&file.eigenvalues_k[at * file.head_dim],
                                                   file.head_dim);
    const int top = std::min(8, file.head_dim);
    spectrum.top_share += values.tail(top).sum() / std::max(values.sum(), 1e-30f) / file.kv_heads;
    double gain = 1.0;
    if (!file.covariance_k.empty()) {
      calibration::FeedbackFactor(MatrixOf(file.covariance_k, at, file.head_dim),
                                  MatrixOf(file.rotation_k, at, file.head_dim), kDamp, &gain);
    }
    spectrum.gain += (gain - 1.0) / file.kv_heads;
  }
  for (int head = 0; head < file.q_heads && !file.shift.empty(); ++head) {
    spectrum.shift += file.shift[layer * file.q_heads + head] / file.q_heads;
  }
  return spectrum;
}

struct RotationErrors {
  double orthogonal = 0.0;  // largest |R'R - I|
  double diagonal = 0.0;    // largest relative deviation of diag(R' C R) from its mean
};

RotationErrors ErrorsOf(const RotationFile& file) {
  RotationErrors errors;
  const int dim = file.head_dim;
  const Eigen::MatrixXd identity = Eigen::MatrixXd::Identity(dim, dim);
  for (int64_t at = 0; at < int64_t{file.layers} * file.kv_heads; ++at) {
    for (const auto* rotations : {&file.rotation_k, &file.rotation_v}) {
      if (rotations->empty()) continue;
      const Eigen::MatrixXd r = MatrixOf(*rotations, at, dim);
      errors.orthogonal =
          std::max(errors.orthogonal, (r.transpose() * r - identity).cwiseAbs().maxCoeff());
    }
    if (file.covariance_k.empty() || file.rotation_k.empty()) continue;
    const Eigen::MatrixXd r = MatrixOf(file.rotation_k, at, dim);
    const Eigen::VectorXd diagonal =
        (r.transpose() * MatrixOf(file.covariance_k, at, dim) * r).diagonal();
    errors.diagonal =
        std::max(errors.diagonal, (diagonal.array() - diagonal.mean()).abs().maxCoeff() /
                                      std::max(diagonal.mean(), 1e-30));
  }
  return errors;
}

}  // namespace

CommandResult RunCalibrate(const CalibrateCommand& command,
                           const std::function<void(double)>& progress) {
  const auto file = MakeFile(command, progress);
  if (!file.ok()) return CommandResult::Failed(file.status());
  const absl::Status written = WriteRotationFile(*file, command.out);
  if (!written.ok()) return CommandResult::Failed(written);
  return CommandResult::Done(DescribeText(*file), Describe(*file));
}

CommandResult RunRotationShow(const RotationShowCommand& command) {
  const auto file = ReadRotationFile(command.file);
  if (!file.ok()) return CommandResult::Failed(file.status());
  std::string text = DescribeText(*file);
  nlohmann::json json = Describe(*file);
  if (file->eigenvalues_k.empty()) return CommandResult::Done(text, json);
  text += fmt::format("\n{:>5}  {:>14}  {:>13}  {:>10}\n", "layer", "top-8 share K",
                      "feedback gain", "mass shift");
  json["spectrum"] = nlohmann::json::array();
  for (int layer = 0; layer < file->layers; ++layer) {
    const LayerSpectrum spectrum = SpectrumOf(*file, layer);
    text += fmt::format("{:>5}  {:>14.3f}  {:>13.3f}  {:>10.3f}\n", layer, spectrum.top_share,
                        spectrum.gain, spectrum.shift);
    json["spectrum"].push_back({{"layer", layer},
                                {"top8_share_k", spectrum.top_share},
                                {"feedback_gain", spectrum.gain},
                                {"mass_shift", spectrum.shift}});
  }
  return CommandResult::Done(text, json);
}

CommandResult RunRotationVerify(const RotationVerifyCommand& command) {
  const auto file = ReadRotationFile(command.file);
  if (!file.ok()) return CommandResult::Failed(file.status());
  const RotationErrors errors = ErrorsOf(*file);
  CommandResult result = CommandResult::Done(
      fmt::format("orthogonality error {:.2g} (at most {:.2g})\n"
                  "diag(R' C R) deviates by {:.2g} (at most {:.2g})\n",
                  errors.orthogonal, kOrthogonalTolerance, errors.diagonal, kDiagonalTolerance),
      {{"orthogonality_error", errors.orthogonal}, {"diagonal_deviation", errors.diagonal}});
  if (!(errors.orthogonal <= kOrthogonalTolerance) || !(errors.diagonal <= kDiagonalTolerance)) {
    result.status =
        absl::DataLossError(command.file + ": its rotations are not what they should be");
  }
  return result;
}

}  // namespace crumb::tools
