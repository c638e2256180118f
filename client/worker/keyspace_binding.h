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

// The keyspace of sequences, as it was when they began. See KeyspaceBinder for its states.
//
// Shared and immutable: a sequence, its queued pages and its token refer to one binding, even after
// the worker has opened the keyspace again.
struct KeyspaceBinding {
  KeyspaceId id;
  KeyspaceId watched;  // the keyspace whose state decides whether new sequences store INT2
  kernels::PageFormat history_format = kernels::PageFormat::kInt2;
  bool known_to_crumbd = false;  // false: the id is private to this process
  uint64_t generation = 0;
  uint64_t epoch = 0;  // epoch of the crumbd that returned the id
};

// Returns the keyspace fields of a worker whose history pages have `format`: see
// docs/formats/keyspace.md. kInvalidArgument: a field may not hold the value of an option.
absl::StatusOr<std::map<std::string, std::string>> KeyspaceFields(const WorkerOptions& options,
                                                                  kernels::PageFormat format);

// Returns an id for pages that never leave this process.
absl::StatusOr<KeyspaceId> PrivateKeyspace(const WorkerOptions& options,
                                           kernels::PageFormat format);

}  // namespace crumb::client
