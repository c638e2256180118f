// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/frame.h"
#include "transport/transport.h"
#include "transport/transport_options.h"

namespace crumb::transport {

// Opens a transport over UCX (docs/transport.md). `source` must outlive it; if it is null, every
// request is refused. kInvalidArgument: an option is out of range, or options.listen is not an
// address of this machine; kUnavailable: options.listen is in use; kFailedPrecondition: UCX has
// none of options.ucx_tls.
absl::StatusOr<std::unique_ptr<Transport>> OpenUcxTransport(TransportOptions options,
                                                            FragmentSource* source,
                                                            FrameVersions supported = {});

struct SelfTest {
  std::string description;  // result of Transport::Describe
  double gb_per_s = 0;      // 1e9 bytes per second, fetched and verified
};

// Fetches some megabytes between two transports of this process at the address of options.listen,
// on ports of their own. It takes a few hundredths of a second; crumbd logs the result when it
// starts. An error is one that would also keep this node from serving peers.
absl::StatusOr<SelfTest> RunSelfTest(const TransportOptions& options);

}  // namespace crumb::transport
