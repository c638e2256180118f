// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace crumb::fuzz {

// Makes hostile inputs from well-formed ones, the same ones for a seed. Not thread-safe.
class Mutator {
 public:
  // `inputs` outlive this; there is one at least.
  Mutator(const std::vector<std::string>& inputs, uint32_t seed) : inputs_(inputs), random_(seed) {}

  // The next: an input with one to eight changes, never much longer than the longest.
  std::string Next();

 private:
  size_t Below(size_t bound) { return random_() % bound; }
  void Change(std::string& bytes);

  const std::vector<std::string>& inputs_;
  std::mt19937 random_;
};

}  // namespace crumb::fuzz
