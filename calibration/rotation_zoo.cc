// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/rotation_zoo.h"

#include <Eigen/Dense>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>

#include "calibration/calibrator.h"
#include "calibration/torch_file.h"
#include "calibration/zip_archive.h"
#include "common/atomic_file.h"
#include "common/status_macros.h"
#include "common/tensor.h"
#include "fmt/format.h"

namespace crumb::calibration {
namespace {

using Kind = PickleValue::Kind;
using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr int64_t kKvHeadsMax = 1024;
// Elements of all rotations of a file together at most: 2 GiB of f32.
constexpr int64_t kElementsMax = int64_t{1} << 29;
// The largest deviation of R' R from the identity. Workers apply the same bound.
constexpr double kOrthogonalTolerance = 1e-3;

// The tensors of one layer.
struct Layer {
  int64_t heads = 1;
  int64_t head_dim = 0;
  bool per_head = false;
  std::vector<float> rotation;
  std::vector<float> eigenvalues;
};

class Reader {
 public:
  explicit Reader(const TorchFile& torch) : torch_(torch), pickle_(torch.pickle()) {}

  absl::StatusOr<RotationZooFile> Read() {
    RotationZooFile file;
    const PickleValue& root = pickle_.root();
    if (root.kind != Kind::kDict) return Wrong("it holds no dictionary");
    const PickleValue* version = pickle_.Find(root, "format_version");
    if (version == nullptr || version->kind != Kind::kInt ||
        (version->integer != 1 && version->integer != 2)) {
      return Wrong("field format_version is neither 1 nor 2");
    }
    file.format_version = static_cast<int>(version->integer);
    const PickleValue* objective = pickle_.Find(root, "objective");
    if (objective != nullptr && objective->kind == Kind::kText) file.objective = objective->text;
    CRUMB_ASSIGN_OR_RETURN(const auto layers, LayersOf(root));
    for (const auto& [id, value] : layers) {
      CRUMB_ASSIGN_OR_RETURN(const Layer layer, ReadLayer(id, *value));
      CRUMB_RETURN_IF_ERROR(AddLayer(id, layer, file));
    }
    return file;
  }

 private:
  absl::Status Wrong(const std::string& what) const {
    return absl::InvalidArgumentError(torch_.path() + ": " + what);
  }

  // Keys are integers, or integers as text.
  absl::StatusOr<std::map<int, const PickleValue*>> LayersOf(const PickleValue& root) const {
    const PickleValue* dict = pickle_.Find(root, "layers");
    if (dict == nullptr || dict->kind != Kind::kDict || dict->items.empty()) {
      return Wrong("field layers is no dictionary of layers");
    }
    std::map<int, const PickleValue*> layers;
    for (size_t i = 0; i < dict->items.size(); i += 2) {
      const PickleValue& key = pickle_.At(dict->items[i]);
      int64_t id = key.kind == Kind::kInt ? key.integer : -1;
      if (key.kind == Kind::kText) {
        const char* end = key.text.data() + key.text.size();
        const auto parsed = std::from_chars(key.text.data(), end, id);
        if (parsed.ec != std::errc() || parsed.ptr != end) id = -1;
      }
      if (id < 0 || id >= kLayersMax) {
        return Wrong(fmt::format(
            "field layers: key {} is no layer number below {}",
            key.kind == Kind::kText ? "\"" + key.text + "\"" : std::to_string(key.integer),
            kLayersMax));
      }
      if (!layers.emplace(static_cast<int>(id), &pickle_.At(dict->items[i + 1])).second) {
        return Wrong(fmt::format("layer {} is there twice", id));
      }
    }
    return layers;
  }

  absl::StatusOr<Layer> ReadLayer(int id, const PickleValue& value) const {
    const std::string name = fmt::format("layer {}", id);
    const PickleValue* own_id = pickle_.Find(value, "layer_id");
    if (own_id != nullptr && (own_id->kind != Kind::kInt || own_id->integer != id)) {
      return Wrong(name + ": its layer_id is another");
    }
    const PickleValue* rotation = pickle_.Find(value, "rotation");
    if (rotation == nullptr) return Wrong(name + ": no rotation");
    CRUMB_ASSIGN_OR_RETURN(TorchTensor tensor,
                           torch_.TensorOf(*rotation, kElementsMax, name + ": tensor rotation"));
    Layer layer;
    layer.per_head = tensor.shape.size() == 3;
    layer.heads = layer.per_head ? tensor.shape[0] : 1;
    layer.head_dim = tensor.shape.empty() ? 0 : tensor.shape.back();
    const std::vector<int64_t> square = {layer.head_dim, layer.head_dim};
    std::vector<int64_t> shape = square;
    if (layer.per_head) shape.insert(shape.begin(), layer.heads);
    if (tensor.shape != shape || layer.head_dim > kHeadDimMax || layer.heads > kKvHeadsMax) {
      return Wrong(name + ": tensor rotation is " + ShapeText(tensor.shape) +
                   ", not [head_dim, head_dim] or [KV heads, head_dim, head_dim]");
    }
    layer.rotation = std::move(tensor.values);
    CRUMB_RETURN_IF_ERROR(CheckRotations(name, layer));
    const PickleValue* eigenvalues = pickle_.Find(value, "eigenvalues");
    if (eigenvalues == nullptr || eigenvalues->kind == Kind::kNone) return layer;
    CRUMB_ASSIGN_OR_RETURN(
        tensor, torch_.TensorOf(*eigenvalues, kElementsMax, name + ": tensor eigenvalues"));
    shape.pop_back();
    if (tensor.shape != shape) {
      return Wrong(name + ": tensor eigenvalues is " + ShapeText(tensor.shape) + ", the rotation " +
                   "requires " + ShapeText(shape));
    }
    layer.eigenvalues = std::move(tensor.values);
    for (const float eigenvalue : layer.eigenvalues) {
      if (!std::isfinite(eigenvalue)) {
        return Wrong(name + ": tensor eigenvalues holds a value that is not finite");
      }
    }
    return layer;
  }

  absl::Status CheckRotations(const std::string& name, const Layer& layer) const {
    const int64_t dim = layer.head_dim;
    for (int64_t head = 0; head < layer.heads; ++head) {
      const Eigen::MatrixXd r =
          Eigen::Map<const RowMajor>(&layer.rotation[head * dim * dim], dim, dim).cast<double>();
      const double error =
          (r * r.transpose() - Eigen::MatrixXd::Identity(dim, dim)).cwiseAbs().maxCoeff();
      if (!r.allFinite() || !(error <= kOrthogonalTolerance)) {
        return Wrong(fmt::format("{}: tensor rotation: the matrix of KV head {} is no rotation",
                                 name, head));
      }
    }
    return absl::OkStatus();
  }

  absl::Status AddLayer(int id, const Layer& layer, RotationZooFile& file) {
    const bool first = file.layer_ids.empty();
    if (first) {
      file.kv_heads = static_cast<int>(layer.heads);
      file.head_dim = static_cast<int>(layer.head_dim);
      per_head_ = layer.per_head;
    }
    if (layer.heads != file.kv_heads || layer.head_dim != file.head_dim ||
        layer.per_head != per_head_) {
      return Wrong(fmt::format("layer {}: tensor rotation has another shape than layer {}'s", id,
                               file.layer_ids.front()));
    }
    if (!first && layer.eigenvalues.empty() != file.eigenvalues.empty()) {
      return Wrong(fmt::format("layer {}: some layers have eigenvalues and some have none", id));
    }
    if (file.rotation.size() + layer.rotation.size() > size_t{kElementsMax}) {
      return Wrong("more rotations than are read");
    }
    file.layer_ids.push_back(id);
    file.rotation.insert(file.rotation.end(), layer.rotation.begin(), layer.rotation.end());
    file.eigenvalues.insert(file.eigenvalues.end(), layer.eigenvalues.begin(),
                            layer.eigenvalues.end());
    return absl::OkStatus();
  }

  const TorchFile& torch_;
  const Pickle& pickle_;
  bool per_head_ = false;
};

// Writes the pickle of a RotationZoo file in protocol 2, which torch.load requires.
class PickleText {
 public:
  void Raw(const std::string& bytes) { text_ += bytes; }
  void Text(const std::string& text) {
    text_ += 'X';
    Number(static_cast<uint32_t>(text.size()));
    text_ += text;
  }
  void Int(int32_t value) {
    text_ += 'J';
    Number(value);
  }
  // Writes a contiguous f32 tensor in storage `key`.
  void Tensor(const std::string& key, const std::vector<int>& shape) {
    int elements = 1;
    for (const int size : shape) elements *= size;
    Raw("ctorch._utils\n_rebuild_tensor_v2\n((");
    Text("storage");
    Raw("ctorch\nFloatStorage\n");
    Text(key);
    Text("cpu");
    Int(elements);
    Raw("tQ");
    Int(0);
    std::vector<int> strides;
    for (const int size : shape) strides.push_back(elements /= size);
    Tuple(shape);
    Tuple(strides);
    Raw("\x89"
        "ccollections\nOrderedDict\n)RtR");
  }
  std::string Take() { return std::move(text_); }

 private:
  template <typename T>
  void Number(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void Tuple(const std::vector<int>& values) {
    Raw("(");
    for (const int value : values) Int(value);
    Raw("t");
  }

  std::string text_;
};

std::string MakePickle(const RotationZooFile& file) {
  PickleText text;
  std::vector<int> rows = {file.head_dim}, matrices = {file.head_dim, file.head_dim};
  if (file.format_version == 2) {
    rows.insert(rows.begin(), file.kv_heads);
    matrices.insert(matrices.begin(), file.kv_heads);
  }
  text.Raw("\x80\x02}(");
  text.Text("format_version");
  text.Int(file.format_version);
  text.Text("objective");
  text.Text(file.objective);
  text.Text("source_grouping");
  text.Text(file.format_version == 2 ? "kv_head" : "layer");
  text.Text("layers");
  text.Raw("}(");
  int storage = 0;
  for (const int id : file.layer_ids) {
    text.Int(id);
    text.Raw("}(");
    text.Text("layer_id");
    text.Int(id);
    text.Text("rotation");
    text.Tensor(std::to_string(storage++), matrices);
    if (!file.eigenvalues.empty()) {
      text.Text("eigenvalues");
      text.Tensor(std::to_string(storage++), rows);
    }
    text.Raw("u");
  }
  text.Raw("uu.");
  return text.Take();
}

void WriteEntries(const RotationZooFile& file, std::ostream& out) {
  const std::string prefix = "rotation/";
  ZipWriter zip(out);
  zip.Add(prefix + "data.pkl", MakePickle(file));
  zip.Add(prefix + "byteorder", "little");
  int storage = 0;
  const auto add = [&](const std::vector<float>& values, size_t layer) {
    const size_t count = values.size() / file.layer_ids.size();
    zip.Add(prefix + "data/" + std::to_string(storage++),
            std::as_bytes(std::span(values).subspan(layer * count, count)));
  };
  for (size_t layer = 0; layer < file.layer_ids.size(); ++layer) {
    add(file.rotation, layer);
    if (!file.eigenvalues.empty()) add(file.eigenvalues, layer);
  }
  zip.Add(prefix + "version", "3\n");
  zip.Finish();
}

// Returns [layers, heads, item] with its dimensions of 1 repeated.
std::vector<float> Repeat(const std::vector<float>& values, int from_layers, int from_heads,
                          int layers, int heads) {
  if (values.empty()) return {};
  const size_t item = values.size() / from_layers / from_heads;
  std::vector<float> out;
  out.reserve(item * layers * heads);
  for (int layer = 0; layer < layers; ++layer) {
    for (int head = 0; head < heads; ++head) {
      const size_t at = static_cast<size_t>(from_layers == 1 ? 0 : layer) * from_heads +
                        (from_heads == 1 ? 0 : head);
      out.insert(out.end(), values.begin() + at * item, values.begin() + (at + 1) * item);
    }
  }
  return out;
}

absl::Status CheckSides(const RotationZooFile& keys, const RotationZooFile& values) {
  if (keys.layer_ids != values.layer_ids) {
    return absl::InvalidArgumentError("the two files are for different layers");
  }
  if (keys.head_dim != values.head_dim) {
    return absl::InvalidArgumentError(
        fmt::format("head_dim {} for K but {} for V", keys.head_dim, values.head_dim));
  }
  if (keys.kv_heads != values.kv_heads && keys.kv_heads != 1 && values.kv_heads != 1) {
    return absl::InvalidArgumentError(
        fmt::format("{} KV heads for K but {} for V", keys.kv_heads, values.kv_heads));
  }
  return absl::OkStatus();
}

// Returns the requested number of layers or heads of a file that has `there` of them.
absl::StatusOr<int> Repeated(const char* what, int there, int wanted) {
  if (wanted == 0 || wanted == there) return there;
  if (there == 1) return wanted;
  return absl::InvalidArgumentError(
      fmt::format("the file has {} {}, {} were requested", there, what, wanted));
}

}  // namespace

std::optional<Side> SideOf(const RotationZooFile& file, const std::string& path) {
  const std::string name = std::filesystem::path(path).filename().string();
  const auto begins = [](const std::string& text, const char* with) {
    return text.rfind(with, 0) == 0;
  };
  if (begins(file.objective, "qqt") || begins(file.objective, "ktk_r") ||
      begins(file.objective, "ktk_h")) {
    return Side::kKeys;
  }
  if (begins(file.objective, "sst") || begins(file.objective, "vtv")) return Side::kValues;
  if (name.find("k_rotation") != std::string::npos) return Side::kKeys;
  if (name.find("v_rotation") != std::string::npos) return Side::kValues;
  return std::nullopt;
}

absl::StatusOr<RotationZooFile> ReadRotationZoo(const std::string& path) {
  CRUMB_ASSIGN_OR_RETURN(const auto torch, TorchFile::Open(path));
  return Reader(*torch).Read();
}

absl::Status WriteRotationZoo(const RotationZooFile& file, const std::string& path) {
  return WriteAtomically(path, [&file](std::ostream& out) { WriteEntries(file, out); });
}

absl::StatusOr<RotationFile> FromRotationZoo(const RotationZooFile* keys,
                                             const RotationZooFile* values) {
  const RotationZooFile* any = keys != nullptr ? keys : values;
  if (any == nullptr) return absl::InvalidArgumentError("no rotations to convert");
  if (keys != nullptr && values != nullptr) CRUMB_RETURN_IF_ERROR(CheckSides(*keys, *values));
  bool hadamard = true;
  RotationFile file;
  file.head_dim = any->head_dim;
  file.layers = static_cast<int>(any->layer_ids.size());
  file.kv_heads =
      std::max(keys != nullptr ? keys->kv_heads : 1, values != nullptr ? values->kv_heads : 1);
  if (any->layer_ids.back() != file.layers - 1) file.layer_ids = any->layer_ids;
  const auto take = [&](const RotationZooFile* side, std::vector<float>& rotation,
                        std::vector<float>& eigenvalues) {
    if (side == nullptr) return;
    hadamard = hadamard && side->objective == "hadamard";
    rotation = Repeat(side->rotation, file.layers, side->kv_heads, file.layers, file.kv_heads);
    eigenvalues =
        Repeat(side->eigenvalues, file.layers, side->kv_heads, file.layers, file.kv_heads);
  };
  take(keys, file.rotation_k, file.eigenvalues_k);
  take(values, file.rotation_v, file.eigenvalues_v);
  const auto method = hadamard ? kernels::Method::kHadamard : kernels::Method::kOscar;
  const CalibrationOptions published = DefaultCalibration(method);
  file.method = std::string(kernels::MethodName(method));
  file.clip_k = published.clip_k;
  file.clip_v = published.clip_v;
  return file;
}

absl::StatusOr<RotationZooFile> ToRotationZoo(const RotationFile& file, Side side,
                                              int format_version, int layers, int kv_heads) {
  const bool keys = side == Side::kKeys;
  const std::vector<float>& rotation = keys ? file.rotation_k : file.rotation_v;
  if (rotation.empty()) {
    return absl::InvalidArgumentError(fmt::format("the file rotates no {}", keys ? "K" : "V"));
  }
  if (format_version == 1 && file.kv_heads != 1) {
    return absl::InvalidArgumentError(fmt::format(
        "format v1 holds one rotation per layer, the file has {} KV heads; use v2", file.kv_heads));
  }
  RotationZooFile zoo;
  zoo.format_version = format_version;
  zoo.head_dim = file.head_dim;
  zoo.objective = file.method == "hadamard" ? "hadamard" : keys ? "qqt_r_h_pbr" : "sst_r_h_pbr";
  CRUMB_ASSIGN_OR_RETURN(const int layer_count, Repeated("layers", file.layers, layers));
  CRUMB_ASSIGN_OR_RETURN(zoo.kv_heads,
                         Repeated("KV heads", file.kv_heads, format_version == 1 ? 1 : kv_heads));
  for (int layer = 0; layer < layer_count; ++layer) {
    zoo.layer_ids.push_back(layer_count == file.layers ? LayerId(file, layer) : layer);
  }
  zoo.rotation = Repeat(rotation, file.layers, file.kv_heads, layer_count, zoo.kv_heads);
  zoo.eigenvalues = Repeat(keys ? file.eigenvalues_k : file.eigenvalues_v, file.layers,
                           file.kv_heads, layer_count, zoo.kv_heads);
  return zoo;
}

}  // namespace crumb::calibration
