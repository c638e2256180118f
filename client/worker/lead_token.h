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

// LeadToken is the content of a token that Worker::Lead creates for the other ranks of its engine:
// the keyspace, the cached prefix and the lease that holds it. All ranks must have one version.
//
// A damaged token cannot be mistaken for another one: it has a magic number, a version and a
// CRC-32C. It has 172 bytes and one more for each cached page. Transfer uses tokens of the same
// form to name a keyspace (without lease and tiers) or a leased prefix.
struct LeadToken {
  KeyspaceId model;  // the private keyspace, which is equal for all ranks of a replica
  KeyspaceBinding keyspace;
  uint64_t lease = 0;       // 0: none
  std::vector<Tier> tiers;  // one per cached page, in order
  PageKey last_key;         // key of the last cached page; zeros if there is none
};

std::string EncodeLeadToken(const LeadToken& token);

// kDataLoss: the bytes are no token, damaged or truncated; kFailedPrecondition: the token has
// another version.
absl::StatusOr<LeadToken> DecodeLeadToken(std::string_view bytes);

}  // namespace crumb::client
