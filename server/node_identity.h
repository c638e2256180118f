// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "storage/tiered_store.h"

// The identity that a node keeps over restarts, in records of its store.
namespace crumb::server {

// A UUID, made the first time.
absl::StatusOr<std::string> NodeId(storage::TieredStore& store);

// Returns the secret behind tenants' salts: the content of `secret_file`, or without one a secret
// of this node, made the first time. kFailedPrecondition: the file is shorter than 16 bytes.
absl::StatusOr<std::string> TenantSecret(storage::TieredStore& store,
                                         const std::string& secret_file);

}  // namespace crumb::server
