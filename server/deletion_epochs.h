// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/deletion_epochs.h"

// The epochs of deletions (storage::DeletionEpochs) over crashes of crumbd: a file beside its
// sockets, in a folder that a reboot may empty, because processes that use device pools don't
// outlive one either.
namespace crumb::server {

// Returns the epochs of a crumbd that starts. `takes_over`: it has the memory of the one before, so
// the epochs go on. Without a file, or with a damaged one, no epoch before is known. kInternal: the
// kernel gives no random number.
absl::StatusOr<storage::DeletionEpochs> NextEpochs(const std::string& path, bool takes_over);

// Writes the file, before the first deletion is served. If that fails, as on a full disk, the file
// is removed instead, and the next crumbd knows no epoch before its own; an error if it cannot be
// removed either: the next crumbd would take the one before this for its predecessor.
absl::Status WriteEpochs(const std::string& path, const storage::DeletionEpochs& epochs);

}  // namespace crumb::server
