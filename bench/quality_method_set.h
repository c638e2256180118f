// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/quality_methods/paged_cache.h"
#include "bench/quality_workload.h"
#include "common/rotation_file.h"
#include "crumb/worker_options.h"
#include "models/config.h"
#include "tools/activations.h"

namespace crumb::bench {

// Tokens of one pass over a sequence: as many as are evicted together.
inline constexpr int kStepTokens = 64;

// A method of storing history, with which several threads may begin sequences at the same time.
// Copies share their state.
struct QualityMethod {
  std::string name;
  double bits = 0.0;  // stored bits per element of history
  float clip_k = 0.0f;
  float clip_v = 0.0f;
  // Begins a sequence. Tokens of `prompt` are attended like prefill, later ones, in passes of up to
  // 64 tokens, like decode.
  std::function<absl::StatusOr<std::unique_ptr<MethodCache>>(std::span<const int32_t> prompt)>
      begin;
};

// Makes methods by name, and calibrates when a method first needs it.
class QualityMethodSet {
 public:
  // `options` must outlive this. `context` is the largest context, for which crumb is calibrated
  // and caches have room. kFailedPrecondition: the device is cuda and there is none.
  static absl::StatusOr<std::unique_ptr<QualityMethodSet>> Open(const QualityOptions& options,
                                                                const models::ModelConfig& model,
                                                                int context);

  // kInvalidArgument: there is no such method, or it needs calibration text and has none.
  absl::StatusOr<QualityMethod> Named(const std::string& name);
  // Returns oscar with other clips.
  absl::StatusOr<QualityMethod> Oscar(float clip_k, float clip_v);
  absl::StatusOr<QualityMethod> FromRotationFile(const std::string& path) const;

 private:
  QualityMethodSet(const QualityOptions& options, const models::ModelConfig& model, int context)
      : options_(options), model_(model), context_(context) {}

  // Opens the model's activations on the calibration texts, in sequences of that length.
  absl::StatusOr<std::unique_ptr<tools::ModelActivations>> CalibrationSource(
      int sequence_tokens) const;
  // Calibrates oscar's rotations, the first time.
  absl::Status CalibrateOscar();
  absl::StatusOr<std::vector<std::shared_ptr<const WindowCodec>>> BlockGtqCodecs() const;
  // OptR, or if not `learn` its key means with OSCAR's rotations.
  absl::StatusOr<std::vector<std::shared_ptr<const WindowCodec>>> OptrCodecs(bool learn);
  // Calibrates the constants of a method of this project.
  absl::StatusOr<RotationFile> CalibrateFor(kernels::Method method, int sequence_tokens) const;
  absl::StatusOr<QualityMethod> Bf16() const;
  absl::StatusOr<QualityMethod> Naive() const;
  absl::StatusOr<QualityMethod> Int2(const std::string& name, const RotationFile& file) const;
  // Return the method whose sequences are those of a client::Worker, or those of PagedCache.
  absl::StatusOr<QualityMethod> OfWorker(const std::string& name,
                                         const client::WorkerOptions& worker) const;
  absl::StatusOr<QualityMethod> OfPages(const std::string& name, PagedCacheOptions pages) const;
  // Returns the options of a worker with the model's shape, without rotations.
  client::WorkerOptions WorkerFor() const;

  const QualityOptions& options_;
  const models::ModelConfig model_;
  const int context_;
  std::unique_ptr<RotationFile> oscar_;  // null until a method needs it
  AttentionBackend device_attend_;       // null: attention runs on the CPU
};

}  // namespace crumb::bench
