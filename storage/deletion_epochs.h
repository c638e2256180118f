// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace crumb::storage {

// The deletions of which a node knows. A process that uses a device pool survives crashes of
// crumbd, and says afterwards which pages lie in its slots. Pages that were deleted while it was
// away must not be served from there. The device tier notes deleted pages in memory, and a crash
// loses the notes.
//
// An epoch is the time over which such notes are kept: it begins when crumbd starts without the
// memory of another, and ends with the crash of the last crumbd to which that memory was handed
// over. A pool's roster has the epoch in which all processes of the pool had last said what they
// hold. If that is the current epoch or the one before, no deletion was missed: those of the
// current epoch are noted, and those of the one before removed the pages from the pool, or marked
// their slots in the roster. With any older epoch, slots are claimed without their pages.
struct DeletionEpochs {
  uint64_t current = 1;  // not 0
  uint64_t previous = 1;

  bool Knows(uint64_t epoch) const { return epoch == current || epoch == previous; }
};

}  // namespace crumb::storage
