// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace crumb {

// Element types that tensors may have.
enum class DType { kBf16, kF16, kF32 };

constexpr size_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }
// The name in safetensors files: "BF16", "F16", "F32".
constexpr std::string_view DTypeName(DType dtype) {
  return dtype == DType::kBf16 ? "BF16" : dtype == DType::kF16 ? "F16" : "F32";
}

// A tensor inside a mapped file. Borrows the file's bytes, which need not be aligned.
struct Tensor {
  std::string name;
  std::string file;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // row-major, little-endian
};

// A tensor of any dtype that a safetensors file may have, "F8_E4M3" or "I64" too. Borrows as
// Tensor.
struct RawTensor {
  std::string name;
  std::string file;
  std::string dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
  int64_t file_offset = 0;  // offset of the first byte
};

// "[2, 3]".
inline std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

}  // namespace crumb
