// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Returns element `index` of an array at `array`, which may be unaligned.
template <typename T>
T LoadElement(const std::byte* array, int64_t index) {
  static_assert(std::is_arithmetic_v<T>);
  T value;
  std::memcpy(&value, array + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

}  // namespace crumb
