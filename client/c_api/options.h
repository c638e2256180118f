// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "crumb.h"
#include "crumb/counters.h"
#include "crumb/sequence.h"
#include "crumb/worker_options.h"

// Converts between structs of crumb.h and the client's types.
namespace crumb::c_api {

// Returns the number, or the largest int if it does not fit.
inline int IntOf(uint32_t number) {
  return static_cast<int>(std::min<uint32_t>(number, INT32_MAX));
}

// kInvalidArgument names the member; kNotFound: there is no such rotation file.
//
// `given` is the struct as this library knows it (see Known), so that zero means the default.
// Strings and arrays are copied; parallel_for's context stays the caller's. Does not validate
// everything: Worker::Open does.
absl::StatusOr<client::WorkerOptions> OptionsOf(const crumb_worker_options& given);
absl::StatusOr<client::SequenceOptions> OptionsOf(const crumb_sequence_options& given);

// Writes the members that the caller's header has. kInvalidArgument: `out` is null.
absl::Status WriteCounters(const client::WorkerCounters& now, crumb_worker_counters* out);

}  // namespace crumb::c_api
