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

// 128 random bits: names an engine, or a session and entitles to it. Tables find an id by its first
// half (slot) and compare the whole with Matches, so that the time of a look-up reveals nothing
// about the ids that exist.
struct RandomId {
  std::array<uint8_t, 16> bytes{};

  // Returns 16 bytes of the kernel's random generator. kInternal: that failed.
  static absl::StatusOr<RandomId> Make();
  // Returns the id of these bytes. kInvalidArgument: they are not 16.
  static absl::StatusOr<RandomId> FromBytes(std::string_view bytes);

  // Returns the 16 bytes, which live as long as this.
  std::string_view view() const {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  // The first half: where a table looks for it. The whole is then compared with Matches.
  uint64_t slot() const {
    uint64_t word;
    std::memcpy(&word, bytes.data(), sizeof(word));
    return word;
  }
  // Returns whether all bytes are equal, in a time that does not depend on them.
  bool Matches(const RandomId& other) const;
};

}  // namespace crumb::server
