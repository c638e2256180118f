// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "common/page_key.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// The keyspace fields that the client names for a worker whose history pages have `format`:
// docs/formats/keyspace.md. kInvalidArgument: an option that no field may hold.
absl::StatusOr<std::map<std::string, std::string>> KeyspaceFields(const WorkerOptions& options,
                                                                  kernels::PageFormat format);

// An id for pages that never leave this process.
absl::StatusOr<KeyspaceId> PrivateKeyspace(const WorkerOptions& options,
                                           kernels::PageFormat format);

}  // namespace crumb::client
