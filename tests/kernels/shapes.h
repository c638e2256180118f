// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu_isa.h"
#include "kernels/tile.h"

namespace crumb::kernels {

// Every valid shape.
inline std::vector<TileShape> AllShapes() {
  std::vector<TileShape> shapes;
  for (const int tokens : {32, 64, 128}) {
    for (const int head_dim : {64, 128, 256}) {
      for (const int group_size : {32, 64, 128}) {
        const TileShape shape{tokens, head_dim, group_size};
        if (shape.Valid()) shapes.push_back(shape);
      }
    }
  }
  return shapes;
}

inline std::string Name(const TileShape& shape) {
  return "tokens " + std::to_string(shape.tokens) + " head_dim " + std::to_string(shape.head_dim) +
         " group " + std::to_string(shape.group_size);
}

inline constexpr CpuIsa kAllIsas[] = {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512,
                                      CpuIsa::kAvx512Vnni};

// Restores the active instruction set at the end of a test.
class IsaScope {
 public:
  IsaScope() : before_(ActiveCpuIsa()) {}
  ~IsaScope() { SelectCpuIsa(before_); }
  IsaScope(const IsaScope&) = delete;
  IsaScope& operator=(const IsaScope&) = delete;

 private:
  CpuIsa before_;
};

// 64-bit FNV-1a, the digest of the golden tiles.
inline uint64_t Fnv1a(const uint8_t* bytes, size_t size) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  return hash;
}

}  // namespace crumb::kernels
