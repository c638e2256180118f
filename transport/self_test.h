// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "transport/transport_options.h"

namespace crumb::transport {

struct SelfTest {
  std::string description;  // as Transport::Describe
  double gb_per_s = 0;      // fetched and verified, 1e9 bytes
};

// Fetches some megabytes through two transports of this process at options.listen's address, on
// ports of their own. Takes a few hundredths of a second; for the log at start. An error says why
// peers could not be served either.
absl::StatusOr<SelfTest> RunSelfTest(const TransportOptions& options);

}  // namespace crumb::transport
