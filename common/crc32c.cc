// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/crc32c.h"

#include <array>
#include <cstring>

#include "common/x86_crc32c.h"

namespace crumb {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? kPolynomial : 0);
    table[i] = value;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = MakeTable();

// The fastest of this CPU; null: by table.
X86Crc32c Fastest() {
  static const X86Crc32c fastest = Avx512Crc32c() != nullptr ? Avx512Crc32c() : Sse42Crc32c();
  return fastest;
}

}  // namespace

uint32_t Crc32cPortable(std::span<const std::byte> bytes, uint32_t crc) {
  crc = ~crc;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint32_t>(byte)) & 0xFF];
  }
  return ~crc;
}

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc) {
  if (const X86Crc32c fast = Fastest()) return fast(nullptr, bytes.data(), bytes.size(), crc);
  return Crc32cPortable(bytes, crc);
}

uint32_t CopyCrc32c(std::byte* target, std::span<const std::byte> source) {
  if (const X86Crc32c fast = Fastest()) return fast(target, source.data(), source.size(), 0);
  std::memcpy(target, source.data(), source.size());
  return Crc32cPortable({target, source.size()});
}

}  // namespace crumb
