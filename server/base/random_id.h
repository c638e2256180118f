// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace crumb::server {

// 128 random bits: names an engine, or a session and entitles to it.
struct RandomId {
  std::array<uint8_t, 16> bytes{};

  // From the kernel's generator. kInternal when that fails.
  static absl::StatusOr<RandomId> Make();
  // kInvalidArgument unless 16 bytes.
  static absl::StatusOr<RandomId> FromBytes(std::string_view bytes);

  std::string_view view() const {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  // The first half: where a table looks for it. The whole is then compared with Matches.
  uint64_t slot() const {
    uint64_t word;
    std::memcpy(&word, bytes.data(), sizeof(word));
    return word;
  }
  // In a time that does not depend on the bytes.
  bool Matches(const RandomId& other) const;
};

}  // namespace crumb::server
