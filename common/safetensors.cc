// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/errno_status.h"
#include "common/json_file.h"
#include "common/little_endian.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"

namespace crumb {

namespace {

constexpr int64_t kLengthBytes = 8;
// The limit the format itself sets for its JSON header.
constexpr int64_t kHeaderBytesMax = 100'000'000;
constexpr size_t kDimensionsMax = 8;

// Bytes per element of every dtype the format names, so that files with tensors of other dtypes
// beside the weights can be checked whole. 0: unknown.
int64_t ElementBytes(const std::string& dtype) {
  static const std::map<std::string, int64_t> kBytes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
      {"U32", 4},  {"F32", 4}, {"I64", 8}, {"U64", 8},     {"F64", 8}};
  const auto it = kBytes.find(dtype);
  return it == kBytes.end() ? 0 : it->second;
}

std::optional<DType> ToDType(const std::string& name) {
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<int64_t>> IntArray(const nlohmann::json& object, const std::string& key,
                                              const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* array, ArrayField(object, key, where));
  if (array->size() > kDimensionsMax) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": field \"", key, "\" is too long"));
  }
  std::vector<int64_t> values;
  for (const nlohmann::json& element : *array) {
    const nlohmann::json holder = {{key, element}};
    CRUMB_ASSIGN_OR_RETURN(const int64_t value, IntField(holder, key, 0, INT64_MAX, where));
    values.push_back(value);
  }
  return values;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile(path));
  CRUMB_RETURN_IF_ERROR(file->Map());
  CRUMB_RETURN_IF_ERROR(file->ReadHeader());
  CRUMB_RETURN_IF_ERROR(file->CheckRanges());
  return file;
}

absl::Status SafetensorsFile::Map() {
  const UniqueFd fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "opening " + path_);
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "reading " + path_);
  if (!S_ISREG(info.st_mode) || info.st_size < kLengthBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": not a safetensors file, it has ", info.st_size, " bytes"));
  }
  CRUMB_ASSIGN_OR_RETURN(mapping_, Mapping::Of(fd.get(), static_cast<size_t>(info.st_size),
                                               Mapping::Access::kReadOnly));
  return absl::OkStatus();
}

absl::Status SafetensorsFile::ReadHeader() {
  const uint64_t length = LoadLittle<uint64_t>(mapping_.data());
  const uint64_t rest = mapping_.size() - kLengthBytes;
  if (length > rest || length > static_cast<uint64_t>(kHeaderBytesMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": header of ", length, " bytes in a file with ", rest,
                     " bytes after its length; the file is damaged or truncated"));
  }
  const std::string_view text(reinterpret_cast<const char*>(mapping_.data()) + kLengthBytes,
                              length);
  data_ = mapping_.bytes().subspan(kLengthBytes + length);
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json header, ParseJsonObject(text, path_ + ": header"));
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      const std::string metadata = path_ + ": header: __metadata__";
      if (!value.is_object()) return absl::InvalidArgumentError(metadata + " is not an object");
      for (const auto& item : value.items()) {
        CRUMB_ASSIGN_OR_RETURN(metadata_[item.key()], StringField(value, item.key(), metadata));
      }
      continue;
    }
    const std::string where = absl::StrCat(path_, ": tensor ", name);
    if (!value.is_object()) return absl::InvalidArgumentError(where + " is not an object");
    Entry entry;
    CRUMB_ASSIGN_OR_RETURN(entry.dtype, StringField(value, "dtype", where));
    CRUMB_ASSIGN_OR_RETURN(entry.shape, IntArray(value, "shape", where));
    CRUMB_ASSIGN_OR_RETURN(const std::vector<int64_t> range,
                           IntArray(value, "data_offsets", where));
    if (range.size() != 2) {
      return absl::InvalidArgumentError(where + ": data_offsets must be two integers");
    }
    entry.begin = range[0];
    entry.end = range[1];
    entries_.emplace(name, std::move(entry));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsFile::CheckRanges() const {
  std::vector<std::pair<int64_t, std::string>> order;
  for (const auto& [name, entry] : entries_) {
    const std::string where = absl::StrCat(path_, ": tensor ", name);
    int64_t bytes = ElementBytes(entry.dtype);
    if (bytes == 0) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": unknown dtype ", entry.dtype));
    }
    bool overflow = false;
    for (const int64_t size : entry.shape) overflow |= __builtin_mul_overflow(bytes, size, &bytes);
    if (entry.end < entry.begin || entry.end > static_cast<int64_t>(data_.size())) {
      return absl::InvalidArgumentError(absl::StrCat(
          where, ": bytes [", entry.begin, ", ", entry.end, ") are outside the file's ",
          data_.size(), " bytes of data; the file is damaged or truncated"));
    }
    if (overflow || entry.end - entry.begin != bytes) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": shape ", ShapeText(entry.shape),
                                                     " of ", entry.dtype, " does not take the ",
                                                     entry.end - entry.begin, " bytes it has"));
    }
    order.emplace_back(entry.begin, name);
  }
  std::sort(order.begin(), order.end());
  int64_t end = 0;
  for (const auto& [begin, name] : order) {
    const Entry& entry = entries_.at(name);
    if (entry.begin == entry.end) continue;  // an empty tensor takes no room
    if (begin != end) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor ", name, ": begins at byte ",
                                                     begin, ", the tensor before it ends at ",
                                                     end));
    }
    end = entry.end;
  }
  if (end != static_cast<int64_t>(data_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": ", data_.size() - end, " bytes after the last tensor"));
  }
  return absl::OkStatus();
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

absl::StatusOr<Tensor> SafetensorsFile::Find(const std::string& name) const {
  CRUMB_ASSIGN_OR_RETURN(RawTensor raw, FindRaw(name));
  const std::optional<DType> dtype = ToDType(raw.dtype);
  if (!dtype.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor ", name, ": dtype ", raw.dtype,
                                                   " is not supported, only BF16, F16 and F32"));
  }
  return Tensor{name, path_, *dtype, std::move(raw.shape), raw.bytes};
}

absl::StatusOr<RawTensor> SafetensorsFile::FindRaw(const std::string& name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) return absl::NotFoundError(absl::StrCat(path_, ": no tensor ", name));
  const Entry& entry = it->second;
  const auto bytes =
      data_.subspan(static_cast<size_t>(entry.begin), static_cast<size_t>(entry.end - entry.begin));
  return RawTensor{.name = name,
                   .file = path_,
                   .dtype = entry.dtype,
                   .shape = entry.shape,
                   .bytes = bytes,
                   .file_offset = bytes.data() - mapping_.data()};
}

void SafetensorsFile::ReleasePages(std::span<const std::byte> bytes) const {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  // The pages at both ends may hold other tensors' bytes too; those are read again as well.
  const uintptr_t begin = reinterpret_cast<uintptr_t>(bytes.data()) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(bytes.data() + bytes.size());
  if (!bytes.empty()) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace crumb
