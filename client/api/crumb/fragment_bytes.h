// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/fragment_header.h"
#include "crumb/miss_reason.h"
#include "crumb/tier.h"

namespace crumb::client {

// A fragment that travels as bytes: for callers without shared memory.
struct FragmentBytes {
  int page = 0;                // Get: index into the keys
  Tier tier = Tier::kUnknown;  // Get: where it was found
  FragmentHeader header;
  std::string tiles;  // layer by layer, head by head
};

// Takes the fragments that Get reads, one by one, each checked against key, keyspace and sums. An
// error ends the Get and is returned by it.
using FragmentReceiver = std::function<absl::Status(FragmentBytes fragment)>;

}  // namespace crumb::client
