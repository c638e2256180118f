// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "transport/fragment_source.h"
#include "transport/frame.h"
#include "transport/transport.h"
#include "transport/transport_options.h"

namespace crumb::server {

// The transport that options.listen asks for. `source` must outlive it.
absl::StatusOr<std::unique_ptr<transport::Transport>> OpenPeerTransport(
    const transport::TransportOptions& options, transport::FragmentSource& source,
    const transport::FrameVersions& speaks);

}  // namespace crumb::server
