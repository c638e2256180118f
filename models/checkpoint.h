// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/safetensors.h"

namespace crumb::models {

// The weights of a model directory: model.safetensors, or the shards that are listed in
// model.safetensors.index.json. Immutable, so thread-safe.
class Checkpoint {
 public:
  // kNotFound: neither file exists, or a shard is missing. kInvalidArgument: a file is damaged, or
  // the index names a file outside the directory.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& dir);

  // Returns whether there is a tensor of that name.
  bool Has(const std::string& name) const { return file_of_.contains(name); }
  // Returns a tensor, which is valid while the checkpoint lives. kNotFound: no such tensor;
  // kInvalidArgument: its shape is not `shape`.
  absl::StatusOr<Tensor> Find(const std::string& name, const std::vector<int64_t>& shape) const;
  // Returns a tensor of any dtype and shape.
  absl::StatusOr<RawTensor> FindRaw(const std::string& name) const;
  // Returns the names of all tensors, sorted.
  std::vector<std::string> names() const;
  // Calls SafetensorsFile::ReleasePages for the tensor's bytes.
  void ReleasePages(const RawTensor& tensor) const;

 private:
  explicit Checkpoint(std::string dir) : dir_(std::move(dir)) {}
  // Open model.safetensors, or the shards that an index lists.
  absl::Status OpenSingle(const std::string& path);
  absl::Status OpenShards(const std::string& index_path);

  const std::string dir_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*> file_of_;
};

}  // namespace crumb::models
