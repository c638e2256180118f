// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bench/fragment_set.h"
#include "bench/store_plane.h"

namespace crumb::bench {

// SET and GET of whole fragments at a Redis server, one request at a time. Borrows `fragments`.
absl::StatusOr<std::unique_ptr<StorePlane>> OpenRedisPlane(const std::string& host, int port,
                                                           const FragmentSet& fragments);

}  // namespace crumb::bench
