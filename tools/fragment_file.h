// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/fragment_header.h"

namespace crumb::tools {

// A fragment as a file: its tiles and then its encoded header, the same bytes as on the wire
// (docs/formats/fragment.md).
struct FragmentFile {
  FragmentHeader header;
  std::vector<std::byte> tiles;
};

// Takes a whole fragment apart. The tiles' sums are not looked at. kDataLoss: no header is where
// one must be, or it is damaged or truncated; kFailedPrecondition: a later version wrote it.
absl::StatusOr<FragmentFile> ParseFragment(std::vector<std::byte> bytes);

// The same from a file. kNotFound, kFailedPrecondition: the file cannot be read; kInvalidArgument:
// it is larger than any fragment.
absl::StatusOr<FragmentFile> ReadFragmentFile(const std::string& path);

// Writes `header` behind `tiles`, replacing the file.
absl::Status WriteFragmentFile(const std::string& path, const FragmentHeader& header,
                               std::span<const std::byte> tiles);

}  // namespace crumb::tools
