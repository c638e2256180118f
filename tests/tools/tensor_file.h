// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "calibration/linear_weight.h"
#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/fp8.h"
#include "nlohmann/json.hpp"

namespace crumb::tools {

// Tensors by name, which are written as a safetensors file.
struct TensorFile {
  struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;
  };
  std::map<std::string, Entry> tensors;
  std::map<std::string, std::string> metadata;

  // Adds floats, rounded to `dtype`: BF16, F16, F32 or F8_E4M3.
  void Add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
           const std::vector<float>& values) {
    std::string bytes;
    for (const float value : values) AppendFloat(dtype, value, bytes);
    tensors[name] = {dtype, std::move(shape), std::move(bytes)};
  }
  void AddPositions(const std::string& name, const std::vector<int64_t>& values,
                    const std::string& dtype = "I64") {
    std::string bytes;
    for (const int64_t value : values) {
      bytes.append(reinterpret_cast<const char*>(&value), dtype == "I64" ? 8 : 4);
    }
    tensors[name] = {dtype, {static_cast<int64_t>(values.size())}, std::move(bytes)};
  }

  void Write(const std::string& path) const {
    nlohmann::json header = nlohmann::json::object();
    if (!metadata.empty()) header["__metadata__"] = metadata;
    size_t end = 0;
    for (const auto& [name, entry] : tensors) {
      header[name] = {{"dtype", entry.dtype},
                      {"shape", entry.shape},
                      {"data_offsets", {end, end + entry.bytes.size()}}};
      end += entry.bytes.size();
    }
    const std::string text = header.dump();
    const uint64_t length = text.size();
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char*>(&length), sizeof(length));
    out << text;
    for (const auto& [name, entry] : tensors) out << entry.bytes;
  }

 private:
  static void AppendFloat(const std::string& dtype, float value, std::string& out) {
    if (dtype == "F32") {
      out.append(reinterpret_cast<const char*>(&value), sizeof(value));
    } else if (dtype == "F8_E4M3") {
      out += static_cast<char>(kernels::Fp8FromFloat(value));
    } else {
      bool saturated = false;
      const uint16_t bits = dtype == "BF16" ? kernels::Bf16FromFloat(value).bits
                                            : kernels::Fp16FromFloat(value, &saturated);
      out.append(reinterpret_cast<const char*>(&bits), sizeof(bits));
    }
  }
};

}  // namespace crumb::tools
