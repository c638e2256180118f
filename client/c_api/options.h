// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "crumb.h"
#include "crumb/counters.h"
#include "crumb/sequence.h"
#include "crumb/worker_options.h"

// Structs of crumb.h, and what the client has for them.
namespace crumb::c_api {

// kInvalidArgument naming the member; kNotFound: the rotation file.
absl::StatusOr<client::WorkerOptions> OptionsOf(const crumb_worker_options& given);
absl::StatusOr<client::SequenceOptions> OptionsOf(const crumb_sequence_options& given);

// As many members as the caller's header has. kInvalidArgument: `out` is null.
absl::Status WriteCounters(const client::WorkerCounters& now, crumb_worker_counters* out);

}  // namespace crumb::c_api
