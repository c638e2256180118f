// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/mutator.h"

#include <algorithm>

namespace crumb::fuzz {
namespace {

constexpr size_t kChangesMax = 8;
constexpr size_t kPieceMax = 64;
// Values at which counts, lengths and offsets break.
constexpr uint64_t kEdges[] = {0,          1,          0x7f,      0x80,       0xff,
                               0x7fff,     0x8000,     0xffff,    0x7fffffff, 0x80000000,
                               0xffffffff, 1ull << 32, INT64_MAX, 1ull << 63, UINT64_MAX};

}  // namespace

std::string Mutator::Next() {
  std::string bytes = inputs_[Below(inputs_.size())];
  for (size_t left = 1 + Below(kChangesMax); left > 0; --left) Change(bytes);
  return bytes;
}

void Mutator::Change(std::string& bytes) {
  if (bytes.empty()) bytes.push_back(static_cast<char>(Below(256)));
  const size_t at = Below(bytes.size());
  const size_t piece = 1 + Below(std::min(kPieceMax, bytes.size() - at));
  switch (Below(8)) {
    case 0:
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << Below(8)));
      break;
    case 1:
      bytes[at] = static_cast<char>(Below(256));
      break;
    case 2: {  // a number of one, two, four or eight bytes
      const uint64_t edge = kEdges[Below(std::size(kEdges))];
      const size_t size = std::min(size_t{1} << Below(4), bytes.size() - at);
      for (size_t i = 0; i < size; ++i) bytes[at + i] = static_cast<char>(edge >> (8 * i));
      break;
    }
    case 3:
      bytes.resize(at);
      break;
    case 4:
      bytes.erase(at, piece);
      break;
    case 5:
      bytes.insert(at, bytes.substr(at, piece));
      break;
    case 6: {  // a piece of another input
      const std::string& other = inputs_[Below(inputs_.size())];
      if (other.empty()) break;
      const size_t from = Below(other.size());
      const std::string taken = other.substr(from, piece);
      bytes.replace(at, std::min(taken.size(), bytes.size() - at), taken);
      break;
    }
    default:  // one more or one less
      bytes[at] = static_cast<char>(bytes[at] + (Below(2) == 0 ? 1 : -1));
  }
}

}  // namespace crumb::fuzz
