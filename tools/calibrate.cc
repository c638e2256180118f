// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

#include "calibration/calibrator.h"
#include "common/atomic_file.h"
#include "common/rotation_file.h"
#include "common/status_macros.h"
#include "models/thread_pool.h"
#include "tools/activations.h"
#include "tools/attention_weights.h"

namespace crumb::tools {
namespace {

using Progress = std::function<void(double)>;

absl::StatusOr<calibration::CalibrationOptions> OptionsFor(const CalibrateCommand& command,
                                                           const calibration::ModelShape& shape,
                                                           int max_positions) {
  const auto method = kernels::MethodNamed(command.method);
  if (!method) return absl::InvalidArgumentError("no method is called " + command.method);
  auto options = calibration::DefaultCalibration(*method);
  options.positions = command.positions > 0 ? command.positions : max_positions;
  if (options.positions == 0 && *method == kernels::Method::kCrumb) {
    return absl::InvalidArgumentError(
        "nothing says for how many positions to calibrate; say it with --positions");
  }
  if (command.whitening_k) options.whitening_k = *command.whitening_k;
  if (command.whitening_v) options.whitening_v = *command.whitening_v;
  if (command.clip_k) options.clip_k = *command.clip_k;
  if (command.clip_v) options.clip_v = *command.clip_v;
  if (command.value_hessian) {
    CRUMB_ASSIGN_OR_RETURN(options.value_hessians, OutputProjectionHessians(command.model, shape));
  }
  return options;
}

using Warn = std::function<void(const std::string&)>;

absl::StatusOr<RotationFile> FromText(const CalibrateCommand& command, const Progress& progress,
                                      const Warn& warn) {
  CRUMB_ASSIGN_OR_RETURN(const auto source, ModelActivations::Open({.model = command.model,
                                                                    .texts = command.texts,
                                                                    .context = command.context,
                                                                    .tokens = command.tokens,
                                                                    .threads = command.threads}));
  CRUMB_ASSIGN_OR_RETURN(auto options,
                         OptionsFor(command, source->shape(), source->config().max_positions));
  CRUMB_ASSIGN_OR_RETURN(options.value_hessians,
                         OutputProjectionHessians(command.model, source->shape()));
  options.warn = warn;
  options.parallel_for = [&source](int count, const std::function<void(int)>& body) {
    source->pool().ParallelFor(count, body);
  };
  return calibration::Calibrate(*source, options, progress);
}

absl::StatusOr<RotationFile> FromFiles(const CalibrateCommand& command, const Progress& progress,
                                       const Warn& warn) {
  CRUMB_ASSIGN_OR_RETURN(const ActivationFiles files, OpenActivationFiles(command));
  CRUMB_ASSIGN_OR_RETURN(auto options,
                         OptionsFor(command, files.source->shape(), files.max_positions));
  models::ThreadPool pool(command.threads);
  options.warn = warn;
  options.parallel_for = [&pool](int count, const std::function<void(int)>& body) {
    pool.ParallelFor(count, body);
  };
  return calibration::Calibrate(*files.source, options, progress);
}

absl::StatusOr<RotationFile> MakeFile(const CalibrateCommand& command, const Progress& progress,
                                      const Warn& warn) {
  if (command.method == "hadamard") return calibration::HadamardRotations(command.head_dim);
  if (command.method == "naive") return calibration::NaiveRotations(command.head_dim);
  return command.activations.empty() ? FromText(command, progress, warn)
                                     : FromFiles(command, progress, warn);
}

}  // namespace

CommandResult RunCalibrate(const CalibrateCommand& command,
                           const std::function<void(double)>& progress) {
  const absl::Status writable = CheckWritable(command.out);
  if (!writable.ok()) return CommandResult::Failed(writable);
  std::string warnings;
  nlohmann::json warned = nlohmann::json::array();
  const auto file = MakeFile(command, progress, [&](const std::string& warning) {
    warnings += "warning: " + warning + "\n";
    warned.push_back(warning);
  });
  if (!file.ok()) return CommandResult::Failed(file.status());
  const absl::Status written = WriteRotationFile(*file, command.out);
  if (!written.ok()) return CommandResult::Failed(written);
  CommandResult result =
      CommandResult::Done(warnings + DescribeRotationText(*file), DescribeRotation(*file));
  if (!warned.empty()) result.json["warnings"] = std::move(warned);
  return result;
}

}  // namespace crumb::tools
