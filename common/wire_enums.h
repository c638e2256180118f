// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

// The enums that client, server and storage share. Their values are those of the protocol
// (proto/crumb/v1) and of the C interface (client/api/crumb.h), so they are frozen:
// tests/common/wire_enums_test.cc compares all three.
namespace crumb {

// Tier is the kind of memory in which a page was found.
enum class Tier : uint8_t {
  kUnknown = 0,
  kDevice = 1,
  kHost = 2,
  kSsd = 3,
  kRemote = 4,  // another node has the page
};

std::string_view TierName(Tier tier);

// MissReason says why a page was not served. Values up to kBusy are those of the protocol.
enum class MissReason : uint8_t {
  kNone = 0,          // the page was served
  kAbsent = 1,        // no process committed the page, or it was evicted
  kPending = 2,       // another process is committing the page
  kDeadline = 3,      // the page was not brought up from a lower tier in time
  kCorrupt = 4,       // the header or a checksum differs, so the copy is not used
  kGeneration = 5,    // the page belongs to a dropped generation of the keyspace
  kQuality = 6,       // the keyspace is served in BF16 only
  kNotCovered = 7,    // some of the requested layers and heads are missing
  kBusy = 8,          // there is no room to bring the page up, or the lease budget is spent
  kUnavailable = 64,  // a client alone reports it: there is no crumbd, or it did not respond
};

std::string_view MissReasonName(MissReason reason);

// CommitOutcome is the result for one committed fragment.
enum class CommitOutcome : uint8_t {
  kUnknown = 0,
  kStored = 1,
  kDeduplicated = 2,  // the tiles are in the cache already; the first copy stays
  kRefused = 3,       // the header, checksums, keyspace or size are wrong
  kNoRoom = 4,        // every tier is full of leased pages
};

// KeyspaceState says whether crumbd serves INT2 pages of a keyspace.
enum class KeyspaceState : uint8_t {
  kUnknown = 0,
  kActive = 1,
  kBf16 = 2,  // INT2 pages are misses with reason kQuality
};

}  // namespace crumb
