// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "common/page_key.h"
#include "crumb/worker_options.h"
#include "kernels/tile.h"

namespace crumb::client {

// The keyspace that sequences begun at one time use.
struct KeyspaceBinding {
  KeyspaceId id;
  KeyspaceId watched;  // whose state decides whether new sequences store INT2
  kernels::PageFormat history_format = kernels::PageFormat::kInt2;
  bool known_to_crumbd = false;  // false: the id is this process's own, for sharing in the worker
  uint64_t generation = 0;
  uint64_t epoch = 0;  // of crumbd when it answered the id
};

// The keyspace fields that the client names for a worker whose history pages have `format`:
// docs/formats/keyspace.md. kInvalidArgument: an option that no field may hold.
absl::StatusOr<std::map<std::string, std::string>> KeyspaceFields(const WorkerOptions& options,
                                                                  kernels::PageFormat format);

// An id for pages that never leave this process.
absl::StatusOr<KeyspaceId> PrivateKeyspace(const WorkerOptions& options,
                                           kernels::PageFormat format);

}  // namespace crumb::client
