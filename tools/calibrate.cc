// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/calibrate.h"

#include "calibration/calibrator.h"
#include "common/rotation_file.h"
#include "common/status_macros.h"
#include "tools/model_activations.h"
#include "tools/rotation_view.h"

namespace crumb::tools {
namespace {

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

}  // namespace

CommandResult RunCalibrate(const CalibrateCommand& command,
                           const std::function<void(double)>& progress) {
  const auto file = MakeFile(command, progress);
  if (!file.ok()) return CommandResult::Failed(file.status());
  const absl::Status written = WriteRotationFile(*file, command.out);
  if (!written.ok()) return CommandResult::Failed(written);
  return CommandResult::Done(DescribeRotationText(*file), DescribeRotation(*file));
}

}  // namespace crumb::tools
