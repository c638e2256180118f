// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstring>

// The formats are little-endian and so is every machine Crumb runs on.
namespace crumb {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

template <std::integral T>
void StoreLittle(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(value));
}

template <std::integral T>
T LoadLittle(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

}  // namespace crumb
