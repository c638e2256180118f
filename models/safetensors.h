// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/mapping.h"
#include "models/tensor.h"

namespace crumb::models {

// One .safetensors file, mapped. Its tensors borrow the mapping. Immutable, so thread-safe. The
// file must not shrink while it is open.
class SafetensorsFile {
 public:
  // Checks the header against the file: every tensor's range lies inside, has the size its shape
  // and dtype say, and the ranges cover the data without gap or overlap. kInvalidArgument names the
  // file and the tensor; kNotFound: no such file. Tensors of dtypes the engine cannot use are
  // accepted here and refused by Find.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;
  bool Has(const std::string& name) const { return entries_.contains(name); }
  // kNotFound: no such tensor; kInvalidArgument: its dtype is none of DType.
  absl::StatusOr<Tensor> Find(const std::string& name) const;

 private:
  struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    int64_t begin = 0;  // bytes from the end of the header
    int64_t end = 0;
  };

  explicit SafetensorsFile(std::string path) : path_(std::move(path)) {}
  absl::Status Map();
  absl::Status ReadHeader();
  absl::Status CheckRanges() const;

  const std::string path_;
  Mapping mapping_;
  std::span<const std::byte> data_;
  std::map<std::string, Entry> entries_;
};

// The weights of a model directory: model.safetensors, or the shards that
// model.safetensors.index.json names. Immutable, so thread-safe.
class Checkpoint {
 public:
  // kNotFound: neither file is there, or a shard is missing. kInvalidArgument: a file is damaged or
  // the index points outside the directory.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& dir);

  bool Has(const std::string& name) const { return file_of_.contains(name); }
  // The tensor, whose shape must be `shape`. kNotFound names the tensor and the directory;
  // kInvalidArgument names tensor, file and both shapes. Valid while the checkpoint lives.
  absl::StatusOr<Tensor> Find(const std::string& name, const std::vector<int64_t>& shape) const;

 private:
  explicit Checkpoint(std::string dir) : dir_(std::move(dir)) {}
  absl::Status OpenSingle(const std::string& path);
  absl::Status OpenShards(const std::string& index_path);

  const std::string dir_;
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*> file_of_;
};

}  // namespace crumb::models
