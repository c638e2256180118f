// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/rotation_file.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <tuple>

#include "common/atomic_file.h"
#include "common/hex.h"
#include "common/safetensors.h"
#include "common/sha256.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "fmt/ranges.h"

namespace crumb {
namespace {

constexpr char kFormat[] = "crumb-rotation";
constexpr char kVersion[] = "1";
constexpr int64_t kSizeMax = 1 << 20;               // elements of one dimension
constexpr int64_t kElementsMax = int64_t{1} << 32;  // elements of one array
constexpr float kAttentionErrorMax = 2.0f;          // 1: the error of storing nothing at all

struct Array {
  const char* name;
  std::vector<float> RotationFile::*values;
  std::vector<int64_t> shape;
  bool in_digest = true;
};

std::vector<Array> ArraysOf(const RotationFile& file) {
  const int64_t layers = file.layers, heads = file.kv_heads, dim = file.head_dim;
  const std::vector<int64_t> matrices = {layers, heads, dim, dim}, rows = {layers, heads, dim};
  return {
      {"attention_error", &RotationFile::attention_error, {layers, heads}, false},
      {"covariance_k", &RotationFile::covariance_k, matrices},
      {"covariance_v", &RotationFile::covariance_v, matrices},
      {"dual_k", &RotationFile::dual_k, matrices},
      {"dual_v", &RotationFile::dual_v, matrices},
      {"eigenvalues_k", &RotationFile::eigenvalues_k, rows},
      {"eigenvalues_v", &RotationFile::eigenvalues_v, rows},
      {"feedback_k", &RotationFile::feedback_k, matrices},
      {"feedback_v", &RotationFile::feedback_v, matrices},
      {"mean_k", &RotationFile::mean_k, {layers, heads, file.position_blocks, dim}},
      {"mean_v", &RotationFile::mean_v, rows},
      {"rotation_k", &RotationFile::rotation_k, matrices},
      {"rotation_v", &RotationFile::rotation_v, matrices},
      {"shift", &RotationFile::shift, {layers, file.q_heads}},
  };
}

// The fields of optional meaning are there only where they say something, so that files without
// them keep their digest.
std::map<std::string, std::string> FieldsOf(const RotationFile& file) {
  std::map<std::string, std::string> fields = {
      {"format", kFormat},
      {"version", kVersion},
      {"method", file.method},
      {"model", file.model},
      {"rope", file.rope},
      {"layers", std::to_string(file.layers)},
      {"kv_heads", std::to_string(file.kv_heads)},
      {"q_heads", std::to_string(file.q_heads)},
      {"head_dim", std::to_string(file.head_dim)},
      {"positions", std::to_string(file.positions)},
      {"position_blocks", std::to_string(file.position_blocks)},
      {"pages_per_position_block", std::to_string(file.pages_per_position_block)},
      {"tokens", std::to_string(file.tokens)},
      {"clip_k", fmt::format("{}", file.clip_k)},
      {"clip_v", fmt::format("{}", file.clip_v)},
  };
  if (!file.layer_ids.empty())
    fields["layer_ids"] = fmt::format("{}", fmt::join(file.layer_ids, ","));
  if (file.v_basis != "model") fields["v_basis"] = file.v_basis;
  return fields;
}

std::string_view BytesOf(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// Elements of a shape whose dimensions are within kSizeMax; -1: too many.
int64_t ElementsOf(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) {
    elements *= size;
    if (elements > kElementsMax) return -1;
  }
  return elements;
}

absl::Status CheckArray(const Array& array, const std::vector<float>& values,
                        const std::string& where) {
  if (values.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(values.size()) != ElementsOf(array.shape)) {
    return absl::InvalidArgumentError(fmt::format("{}: tensor {} has {} values, its shape is {}",
                                                  where, array.name, values.size(),
                                                  ShapeText(array.shape)));
  }
  for (const float value : values) {
    if (!std::isfinite(value)) {
      return absl::InvalidArgumentError(
          fmt::format("{}: tensor {} holds a value that is not finite", where, array.name));
    }
  }
  return absl::OkStatus();
}

// The metadata of one file, read field by field; the first error sticks.
class FieldReader {
 public:
  FieldReader(const SafetensorsFile& file) : file_(file) {}

  bool Has(const std::string& name) const { return file_.metadata().contains(name); }
  std::string Text(const std::string& name) {
    const auto it = file_.metadata().find(name);
    if (it != file_.metadata().end()) return it->second;
    Fail(name, "is missing");
    return "";
  }
  template <typename T>
  T Number(const std::string& name, T least, T most) {
    return Parse(name, Text(name), least, most);
  }
  // Integers from 0, ascending, divided by commas.
  std::vector<int> Ascending(const std::string& name, int most) {
    std::vector<int> values;
    std::istringstream text(Text(name));
    for (std::string item; status_.ok() && std::getline(text, item, ',');) {
      values.push_back(Parse<int>(name, item, values.empty() ? 0 : values.back() + 1, most));
    }
    return values;
  }
  const absl::Status& status() const { return status_; }

 private:
  template <typename T>
  T Parse(const std::string& name, const std::string& text, T least, T most) {
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || !(value >= least) ||
        !(value <= most)) {
      Fail(name, "is \"" + text + "\"");
      return least;
    }
    return value;
  }
  void Fail(const std::string& name, const std::string& what) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(file_.path() + ": no rotation file: metadata field " +
                                         name + " " + what);
  }

  const SafetensorsFile& file_;
  absl::Status status_;
};

absl::Status CheckFields(const RotationFile& file, const std::string& where) {
  if (!file.layer_ids.empty() && static_cast<int>(file.layer_ids.size()) != file.layers) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {} layer_ids for {} layers", where, file.layer_ids.size(), file.layers));
  }
  if (file.v_basis != "model" && file.v_basis != "rotated") {
    return absl::InvalidArgumentError(
        fmt::format("{}: v_basis \"{}\" is neither model nor rotated", where, file.v_basis));
  }
  if (file.v_basis == "rotated" && !file.rotation_v.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("{}: a rotation_v although v_basis is rotated", where));
  }
  return absl::OkStatus();
}

absl::Status CheckDuals(const RotationFile& file, const std::string& where) {
  for (const auto& [name, dual, rotation] :
       {std::tuple("k", &file.dual_k, &file.rotation_k), {"v", &file.dual_v, &file.rotation_v}}) {
    if (dual->empty() || !rotation->empty()) continue;
    return absl::InvalidArgumentError(
        fmt::format("{}: a dual_{} without rotation_{}, whose inverse it is", where, name, name));
  }
  return absl::OkStatus();
}

absl::Status CheckAttentionError(const RotationFile& file, const std::string& where) {
  for (const float error : file.attention_error) {
    if (error > 0.0f && error <= kAttentionErrorMax) continue;
    return absl::InvalidArgumentError(
        fmt::format("{}: an expected attention_error of {}, it must be above 0 and at most {}",
                    where, error, kAttentionErrorMax));
  }
  return absl::OkStatus();
}

absl::StatusOr<RotationFile> ReadFields(const SafetensorsFile& tensors) {
  FieldReader fields(tensors);
  RotationFile file;
  const std::string format = fields.Text("format"), version = fields.Text("version");
  if (fields.status().ok() && (format != kFormat || version != kVersion)) {
    return absl::InvalidArgumentError(fmt::format("{}: {} version {}, this program reads {} {}",
                                                  tensors.path(), format, version, kFormat,
                                                  kVersion));
  }
  constexpr int kMax = static_cast<int>(kSizeMax);
  file.method = fields.Text("method");
  file.model = fields.Text("model");
  file.rope = fields.Text("rope");
  file.layers = fields.Number<int>("layers", 1, kMax);
  file.kv_heads = fields.Number<int>("kv_heads", 1, kMax);
  file.q_heads = fields.Number<int>("q_heads", 0, kMax);
  file.head_dim = fields.Number<int>("head_dim", 1, kMax);
  file.positions = fields.Number<int>("positions", 0, INT32_MAX);
  file.position_blocks = fields.Number<int>("position_blocks", 1, kMax);
  file.pages_per_position_block = fields.Number<int>("pages_per_position_block", 1, kMax);
  file.tokens = fields.Number<int64_t>("tokens", 0, INT64_MAX);
  file.clip_k = fields.Number<float>("clip_k", 0.0f, 1.0f);
  file.clip_v = fields.Number<float>("clip_v", 0.0f, 1.0f);
  if (fields.Has("layer_ids")) file.layer_ids = fields.Ascending("layer_ids", kMax);
  if (fields.Has("v_basis")) file.v_basis = fields.Text("v_basis");
  CRUMB_RETURN_IF_ERROR(fields.status());
  CRUMB_RETURN_IF_ERROR(CheckFields(file, tensors.path()));
  return file;
}

void WriteBytes(const RotationFile& file, std::ostream& out) {
  nlohmann::json header;
  header["__metadata__"] = FieldsOf(file);
  header["__metadata__"]["digest"] = RotationDigest(file);
  size_t end = 0;
  for (const Array& array : ArraysOf(file)) {
    const size_t begin = end;
    end += BytesOf(file.*array.values).size();
    if (end == begin) continue;
    header[array.name] = {{"dtype", "F32"}, {"shape", array.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  out.write(reinterpret_cast<const char*>(&length), sizeof(length));
  out << text;
  for (const Array& array : ArraysOf(file)) out << BytesOf(file.*array.values);
}

}  // namespace

int LayerId(const RotationFile& file, int index) {
  return file.layer_ids.empty() ? index : file.layer_ids[index];
}

std::string RotationDigest(const RotationFile& file) {
  std::string text;
  for (const auto& [name, value] : FieldsOf(file)) text += name + "=" + value + "\n";
  for (const Array& array : ArraysOf(file)) {
    const std::vector<float>& values = file.*array.values;
    if (values.empty() || !array.in_digest) continue;
    text += fmt::format("{} {} {}\n", array.name, ShapeText(array.shape),
                        HexEncode(Sha256(BytesOf(values))));
  }
  return HexEncode(Sha256(text));
}

absl::Status WriteRotationFile(const RotationFile& file, const std::string& path) {
  CRUMB_RETURN_IF_ERROR(CheckFields(file, path));
  for (const Array& array : ArraysOf(file)) {
    CRUMB_RETURN_IF_ERROR(CheckArray(array, file.*array.values, path));
  }
  CRUMB_RETURN_IF_ERROR(CheckDuals(file, path));
  CRUMB_RETURN_IF_ERROR(CheckAttentionError(file, path));
  return WriteAtomically(path, [&file](std::ostream& out) { WriteBytes(file, out); });
}

absl::StatusOr<RotationFile> ReadRotationFile(const std::string& path) {
  CRUMB_ASSIGN_OR_RETURN(const auto tensors, SafetensorsFile::Open(path));
  CRUMB_ASSIGN_OR_RETURN(RotationFile file, ReadFields(*tensors));
  for (const Array& array : ArraysOf(file)) {
    if (!tensors->Has(array.name)) continue;
    CRUMB_ASSIGN_OR_RETURN(const Tensor tensor, tensors->Find(array.name));
    if (tensor.dtype != DType::kF32 || tensor.shape != array.shape) {
      return absl::InvalidArgumentError(fmt::format(
          "{}: tensor {} is {} {}, the metadata requires F32 {}", path, array.name,
          std::string(DTypeName(tensor.dtype)), ShapeText(tensor.shape), ShapeText(array.shape)));
    }
    std::vector<float>& values = file.*array.values;
    values.resize(tensor.bytes.size() / sizeof(float));
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    CRUMB_RETURN_IF_ERROR(CheckArray(array, values, path));
  }
  CRUMB_RETURN_IF_ERROR(CheckFields(file, path));
  CRUMB_RETURN_IF_ERROR(CheckDuals(file, path));
  CRUMB_RETURN_IF_ERROR(CheckAttentionError(file, path));
  const auto digest = tensors->metadata().find("digest");
  if (digest == tensors->metadata().end() || digest->second != RotationDigest(file)) {
    return absl::DataLossError(path + ": its digest is not that of its contents; it was changed");
  }
  return file;
}

}  // namespace crumb
