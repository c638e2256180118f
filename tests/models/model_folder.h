// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/common/temporary_folder.h"

namespace crumb::models {

inline constexpr char kTinyLm[] = "models/data/tiny-lm";

// Reads a file of this repository; the tests run in its root.
std::string ReadText(const std::string& path);
nlohmann::json ReadJson(const std::string& path);

// A tensor of a safetensors file.
struct RawTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using RawTensors = std::map<std::string, RawTensor>;

// Returns the bytes of a safetensors file, written independently of the code under test.
RawTensors ParseSafetensors(const std::string& file);
std::string FormatSafetensors(const RawTensors& tensors);
// Returns a file with any header text and data, right or wrong.
std::string JoinSafetensors(const std::string& header, const std::string& data);

// Returns bf16 tensors as f32.
RawTensor WidenToF32(const RawTensor& tensor);

// A temporary model directory, which the destructor removes.
class ModelFolder {
 public:
  std::string path() const { return folder_.path(); }
  void Write(const std::string& name, const std::string& text) const;
  void Write(const std::string& name, const nlohmann::json& json) const;
  // Writes tiny-lm's file of that name.
  void CopyTiny(const std::string& name) const;

 private:
  const TemporaryFolder folder_;
};

}  // namespace crumb::models
