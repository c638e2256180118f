// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/examples/tiny_lm/runner.h"

namespace crumb::tiny_lm {

absl::StatusOr<std::unique_ptr<Runner>> OpenCudaRunner(const std::string&,
                                                       const client::WorkerOptions&,
                                                       client::Client*) {
  return absl::FailedPreconditionError(
      "--device cuda: this program was built without CUDA; build it with CRUMB_CUDA=ON, or run on "
      "the CPU with --device cpu");
}

}  // namespace crumb::tiny_lm
