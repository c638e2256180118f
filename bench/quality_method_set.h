// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "bench/quality_methods/method_cache.h"
#include "bench/quality_methods/paged_cache.h"
#include "bench/quality_workload.h"
#include "common/rotation_file.h"
#include "crumb/worker_options.h"
#include "models/config.h"

namespace crumb::bench {

// A method that sequences can be begun with, from several threads at a time. Values share what
// they refer to.
struct QualityMethod {
  std::string name;
  double bits = 0.0;  // stored per element of history
  float clip_k = 0.0f;
  float clip_v = 0.0f;
  // Tokens of `prompt` are attended as prefill, those behind it, in passes of up to 64 tokens, as
  // decode.
  std::function<absl::StatusOr<std::unique_ptr<MethodCache>>(std::span<const int32_t> prompt)>
      begin;
};

// Makes methods by name. Calibrates when one needs it first.
class QualityMethodSet {
 public:
  // `options` is borrowed. `context` is the largest context: what crumb is calibrated for and what
  // caches have room for. kFailedPrecondition: device cuda without one.
  static absl::StatusOr<std::unique_ptr<QualityMethodSet>> Open(const QualityOptions& options,
                                                                const models::ModelConfig& model,
                                                                int context);

  // kInvalidArgument: no such method, or calibration text is missing.
  absl::StatusOr<QualityMethod> Named(const std::string& name);
  // oscar with other clips.
  absl::StatusOr<QualityMethod> Oscar(float clip_k, float clip_v);
  absl::StatusOr<QualityMethod> FromRotationFile(const std::string& path) const;

 private:
  QualityMethodSet(const QualityOptions& options, const models::ModelConfig& model, int context)
      : options_(options), model_(model), context_(context) {}

  absl::StatusOr<RotationFile> CalibrateFor(kernels::Method method, int sequence_tokens) const;
  absl::StatusOr<QualityMethod> Bf16() const;
  absl::StatusOr<QualityMethod> Naive() const;
  absl::StatusOr<QualityMethod> Int2(const std::string& name, const RotationFile& file) const;
  absl::StatusOr<QualityMethod> OfWorker(const std::string& name,
                                         const client::WorkerOptions& worker) const;
  absl::StatusOr<QualityMethod> OfPages(const std::string& name, PagedCacheOptions pages) const;
  client::WorkerOptions WorkerFor() const;

  const QualityOptions& options_;
  const models::ModelConfig model_;
  const int context_;
  std::unique_ptr<RotationFile> oscar_;
  AttentionBackend device_attend_;  // null: the CPU
};

}  // namespace crumb::bench
