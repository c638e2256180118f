// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "calibration/pickle.h"
#include "calibration/zip_archive.h"

namespace crumb::calibration {

// A tensor of a torch file, its values as floats.
struct TorchTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;  // row-major
};

// A file that torch.save wrote: a ZIP archive of a pickle and the bytes of the tensors. Nothing in
// it is executed. Immutable, so thread-safe.
class TorchFile {
 public:
  // kNotFound: no such file. kInvalidArgument, kDataLoss: the file is malformed or damaged; the
  // message names file and entry.
  static absl::StatusOr<std::unique_ptr<TorchFile>> Open(const std::string& path);

  const std::string& path() const { return path_; }
  const Pickle& pickle() const { return *pickle_; }
  // Returns `value` as a contiguous tensor of at most `elements_max` elements of f64, f32, f16 or
  // bf16. Messages call it `name`. kInvalidArgument: it is no such tensor; kDataLoss: its bytes are
  // damaged.
  absl::StatusOr<TorchTensor> TensorOf(const PickleValue& value, int64_t elements_max,
                                       const std::string& name) const;

 private:
  explicit TorchFile(std::string path) : path_(std::move(path)) {}
  absl::Status Load();
  struct Storage {
    std::string type;
    int64_t element_bytes = 0;
    std::span<const std::byte> bytes;
  };
  absl::StatusOr<Storage> StorageOf(const PickleValue& persistent, const std::string& name) const;

  const std::string path_;
  std::string bytes_;
  std::string prefix_;  // prefix of all entries: the name under which it was saved, and a slash
  std::unique_ptr<ZipArchive> archive_;
  std::unique_ptr<Pickle> pickle_;
};

}  // namespace crumb::calibration
