// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "transport/frame.h"
#include "transport/transport.h"

namespace crumb::transport {

// Opens a transport over UCX: docs/transport.md. `source` may be null, then it serves nothing; it
// outlives the transport. kInvalidArgument: an option, or listen is no address of this machine;
// kUnavailable: listen is taken; kFailedPrecondition: UCX has none of options.ucx_tls.
absl::StatusOr<std::unique_ptr<Transport>> OpenUcxTransport(TransportOptions options,
                                                            FragmentSource* source,
                                                            FrameVersions speaks = {});

}  // namespace crumb::transport
