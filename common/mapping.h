// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace crumb {

// A shared mapping of a descriptor's first `size` bytes; unmapped on destruction. Move-only.
class Mapping {
 public:
  enum class Access { kReadOnly, kReadWrite };

  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  static absl::StatusOr<Mapping> Of(int fd, size_t size, Access access);

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return size_; }
  bool valid() const { return data_ != nullptr; }
  std::span<std::byte> bytes() const { return {data(), size_}; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// An anonymous memory file of `size` bytes that allows seals, named for /proc/<pid>/fd. Its mode is
// 0600, so that other users cannot open it again through /proc.
absl::StatusOr<UniqueFd> CreateMemfd(const std::string& name, size_t size);

}  // namespace crumb
