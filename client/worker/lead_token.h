// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/worker/keyspace_binding.h"
#include "common/page_key.h"
#include "crumb/acquire.h"

namespace crumb::client {

// What Worker::Lead tells the other ranks of its engine: the keyspace, the cached prefix and the
// lease that holds it. Between processes of one version only.
struct LeadToken {
  KeyspaceId model;  // the private keyspace: equal for all ranks of a replica
  KeyspaceBinding keyspace;
  uint64_t lease = 0;       // 0: none
  std::vector<Tier> tiers;  // of the cached pages, in order
  PageKey last_key;         // of the last cached page; zeros without any
};

std::string EncodeLeadToken(const LeadToken& token);

// kDataLoss: not a token, damaged or cut short; kFailedPrecondition: another version's.
absl::StatusOr<LeadToken> DecodeLeadToken(std::string_view bytes);

}  // namespace crumb::client
