// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/peer_transport.h"

#include "transport/ucx_transport.h"

namespace crumb::server {

absl::StatusOr<std::unique_ptr<transport::Transport>> OpenPeerTransport(
    const transport::TransportOptions& options, transport::FragmentSource& source,
    const transport::FrameVersions& speaks) {
  return transport::OpenUcxTransport(options, &source, speaks);
}

}  // namespace crumb::server
