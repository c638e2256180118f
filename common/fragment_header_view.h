// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "common/fragment_header.h"

namespace crumb {

// An encoded header whose sums are read where they lie.
struct FragmentHeaderView {
  FragmentHeader header;                // without sums
  std::span<const uint32_t> tile_sums;  // in the encoded bytes
};

// As DecodeFragmentHeader. `bytes` begin at a multiple of four: kDataLoss otherwise.
absl::StatusOr<FragmentHeaderView> ViewFragmentHeader(std::span<const std::byte> bytes);

// As VerifyTileSums of a header with these sums.
absl::Status VerifyTileSums(const FragmentHeader& header, std::span<const uint32_t> sums,
                            std::span<const std::byte> tiles);

}  // namespace crumb
