// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/file_activations.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <utility>

#include "common/little_endian.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "kernels/bf16.h"
#include "kernels/fp16.h"

namespace crumb::calibration {
namespace {

constexpr char kPositions[] = "positions";
constexpr const char* kParts[] = {"q", "k", "v"};
// The longest run, in tokens, that is read at once, which bounds memory; longer runs are split.
constexpr int kRunTokensMax = 8192;
constexpr int64_t kQueryHeadsMax = 4096;
constexpr int64_t kPositionMax = 1 << 30;

std::string NameOf(int id, const char* part) { return fmt::format("layers.{}.{}", id, part); }

absl::Status Wrong(const std::string& file, const std::string& tensor, const std::string& what) {
  return absl::InvalidArgumentError(file + ": tensor " + tensor + ": " + what);
}

// Returns the N of "layers.N.q", "layers.N.k" or "layers.N.v", or -1 for other names.
int LayerOf(const std::string& name) {
  const std::string begin = "layers.";
  if (name.rfind(begin, 0) != 0) return -1;
  int id = -1;
  const char* end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data() + begin.size(), end, id);
  const std::string rest(parsed.ptr, end);
  return parsed.ec == std::errc() && (rest == ".q" || rest == ".k" || rest == ".v") ? id : -1;
}

// Reads elements [begin, begin + count) as bf16, the format of KV caches.
void Convert(const Tensor& tensor, int64_t begin, int64_t count, std::vector<kernels::Bf16>& out) {
  out.resize(static_cast<size_t>(count));
  const std::byte* bytes = tensor.bytes.data();
  for (int64_t i = 0; i < count; ++i) {
    switch (tensor.dtype) {
      case DType::kBf16:
        out[i].bits = LoadElement<uint16_t>(bytes, begin + i);
        break;
      case DType::kF16:
        out[i] =
            kernels::Bf16FromFloat(kernels::Fp16ToFloat(LoadElement<uint16_t>(bytes, begin + i)));
        break;
      case DType::kF32:
        out[i] = kernels::Bf16FromFloat(LoadElement<float>(bytes, begin + i));
        break;
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileActivations>> FileActivations::Open(
    const std::vector<std::string>& files, const std::vector<int>& layer_ids) {
  std::unique_ptr<FileActivations> source(new FileActivations());
  for (const std::string& path : files) CRUMB_RETURN_IF_ERROR(source->AddFile(path));
  CRUMB_RETURN_IF_ERROR(source->CheckLayers(layer_ids));
  source->shape_.rotary = HalfSplitPairs(source->shape_.head_dim, {});
  return source;
}

void FileActivations::Describe(const std::string& name, const std::string& rope,
                               RotaryPairs rotary) {
  shape_.name = name;
  shape_.rope = rope;
  shape_.rotary = std::move(rotary);
}

absl::StatusOr<std::string> FileActivations::Metadata(const std::string& field) const {
  const std::string* found = nullptr;
  for (const File& file : files_) {
    const auto it = file.tensors->metadata().find(field);
    if (it == file.tensors->metadata().end()) continue;
    if (found != nullptr && *found != it->second) {
      return absl::InvalidArgumentError(
          fmt::format("{}: metadata field {} is \"{}\", in another file it is \"{}\"",
                      file.tensors->path(), field, it->second, *found));
    }
    found = &it->second;
  }
  return found == nullptr ? "" : *found;
}

absl::Status FileActivations::AddFile(const std::string& path) {
  File file;
  CRUMB_ASSIGN_OR_RETURN(file.tensors, SafetensorsFile::Open(path));
  std::set<int> ids;
  for (const std::string& name : file.tensors->names()) {
    const int id = LayerOf(name);
    if (id >= kLayersMax) return Wrong(path, name, "a layer number of 1,024 or more");
    if (id >= 0) ids.insert(id);
  }
  if (ids.empty()) {
    return absl::InvalidArgumentError(path + ": no tensors layers.N.q, layers.N.k, layers.N.v");
  }
  CRUMB_RETURN_IF_ERROR(ReadPositions(file));
  files_.push_back(std::move(file));
  for (const int id : ids) CRUMB_RETURN_IF_ERROR(AddLayer(id, files_.size() - 1));
  return absl::OkStatus();
}

// Reads the positions. A run ends where a position is not one above the previous position.
absl::Status FileActivations::ReadPositions(File& file) const {
  const std::string& path = file.tensors->path();
  const auto tensor = file.tensors->FindRaw(kPositions);
  if (!tensor.ok()) {
    return Wrong(path, kPositions, "it is missing; activations come with their positions");
  }
  const bool wide = tensor->dtype == "I64";
  if ((!wide && tensor->dtype != "I32") || tensor->shape.size() != 1) {
    return Wrong(path, kPositions,
                 tensor->dtype + " " + ShapeText(tensor->shape) + ", not I32 or I64 [tokens]");
  }
  file.tokens = tensor->shape[0];
  for (int64_t row = 0; row < file.tokens; ++row) {
    const int64_t position = wide ? LoadElement<int64_t>(tensor->bytes.data(), row)
                                  : LoadElement<int32_t>(tensor->bytes.data(), row);
    if (position < 0 || position >= kPositionMax) {
      return Wrong(path, kPositions, fmt::format("position {} of token {}", position, row));
    }
    const bool follows =
        !file.runs.empty() && position == file.runs.back().first_position + file.runs.back().tokens;
    if (!follows || file.runs.back().tokens == kRunTokensMax) {
      file.runs.push_back(
          {.begin = row, .tokens = 0, .first_position = static_cast<int>(position)});
    }
    ++file.runs.back().tokens;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::array<Tensor, 3>> FileActivations::TensorsOf(const File& file, int id) const {
  std::array<Tensor, 3> tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string name = NameOf(id, kParts[i]);
    if (!file.tensors->Has(name)) {
      return Wrong(file.tensors->path(), name, "it is missing; q, k and v of a layer lie together");
    }
    CRUMB_ASSIGN_OR_RETURN(tensors[i], file.tensors->Find(name));
  }
  return tensors;
}

absl::Status FileActivations::AddLayer(int id, size_t file) {
  CRUMB_ASSIGN_OR_RETURN(const auto tensors, TensorsOf(files_[file], id));
  CRUMB_RETURN_IF_ERROR(CheckShapes(tensors, files_[file].tokens));
  files_of_[id].push_back(file);
  visits_ += static_cast<int64_t>(files_[file].runs.size());
  return absl::OkStatus();
}

absl::Status FileActivations::CheckShapes(const std::array<Tensor, 3>& tensors, int64_t tokens) {
  for (const Tensor& tensor : tensors) {
    if (tensor.shape.size() == 3) continue;
    return Wrong(tensor.file, tensor.name,
                 "shape " + ShapeText(tensor.shape) + ", not [tokens, heads, head_dim]");
  }
  if (shape_.head_dim == 0) {
    const int64_t q_heads = tensors[0].shape[1], kv_heads = tensors[1].shape[1];
    const int64_t head_dim = tensors[0].shape[2];
    if (kv_heads < 1 || q_heads < 1 || q_heads > kQueryHeadsMax || q_heads % kv_heads != 0 ||
        head_dim < 2 || head_dim > kHeadDimMax || head_dim % 2 != 0) {
      return Wrong(
          tensors[0].file, tensors[0].name,
          fmt::format("shape {} beside k {}: query heads must be a multiple of KV heads, "
                      "head_dim even and at most {}",
                      ShapeText(tensors[0].shape), ShapeText(tensors[1].shape), kHeadDimMax));
    }
    shape_.q_heads = static_cast<int>(q_heads);
    shape_.kv_heads = static_cast<int>(kv_heads);
    shape_.head_dim = static_cast<int>(head_dim);
  }
  const int heads[] = {shape_.q_heads, shape_.kv_heads, shape_.kv_heads};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::vector<int64_t> expected = {tokens, heads[i], shape_.head_dim};
    if (tensors[i].shape == expected) continue;
    return Wrong(tensors[i].file, tensors[i].name,
                 "shape " + ShapeText(tensors[i].shape) + ", positions and other tensors require " +
                     ShapeText(expected));
  }
  return absl::OkStatus();
}

absl::Status FileActivations::CheckLayers(const std::vector<int>& layer_ids) {
  std::vector<int> wanted = layer_ids;
  if (wanted.empty()) {
    for (int id = 0; id <= files_of_.rbegin()->first; ++id) wanted.push_back(id);
  } else {
    shape_.layer_ids = wanted;
  }
  shape_.layers = static_cast<int>(wanted.size());
  for (const int id : wanted) {
    const auto found = files_of_.find(id);
    if (found == files_of_.end()) {
      return absl::InvalidArgumentError(
          fmt::format("{}: tensor {} is missing, in this and all other files; name the layers that "
                      "are there with --layer-ids when others have no full attention",
                      files_.front().tensors->path(), NameOf(id, kParts[0])));
    }
    int64_t tokens = 0;
    for (const size_t file : found->second) tokens += files_[file].tokens;
    if (tokens < int64_t{kTokensPerDimension} * shape_.head_dim) {
      return Wrong(files_[found->second.front()].tensors->path(), NameOf(id, kParts[0]),
                   fmt::format("only {} tokens in all files, at least {} are needed", tokens,
                               kTokensPerDimension * shape_.head_dim));
    }
  }
  for (const auto& [id, files] : files_of_) {
    if (std::find(wanted.begin(), wanted.end(), id) != wanted.end()) continue;
    for (const size_t file : files) visits_ -= static_cast<int64_t>(files_[file].runs.size());
  }
  return absl::OkStatus();
}

absl::Status FileActivations::ForEach(int first, int count, const Visitor& visit) {
  for (int layer = first; layer < first + count; ++layer) {
    const int id = shape_.LayerId(layer);
    for (const size_t index : files_of_.at(id)) {
      const File& file = files_[index];
      CRUMB_ASSIGN_OR_RETURN(const auto tensors, TensorsOf(file, id));
      for (const Run& run : file.runs) {
        CRUMB_RETURN_IF_ERROR(VisitRun(file, tensors, layer, run, visit));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status FileActivations::VisitRun(const File& file, const std::array<Tensor, 3>& tensors,
                                       int layer, const Run& run, const Visitor& visit) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    const int64_t row = tensor.shape[1] * tensor.shape[2];
    Convert(tensor, run.begin * row, run.tokens * row, rows_[i]);
    for (size_t at = 0; at < rows_[i].size(); ++at) {
      if (std::isfinite(kernels::Bf16ToFloat(rows_[i][at]))) continue;
      return Wrong(tensor.file, tensor.name,
                   fmt::format("token {}, head {} holds a value that is not finite",
                               run.begin + static_cast<int64_t>(at) / row,
                               static_cast<int64_t>(at) % row / tensor.shape[2]));
    }
    const auto element = static_cast<int64_t>(DTypeBytes(tensor.dtype));
    file.tensors->ReleasePages(
        tensor.bytes.subspan(run.begin * row * element, run.tokens * row * element));
  }
  return visit({.layer = layer,
                .tokens = run.tokens,
                .first_position = run.first_position,
                .q = rows_[0].data(),
                .k = rows_[1].data(),
                .v = rows_[2].data()});
}

}  // namespace crumb::calibration
