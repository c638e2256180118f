// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <istream>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace crumb::bench {

// Requests as lists of block ids in prompt order. Ids are dense: 0 to distinct() - 1 in order of
// appearance.
class BlockTrace {
 public:
  // Appends a request. `names` are any numbers that identify blocks; `time_ms`: when it arrived.
  // Without a time it arrives kIntervalSeconds after the one before.
  // Usual for conversation traces of a few requests/s.
  static constexpr double kIntervalSeconds = 0.3;
  void Add(std::span<const uint64_t> names, std::optional<uint64_t> time_ms = std::nullopt);

  size_t requests() const { return ends_.size(); }
  size_t blocks() const { return ids_.size(); }  // sum over all requests
  size_t distinct() const { return dense_.size(); }
  // Returns the block ids of a request, in prompt order.
  std::span<const uint32_t> request(size_t index) const;
  // When a request arrived, in seconds.
  double seconds(size_t index) const { return seconds_[index]; }

 private:
  std::vector<uint32_t> ids_;
  std::vector<size_t> ends_;  // end of request i in ids_
  std::vector<double> seconds_;
  absl::flat_hash_map<uint64_t, uint32_t> dense_;
};

// Reads one line of a trace: a JSON object whose member "hash_ids" is an array of non-negative
// integers; a non-negative integer "timestamp" (milliseconds) goes to `time_ms` unless that is
// null; other members are skipped. kInvalidArgument describes the error in the line.
absl::StatusOr<std::vector<uint64_t>> ParseTraceLine(std::string_view line,
                                                     std::optional<uint64_t>* time_ms = nullptr);

// Reads a trace of one such object per line; empty lines are skipped. Messages name the stream
// `name` and the line.
absl::StatusOr<BlockTrace> ReadTrace(std::istream& in, std::string_view name);

// Reads a trace from a file. kNotFound: the file cannot be opened.
absl::StatusOr<BlockTrace> ReadTraceFile(const std::string& path);

}  // namespace crumb::bench
