// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/block_trace.h"

// Families of synthetic traces on which an eviction policy must not be worse than others. The same
// family and seed yield the same trace on every machine.
namespace crumb::bench {

//   zipf    40,000 prompts out of 4,000 documents of 1 to 16 blocks, by Zipf's law, exponent 0.9
//   scan    like zipf over 1,000 documents, and after every 500 prompts 100 of 32 blocks that occur
//           only once
//   loop    300 documents of 1 to 16 blocks, read in the same order 40 times
//   chats   6,000 conversations of 1 to 30 turns behind 8 shared beginnings; a turn adds 1 to 8
//           blocks; the next comes after 10 to 2,000 other prompts, log-uniformly
//   drift   like zipf, but every 4,000 prompts a quarter of the documents swap their popularity
std::vector<std::string> SyntheticFamilyNames();

// kInvalidArgument: the family is unknown; the message lists the known ones.
absl::StatusOr<BlockTrace> MakeSyntheticTrace(std::string_view family, uint64_t seed);

// The trace of a file or of a synthetic family. kInvalidArgument: both or neither are named.
absl::StatusOr<BlockTrace> LoadTrace(const std::string& path, const std::string& family,
                                     uint64_t seed);

}  // namespace crumb::bench
