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

// A fragment file: the tiles followed by the encoded header, the same bytes as on the wire
// (docs/formats/fragment.md).
struct FragmentFile {
  FragmentHeader header;
  std::vector<std::byte> tiles;
};

// Splits a fragment into header and tiles, without verifying the tiles' checksums. kDataLoss: there
// is no header, or it is damaged or truncated; kFailedPrecondition: a later version wrote it.
absl::StatusOr<FragmentFile> ParseFragment(std::vector<std::byte> bytes);

// Reads a fragment file; errors are those of ParseFragment and the following. kNotFound,
// kFailedPrecondition: the file cannot be read; kInvalidArgument: it is larger than any fragment.
absl::StatusOr<FragmentFile> ReadFragmentFile(const std::string& path);

// Writes `tiles` and then `header`, replacing the file.
absl::Status WriteFragmentFile(const std::string& path, const FragmentHeader& header,
                               std::span<const std::byte> tiles);

}  // namespace crumb::tools
