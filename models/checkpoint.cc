// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/checkpoint.h"

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/json_file.h"
#include "common/status_macros.h"

namespace crumb::models {

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& dir) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint(dir));
  const std::string single = dir + "/model.safetensors";
  const std::string index = dir + "/model.safetensors.index.json";
  std::error_code error;
  if (std::filesystem::exists(index, error)) {
    CRUMB_RETURN_IF_ERROR(checkpoint->OpenShards(index));
  } else if (std::filesystem::exists(single, error)) {
    CRUMB_RETURN_IF_ERROR(checkpoint->OpenSingle(single));
  } else {
    return absl::NotFoundError(
        absl::StrCat(dir, ": neither model.safetensors nor model.safetensors.index.json is there"));
  }
  return checkpoint;
}

absl::Status Checkpoint::OpenSingle(const std::string& path) {
  CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
  for (const std::string& name : file->names()) file_of_[name] = file.get();
  files_[path] = std::move(file);
  return absl::OkStatus();
}

absl::Status Checkpoint::OpenShards(const std::string& index_path) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json index, ReadJsonObject(index_path));
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* map, ObjectField(index, "weight_map", index_path));
  for (const auto& [name, value] : map->items()) {
    CRUMB_ASSIGN_OR_RETURN(const std::string shard, StringField(*map, name, index_path));
    if (shard.empty() || shard == "." || shard == ".." || shard.find('/') != std::string::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat(index_path, ": shard \"", shard, "\" is not a file name"));
    }
    const std::string path = dir_ + "/" + shard;
    if (!files_.contains(path)) {
      auto file = SafetensorsFile::Open(path);
      if (absl::IsNotFound(file.status())) {
        return absl::NotFoundError(absl::StrCat(path, ": this shard is missing, which ", index_path,
                                                " names for tensor ", name));
      }
      CRUMB_ASSIGN_OR_RETURN(files_[path], std::move(file));
    }
    if (!files_[path]->Has(name)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": no tensor ", name, ", which the index says is there"));
    }
    file_of_[name] = files_[path].get();
  }
  return absl::OkStatus();
}

absl::StatusOr<Tensor> Checkpoint::Find(const std::string& name,
                                        const std::vector<int64_t>& shape) const {
  const auto it = file_of_.find(name);
  if (it == file_of_.end()) {
    return absl::NotFoundError(absl::StrCat(dir_, ": the weights lack tensor ", name));
  }
  CRUMB_ASSIGN_OR_RETURN(Tensor tensor, it->second->Find(name));
  if (tensor.shape != shape) {
    return absl::InvalidArgumentError(absl::StrCat(tensor.file, ": tensor ", name, ": shape ",
                                                   ShapeText(tensor.shape),
                                                   ", config.json requires ", ShapeText(shape)));
  }
  return tensor;
}

absl::StatusOr<RawTensor> Checkpoint::FindRaw(const std::string& name) const {
  const auto it = file_of_.find(name);
  if (it != file_of_.end()) return it->second->FindRaw(name);
  return absl::NotFoundError(absl::StrCat(dir_, ": the weights lack tensor ", name));
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : file_of_) names.push_back(name);
  return names;
}

void Checkpoint::ReleasePages(const RawTensor& tensor) const {
  const auto it = file_of_.find(tensor.name);
  if (it != file_of_.end()) it->second->ReleasePages(tensor.bytes);
}

}  // namespace crumb::models
