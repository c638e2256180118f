// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <span>
#include <string>
#include <vector>

namespace crumb::calibration {

// Writes a ZIP archive of stored entries, each entry's bytes at a multiple of 64, as PyTorch wants
// them. Errors show in the stream.
class ZipWriter {
 public:
  // `out` is borrowed and stands at its beginning.
  explicit ZipWriter(std::ostream& out) : out_(out) {}

  void Add(const std::string& name, std::span<const std::byte> bytes);
  void Add(const std::string& name, const std::string& text);
  // Writes the directory; nothing may be added afterwards.
  void Finish();

 private:
  void Put(const std::string& bytes);

  std::ostream& out_;
  uint64_t offset_ = 0;
  uint64_t entries_ = 0;
  std::string directory_;
};

}  // namespace crumb::calibration
