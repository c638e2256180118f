// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/models/model_folder.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

namespace crumb::models {

std::string ReadText(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

nlohmann::json ReadJson(const std::string& path) { return nlohmann::json::parse(ReadText(path)); }

RawTensors ParseSafetensors(const std::string& file) {
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof(length));
  const nlohmann::json header = nlohmann::json::parse(file.substr(8, length));
  RawTensors tensors;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") continue;
    const uint64_t begin = value["data_offsets"][0];
    const uint64_t end = value["data_offsets"][1];
    tensors[name] = {value["dtype"], value["shape"], file.substr(8 + length + begin, end - begin)};
  }
  return tensors;
}

std::string FormatSafetensors(const RawTensors& tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  return JoinSafetensors(header.dump(), data);
}

std::string JoinSafetensors(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string file(sizeof(length), '\0');
  std::memcpy(file.data(), &length, sizeof(length));
  return file + header + data;
}

RawTensor WidenToF32(const RawTensor& tensor) {
  RawTensor wide{"F32", tensor.shape, {}};
  for (size_t i = 0; i < tensor.bytes.size(); i += 2) {
    wide.bytes += std::string(2, '\0') + tensor.bytes.substr(i, 2);
  }
  return wide;
}

void ModelFolder::Write(const std::string& name, const std::string& text) const {
  std::ofstream(folder_.File(name), std::ios::binary) << text;
}

void ModelFolder::Write(const std::string& name, const nlohmann::json& json) const {
  Write(name, json.dump());
}

void ModelFolder::CopyTiny(const std::string& name) const {
  Write(name, ReadText(std::string(kTinyLm) + "/" + name));
}

}  // namespace crumb::models
