// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace crumb::storage {

// A vector that grows a chunk at a time and moves no element: growing costs O(chunk), never
// O(size), so it may grow under a lock that others wait for. References stay valid until the vector
// goes. Not thread-safe.
template <typename T>
class ChunkedVector {
 public:
  static constexpr size_t kChunk = 1024;  // elements; a power of two

  T& operator[](size_t i) { return chunks_[i / kChunk][i % kChunk]; }
  const T& operator[](size_t i) const { return chunks_[i / kChunk][i % kChunk]; }
  size_t size() const { return size_; }

  // Appends default elements until there are `size`; never shrinks.
  void GrowTo(size_t size) {
    if (size <= size_) return;
    while (chunks_.size() * kChunk < size) chunks_.push_back(std::make_unique<T[]>(kChunk));
    size_ = size;
  }
  T& Append() {
    GrowTo(size_ + 1);
    return (*this)[size_ - 1];
  }
  size_t MemoryBytes() const {
    return chunks_.size() * kChunk * sizeof(T) + chunks_.capacity() * sizeof(chunks_[0]);
  }

 private:
  std::vector<std::unique_ptr<T[]>> chunks_;
  size_t size_ = 0;
};

}  // namespace crumb::storage
