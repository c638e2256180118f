// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/wire_enums.h"
#include "crumb/v1/cache_service.pb.h"

// The enums of common/wire_enums.h as messages have them: the same numbers under generated types.
namespace crumb::server {

// Returns the same tier under the generated type.
constexpr v1::Tier ToProto(Tier tier) { return static_cast<v1::Tier>(tier); }

// REQUIRES: `reason` is not kUnavailable, which no crumbd sends.
constexpr v1::MissReason ToProto(MissReason reason) { return static_cast<v1::MissReason>(reason); }

// Returns the same state under the generated type.
constexpr v1::KeyspaceState ToProto(KeyspaceState state) {
  return static_cast<v1::KeyspaceState>(state);
}

}  // namespace crumb::server
