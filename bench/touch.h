// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace crumb::bench {

// Reads every byte once and returns a sum of them, so that the reads cannot be left out. Runs at
// memory speed.
uint64_t TouchBytes(std::span<const std::byte> bytes);

// Makes the compiler believe that `value` is used.
inline void KeepResult(uint64_t value) { asm volatile("" : : "r"(value) : "memory"); }

}  // namespace crumb::bench
