// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "calibration/activation_source.h"
#include "common/page_key.h"
#include "common/rotation_file.h"
#include "kernels/quantize.h"

namespace crumb::calibration {

// The segments of a sequence, in tokens (docs/architecture.md). kRecentTokens is the shortest
// recent window.
inline constexpr int kSinkTokens = 64;
inline constexpr int kRecentTokens = 256;
// The shortest sequence, in tokens, of which a query attends quantized history.
inline constexpr int kMeasuredTokens = kSinkTokens + kPageTokens + kRecentTokens;

// The history pages [first, end) that lie completely in a sequence and that its queries attend.
struct PageRange {
  int first = 0;
  int end = 0;

  int size() const { return end > first ? end - first : 0; }
};

// Returns the number of history pages before the recent window of a query at `position`.
int PagesBefore(int position);
PageRange PagesOf(const SequenceActivations& sequence);
// Returns the row of the sequence at which page `page` begins.
int RowOfPage(const SequenceActivations& sequence, int page);

// Quantizes windows of one (layer, KV head) in the same way as workers do with a rotation file.
// Owns one tile. Not thread-safe.
class WindowParams {
 public:
  // `shape` and `file` must outlive this. REQUIRES: the file has all arrays of the layer except
  // shifts.
  WindowParams(const ModelShape& shape, const RotationFile& file, int layer, int kv_head);
  WindowParams(const WindowParams&) = delete;
  WindowParams& operator=(const WindowParams&) = delete;

  // Quantizes a page of a sequence into the tile; the result is valid until the next call.
  // REQUIRES: the page lies completely in the sequence.
  const kernels::QuantizeParams& Store(const SequenceActivations& sequence, int page);

 private:
  const float* HeadOf(const std::vector<float>& values, size_t item) const;
  void SetMean(const float* mean, const float* rotation, std::vector<float>& rotated) const;

  const ModelShape& shape_;
  const RotationFile& file_;
  const int kv_head_;
  const size_t file_head_;  // index among all heads of the file
  std::vector<std::byte> tile_;
  std::vector<float> mean_k_, mean_v_;  // rotated
  kernels::QuantizeParams params_;
};

// Measures the attention error that a worker's quality watch will report for a rotation file:
// kernels::MeasureWindow on calibration windows, with queries at the distance that they have when a
// window is evicted in decode.
class ExpectedError {
 public:
  // Both must outlive this. REQUIRES: the file has all arrays of the added layers except shifts.
  ExpectedError(const ModelShape& shape, const RotationFile& file);

  // Adds at most 16 evenly spaced windows of one KV head of one sequence. Different heads may be
  // added concurrently.
  absl::Status Add(const SequenceActivations& sequence, int kv_head);

  // Returns the number of windows of the layer and KV head that has the fewest.
  int64_t windows() const;

  // Returns means over windows, [layers, file.kv_heads]; empty if a layer has fewer than
  // `windows_min`.
  std::vector<float> Errors(int64_t windows_min) const;

 private:
  const ModelShape& shape_;
  const RotationFile& file_;
  std::vector<double> sum_;  // [layers, kv_heads] of the model
  std::vector<int64_t> count_;
};

// Measures how much quantization noise in the keys increases the softmax mass of history: per query
// head, the mean over calibration queries of the log-sum-exp over history with quantized keys minus
// that with exact keys, in nats.
class MassShift {
 public:
  // Both must outlive this. REQUIRES: the file has all arrays of the added layers except shifts.
  MassShift(const ModelShape& shape, const RotationFile& file);

  // Adds those queries of one KV head of one sequence whose history is not empty: every 16th token,
  // at most 256. Different heads may be added concurrently.
  absl::Status Add(const SequenceActivations& sequence, int kv_head);

  // Returns [layers, q_heads]; 0 for heads without queries.
  std::vector<float> Shifts() const;

 private:
  const ModelShape& shape_;
  const RotationFile& file_;
  std::vector<double> sum_;  // [layers, q_heads]
  std::vector<int64_t> count_;
};

}  // namespace crumb::calibration
