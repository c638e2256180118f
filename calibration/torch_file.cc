// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/torch_file.h"

#include <utility>

#include "common/json_file.h"
#include "common/little_endian.h"
#include "common/status_macros.h"
#include "common/tensor.h"
#include "fmt/format.h"
#include "kernels/bf16.h"
#include "kernels/fp16.h"

namespace crumb::calibration {
namespace {

using Kind = PickleValue::Kind;

// The largest file that is read into memory, in bytes. The rotations of 100 layers with 64 KV heads
// and head_dim 128 take 420 MB.
constexpr int64_t kFileBytesMax = int64_t{4} << 30;
constexpr char kRebuild[] = "torch._utils _rebuild_tensor_v2";
// Dimensions of a tensor; rotations have 2 to 4.
constexpr size_t kDimensionsMax = 8;

struct StorageType {
  const char* name;
  int64_t bytes;  // size of one element
};
constexpr StorageType kStorageTypes[] = {{"torch DoubleStorage", 8},
                                         {"torch FloatStorage", 4},
                                         {"torch HalfStorage", 2},
                                         {"torch BFloat16Storage", 2}};

std::set<std::string> Globals() {
  std::set<std::string> globals = {kRebuild, "collections OrderedDict"};
  for (const StorageType& type : kStorageTypes) globals.insert(type.name);
  return globals;
}

float ElementAt(const std::string& type, const std::byte* bytes, int64_t index) {
  if (type == kStorageTypes[0].name) return static_cast<float>(LoadElement<double>(bytes, index));
  if (type == kStorageTypes[1].name) return LoadElement<float>(bytes, index);
  const auto bits = LoadElement<uint16_t>(bytes, index);
  if (type == kStorageTypes[2].name) return kernels::Fp16ToFloat(bits);
  return kernels::Bf16ToFloat({bits});
}

}  // namespace

absl::StatusOr<std::unique_ptr<TorchFile>> TorchFile::Open(const std::string& path) {
  std::unique_ptr<TorchFile> file(new TorchFile(path));
  CRUMB_RETURN_IF_ERROR(file->Load());
  return file;
}

absl::Status TorchFile::Load() {
  CRUMB_ASSIGN_OR_RETURN(bytes_, ReadFile(path_, kFileBytesMax));
  CRUMB_ASSIGN_OR_RETURN(ZipArchive archive,
                         ZipArchive::Parse(std::as_bytes(std::span(bytes_)), path_));
  archive_ = std::make_unique<ZipArchive>(std::move(archive));
  const std::string pickle_name = "/data.pkl";
  for (const std::string& name : archive_->names()) {
    const size_t slash = name.find('/');
    if (slash == std::string::npos || name.substr(slash) != pickle_name) continue;
    if (!prefix_.empty())
      return absl::InvalidArgumentError(path_ + ": it has more than one entry data.pkl");
    prefix_ = name.substr(0, slash + 1);
  }
  if (prefix_.empty()) {
    return absl::InvalidArgumentError(path_ +
                                      ": it has no entry data.pkl, so torch.save did not write it");
  }
  if (archive_->Has(prefix_ + "byteorder")) {
    CRUMB_ASSIGN_OR_RETURN(const auto order, archive_->Read(prefix_ + "byteorder"));
    if (std::string(reinterpret_cast<const char*>(order.data()), order.size()) != "little") {
      return absl::InvalidArgumentError(
          path_ + ": entry byteorder: only little-endian files are supported");
    }
  }
  CRUMB_ASSIGN_OR_RETURN(const auto bytes, archive_->Read(prefix_ + "data.pkl"));
  CRUMB_ASSIGN_OR_RETURN(Pickle pickle,
                         Pickle::Parse(bytes, Globals(), path_ + ": entry data.pkl"));
  pickle_ = std::make_unique<Pickle>(std::move(pickle));
  return absl::OkStatus();
}

// A storage's id is ("storage", type, key, device, elements).
absl::StatusOr<TorchFile::Storage> TorchFile::StorageOf(const PickleValue& persistent,
                                                        const std::string& name) const {
  const absl::Status wrong = absl::InvalidArgumentError(path_ + ": " + name + ": no torch storage");
  if (persistent.kind != Kind::kPersistent) return wrong;
  const PickleValue& id = pickle_->At(persistent.items[0]);
  if (id.kind != Kind::kTuple || id.items.size() != 5) return wrong;
  const auto item = [&](int i) -> const PickleValue& { return pickle_->At(id.items[i]); };
  if (item(0).text != "storage" || item(1).kind != Kind::kGlobal || item(2).kind != Kind::kText ||
      item(4).kind != Kind::kInt) {
    return wrong;
  }
  Storage storage{.type = item(1).text, .element_bytes = 0, .bytes = {}};
  for (const StorageType& known : kStorageTypes) {
    if (storage.type == known.name) storage.element_bytes = known.bytes;
  }
  if (storage.element_bytes == 0) return wrong;
  const std::string entry = prefix_ + "data/" + item(2).text;
  CRUMB_ASSIGN_OR_RETURN(storage.bytes, archive_->Read(entry));
  const auto size = static_cast<int64_t>(storage.bytes.size());
  if (size % storage.element_bytes != 0 || item(4).integer != size / storage.element_bytes) {
    return absl::InvalidArgumentError(fmt::format("{}: {}: entry {} has {} bytes, not {} of {}",
                                                  path_, name, entry, size, item(4).integer,
                                                  storage.type));
  }
  return storage;
}

// A tensor is a call of _rebuild_tensor_v2(storage, offset, shape, strides, ...).
absl::StatusOr<TorchTensor> TorchFile::TensorOf(const PickleValue& value, int64_t elements_max,
                                                const std::string& name) const {
  const auto wrong = [&](const std::string& what) {
    return absl::InvalidArgumentError(path_ + ": " + name + ": " + what);
  };
  if (value.kind != Kind::kCall || pickle_->At(value.items[0]).text != kRebuild) {
    return wrong("no tensor");
  }
  const PickleValue& arguments = pickle_->At(value.items[1]);
  if (arguments.items.size() < 4) return wrong("no tensor");
  const PickleValue& offset = pickle_->At(arguments.items[1]);
  const PickleValue& shape = pickle_->At(arguments.items[2]);
  const PickleValue& strides = pickle_->At(arguments.items[3]);
  if (offset.kind != Kind::kInt || offset.integer < 0 || shape.kind != Kind::kTuple ||
      strides.kind != Kind::kTuple || shape.items.size() != strides.items.size() ||
      shape.items.size() > kDimensionsMax) {
    return wrong("no tensor");
  }
  TorchTensor tensor;
  int64_t elements = 1;
  for (size_t i = shape.items.size(); i-- > 0;) {
    const PickleValue& size = pickle_->At(shape.items[i]);
    const PickleValue& stride = pickle_->At(strides.items[i]);
    if (size.kind != Kind::kInt || stride.kind != Kind::kInt || size.integer < 1 ||
        size.integer > elements_max / elements) {
      return wrong("a size that is not read");
    }
    if (size.integer > 1 && stride.integer != elements) return wrong("it is not contiguous");
    elements *= size.integer;
    tensor.shape.insert(tensor.shape.begin(), size.integer);
  }
  CRUMB_ASSIGN_OR_RETURN(const Storage storage, StorageOf(pickle_->At(arguments.items[0]), name));
  const int64_t stored = static_cast<int64_t>(storage.bytes.size()) / storage.element_bytes;
  if (offset.integer > stored || stored - offset.integer < elements) {
    return wrong(fmt::format("shape {} at offset {} reaches beyond its storage of {} elements",
                             ShapeText(tensor.shape), offset.integer, stored));
  }
  tensor.values.resize(static_cast<size_t>(elements));
  for (int64_t i = 0; i < elements; ++i) {
    tensor.values[i] = ElementAt(storage.type, storage.bytes.data(), offset.integer + i);
  }
  return tensor;
}

}  // namespace crumb::calibration
