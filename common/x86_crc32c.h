// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// CRC-32C by instructions of x86-64 CPUs, for common/crc32c.h; on other machines there are none.
namespace crumb {

// Continues `crc` over `size` bytes of `source` and, unless `target` is null, copies them there:
// each byte is read once. A CPU must have the instructions.
using X86Crc32c = uint32_t (*)(std::byte* target, const std::byte* source, size_t size,
                               uint32_t crc);

// The fastest versions that this CPU has instructions for; null where it lacks them.
X86Crc32c Sse42Crc32c();   // the crc32 instruction: 8 bytes each
X86Crc32c Avx512Crc32c();  // carry-less products of 64 bytes; short of 256 bytes as Sse42Crc32c

}  // namespace crumb
