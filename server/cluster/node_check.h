// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "crumb/v1/peer_service.pb.h"

namespace crumb::server {

// Checks whether two nodes can work together. kFailedPrecondition if they are of different
// clusters, have no wire version in common, have different page tiles, or have one id; the message
// names the reason and the remedy. A record without id, address or weight fails, too.
absl::Status CheckNode(const v1::NodeRecord& self, const v1::NodeRecord& other);

// Leaves those out that cannot work with `self`, and of two with one id the later one. Each of them
// is named in `refused`.
std::vector<v1::NodeRecord> UsableNodes(const v1::NodeRecord& self,
                                        const std::vector<v1::NodeRecord>& nodes,
                                        std::vector<std::string>* refused);

}  // namespace crumb::server
