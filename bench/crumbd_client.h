// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/fragment_set.h"
#include "crumb/client.h"

namespace crumb::bench {

// kUnavailable, naming the folder: no crumbd answers there.
absl::StatusOr<std::unique_ptr<client::Client>> ConnectTo(const std::string& socket_dir,
                                                          uint64_t staging_bytes = 128 << 20);

// Opens the keyspace of `fragments` and binds it.
absl::Status BindKeyspace(client::Client& client, FragmentSet& fragments);

}  // namespace crumb::bench
