// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// The identity that a node keeps over restarts, in records of its store.

// Returns the node's id, a UUID that was made the first time. A node whose SSD folder is lost gets
// another one. Errors are those of the store's records.
absl::StatusOr<std::string> NodeId(storage::TieredStore& store);

// Returns the secret behind tenants' salts: the content of `secret_file`, or without one a secret
// of this node, made the first time. kFailedPrecondition: the file is shorter than 16 bytes.
absl::StatusOr<std::string> TenantSecret(storage::TieredStore& store,
                                         const std::string& secret_file);

// The epochs of deletions (storage::DeletionEpochs) over crashes of crumbd: a file beside its
// sockets, in a folder that a reboot may empty, because processes that use device pools don't
// outlive one either.

// Returns the epochs of a crumbd that starts. `takes_over`: it has the memory of the one before, so
// the epochs go on. Without a file, or with a damaged one, no epoch before is known. kInternal: the
// kernel gives no random number.
absl::StatusOr<storage::DeletionEpochs> NextEpochs(const std::string& path, bool takes_over);

// Writes the file, before the first deletion is served. If that fails, as on a full disk, the file
// is removed instead, and the next crumbd knows no epoch before its own; an error if it cannot be
// removed either: the next crumbd would take the one before this for its predecessor.
absl::Status WriteEpochs(const std::string& path, const storage::DeletionEpochs& epochs);

}  // namespace crumb::server
