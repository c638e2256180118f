// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/mapping.h"
#include "common/tensor.h"

namespace crumb {

// One .safetensors file, mapped. Its tensors borrow the mapping. Immutable, so thread-safe. The
// file must not shrink while it is open.
class SafetensorsFile {
 public:
  // Checks the header against the file: every tensor's range lies inside, has the size its shape
  // and dtype say, and the ranges cover the data without gap or overlap. kInvalidArgument names the
  // file and the tensor; kNotFound: no such file. Tensors of dtypes we cannot use are
  // accepted here and refused by Find.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);

  const std::string& path() const { return path_; }
  std::vector<std::string> names() const;
  // The entries of the header's __metadata__.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool Has(const std::string& name) const { return entries_.contains(name); }
  // kNotFound: no such tensor; kInvalidArgument: its dtype is none of DType.
  absl::StatusOr<Tensor> Find(const std::string& name) const;
  // Finds a tensor of any dtype. kNotFound: no such tensor.
  absl::StatusOr<RawTensor> FindRaw(const std::string& name) const;
  // Takes the pages of `bytes`, a part of this file's mapping, off this process's memory; they are
  // read again when they are touched again.
  void ReleasePages(std::span<const std::byte> bytes) const;

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
  std::map<std::string, std::string> metadata_;
};

}  // namespace crumb
