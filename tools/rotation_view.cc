// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <optional>

#include "calibration/eigenbasis.h"
#include "fmt/format.h"
#include "fmt/ranges.h"
#include "tools/text_table.h"

namespace crumb::tools {
namespace {

constexpr double kOrthogonalTolerance = 1e-6;
// The largest relative deviation of diag(R' C R) from its mean, which is a product of f32 arrays.
constexpr double kDualTolerance = 1e-5;  // a basis that is not orthogonal enlarges rounding
constexpr double kDiagonalTolerance = 1e-4;
constexpr double kDamp = 0.01;
constexpr int kTopEigenvalues = 8;

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Returns matrix `index` of an array of square matrices.
Eigen::MatrixXd MatrixOf(const std::vector<float>& values, int64_t index, int dim) {
  return Eigen::Map<const RowMajor>(&values[index * dim * dim], dim, dim).cast<double>();
}

Eigen::VectorXd RowOf(const std::vector<float>& values, int64_t index, int dim) {
  return Eigen::Map<const Eigen::VectorXf>(&values[index * dim], dim).cast<double>();
}

// Returns the fraction of the trace that the largest eigenvalues have.
double TopShare(const Eigen::VectorXd& eigenvalues) {
  const auto top = std::min<Eigen::Index>(kTopEigenvalues, eigenvalues.size());
  return eigenvalues.tail(top).sum() / std::max(eigenvalues.sum(), 1e-30);
}

// Returns Q of R Q' = I, which is R where that is orthogonal.
const std::vector<float>& DualOf(const std::vector<float>& rotation,
                                 const std::vector<float>& dual) {
  return dual.empty() ? rotation : dual;
}

// Returns the weighted error with feedback over that without. For R = U H P it follows from the
// eigenvalues alone: R' C R = P H diag(eigenvalues) H P.
double FeedbackGain(const RotationFile& file, int64_t at) {
  double gain = 1.0;
  if (!file.covariance_k.empty() && !file.rotation_k.empty()) {
    calibration::FeedbackFactor(MatrixOf(file.covariance_k, at, file.head_dim),
                                MatrixOf(DualOf(file.rotation_k, file.dual_k), at, file.head_dim),
                                kDamp, &gain);
  } else {
    const Eigen::MatrixXd spectrum =
        RowOf(file.eigenvalues_k, at, file.head_dim).cwiseMax(0.0).asDiagonal();
    calibration::FeedbackFactor(spectrum, calibration::MakeEigenbasis(spectrum).rotation, kDamp,
                                &gain);
  }
  return gain;
}

// Figures of one layer, averaged over its heads. Those that the file does not contain are absent.
struct LayerSpectrum {
  std::optional<double> top_share_k;
  std::optional<double> top_share_v;
  std::optional<double> gain;
  std::optional<double> shift;  // nats, mean over query heads
  std::optional<double> attention_error;
};

LayerSpectrum SpectrumOf(const RotationFile& file, int layer) {
  LayerSpectrum spectrum;
  const int heads = file.kv_heads;
  const auto mean_over_heads = [&](const auto& of_head) {
    double sum = 0.0;
    for (int head = 0; head < heads; ++head) sum += of_head(int64_t{layer} * heads + head);
    return sum / heads;
  };
  const auto share = [&](const std::vector<float>& eigenvalues) {
    return mean_over_heads(
        [&](int64_t at) { return TopShare(RowOf(eigenvalues, at, file.head_dim)); });
  };
  if (!file.eigenvalues_k.empty()) {
    spectrum.top_share_k = share(file.eigenvalues_k);
    spectrum.gain = mean_over_heads([&](int64_t at) { return FeedbackGain(file, at); });
  }
  if (!file.eigenvalues_v.empty()) spectrum.top_share_v = share(file.eigenvalues_v);
  if (!file.shift.empty()) {
    spectrum.shift = RowOf(file.shift, layer, file.q_heads).mean();
  }
  if (!file.attention_error.empty()) {
    spectrum.attention_error = RowOf(file.attention_error, layer, heads).mean();
  }
  return spectrum;
}

// Returns the mean over layers and KV heads.
std::optional<double> AttentionErrorOf(const RotationFile& file) {
  if (file.attention_error.empty()) return std::nullopt;
  return RowOf(file.attention_error, 0, static_cast<int>(file.attention_error.size())).mean();
}

std::string Number(const std::optional<double>& value) {
  return value ? fmt::format("{:.3f}", *value) : "-";
}

nlohmann::json JsonNumber(const std::optional<double>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json();
}

// The results of the checks. A check is absent if the file lacks the arrays for it.
struct RotationErrors {
  std::optional<double> orthogonal;  // largest |R' Q - I|, with Q = R where there is no dual
  std::optional<double> diagonal;    // largest relative deviation of diag(Q' C Q) from its mean
};

RotationErrors ErrorsOf(const RotationFile& file, const std::vector<float>& rotation,
                        const std::vector<float>& dual, const std::vector<float>& covariance) {
  RotationErrors errors;
  const int dim = file.head_dim;
  const Eigen::MatrixXd identity = Eigen::MatrixXd::Identity(dim, dim);
  for (int64_t at = 0; at < int64_t{file.layers} * file.kv_heads && !rotation.empty(); ++at) {
    const Eigen::MatrixXd r = MatrixOf(rotation, at, dim);
    const Eigen::MatrixXd q = MatrixOf(DualOf(rotation, dual), at, dim);
    const double off = (r.transpose() * q - identity).cwiseAbs().maxCoeff();
    errors.orthogonal = std::max(errors.orthogonal.value_or(0.0), off);
    if (covariance.empty()) continue;
    const Eigen::VectorXd diagonal = (q.transpose() * MatrixOf(covariance, at, dim) * q).diagonal();
    const double deviation =
        (diagonal.array() - diagonal.mean()).abs().maxCoeff() / std::max(diagonal.mean(), 1e-30);
    errors.diagonal = std::max(errors.diagonal.value_or(0.0), deviation);
  }
  return errors;
}

std::string ErrorLine(const char* what, const std::optional<double>& error, double most,
                      const char* missing) {
  if (!error) return fmt::format("{}: not checked, the file has no {}\n", what, missing);
  return fmt::format("{} {:.2g} (at most {:.2g})\n", what, *error, most);
}

}  // namespace

nlohmann::json DescribeRotation(const RotationFile& file) {
  nlohmann::json json = {{"method", file.method},
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
                         {"v_basis", file.v_basis},
                         {"feedback_v", !file.feedback_v.empty()},
                         {"attention_error", JsonNumber(AttentionErrorOf(file))},
                         {"digest", RotationDigest(file)}};
  if (!file.layer_ids.empty()) json["layer_ids"] = file.layer_ids;
  return json;
}

std::string DescribeRotationText(const RotationFile& file) {
  std::string text = fmt::format(
      "method {}, model {}, {} layers, {} KV heads, head_dim {}\n"
      "{} calibration tokens, means for {} positions in {} blocks, clip {} and {}\n",
      file.method, file.model.empty() ? "any" : file.model, file.layers, file.kv_heads,
      file.head_dim, file.tokens, file.positions, file.position_blocks, file.clip_k, file.clip_v);
  if (!file.layer_ids.empty()) {
    text += fmt::format("the model's layers {}\n", fmt::join(file.layer_ids, ", "));
  }
  if (file.v_basis != "model")
    text += "V arrives rotated: R_V is folded into the model's weights\n";
  if (const auto error = AttentionErrorOf(file)) {
    text += fmt::format("expected attention error {:.3f}, mean over layers and KV heads\n", *error);
  }
  return text + "digest " + RotationDigest(file) + "\n";
}

CommandResult RunRotationShow(const RotationShowCommand& command) {
  const auto file = ReadRotationFile(command.file);
  if (!file.ok()) return CommandResult::Failed(file.status());
  std::string text = DescribeRotationText(*file);
  nlohmann::json json = DescribeRotation(*file);
  if (file->eigenvalues_k.empty() && file->eigenvalues_v.empty()) {
    return CommandResult::Done(text, json);
  }
  TextTable table({"layer", "top-8 share K", "top-8 share V", "feedback gain", "mass shift",
                   "attention error"});
  json["spectrum"] = nlohmann::json::array();
  double gain = 0.0;
  for (int layer = 0; layer < file->layers; ++layer) {
    const LayerSpectrum spectrum = SpectrumOf(*file, layer);
    gain += spectrum.gain.value_or(1.0) / file->layers;
    table.AddRow({std::to_string(LayerId(*file, layer)), Number(spectrum.top_share_k),
                  Number(spectrum.top_share_v), Number(spectrum.gain), Number(spectrum.shift),
                  Number(spectrum.attention_error)});
    json["spectrum"].push_back({{"layer", LayerId(*file, layer)},
                                {"top8_share_k", JsonNumber(spectrum.top_share_k)},
                                {"top8_share_v", JsonNumber(spectrum.top_share_v)},
                                {"feedback_gain", JsonNumber(spectrum.gain)},
                                {"mass_shift", JsonNumber(spectrum.shift)},
                                {"attention_error", JsonNumber(spectrum.attention_error)}});
  }
  text += "\n" + table.ToString();
  if (!file->eigenvalues_k.empty()) {
    text += fmt::format(
        "\nmean feedback gain {:.3f}: weighted key error with feedback over that "
        "without\n",
        gain);
    json["feedback_gain"] = gain;
  }
  return CommandResult::Done(text, json);
}

CommandResult RunRotationVerify(const RotationVerifyCommand& command) {
  const auto file = ReadRotationFile(command.file);
  if (!file.ok()) return CommandResult::Failed(file.status());
  CommandResult result = CommandResult::Done("", nlohmann::json::object());
  const RotationErrors k = ErrorsOf(*file, file->rotation_k, file->dual_k, file->covariance_k);
  const RotationErrors v = ErrorsOf(*file, file->rotation_v, file->dual_v, file->covariance_v);
  std::optional<double> diagonal;
  bool inverse = true;
  for (const auto& [name, errors] : {std::pair{"K", k}, std::pair{"V", v}}) {
    const std::string side(name), small = side == "K" ? "k" : "v";
    const bool dual = !(side == "K" ? file->dual_k : file->dual_v).empty();
    const double most = dual ? kDualTolerance : kOrthogonalTolerance;
    result.text +=
        ErrorLine((side + (dual ? ": error of the dual" : ": orthogonality error")).c_str(),
                  errors.orthogonal, most, "rotation");
    result.text += ErrorLine((side + ": diag(R' C R) deviates by").c_str(), errors.diagonal,
                             kDiagonalTolerance, "covariance");
    result.json["orthogonality_error_" + small] = JsonNumber(errors.orthogonal);
    result.json["diagonal_deviation_" + small] = JsonNumber(errors.diagonal);
    inverse = inverse && errors.orthogonal.value_or(0.0) <= most;
    if (errors.diagonal) diagonal = std::max(diagonal.value_or(0.0), *errors.diagonal);
  }
  if (!inverse || !(diagonal.value_or(0.0) <= kDiagonalTolerance)) {
    result.status = absl::DataLossError(
        command.file + ": its rotations are not orthogonal, or do not fit its covariances");
  }
  return result;
}

}  // namespace crumb::tools
