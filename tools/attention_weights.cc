// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/attention_weights.h"

#include <set>
#include <utility>

#include "common/json_file.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::tools {
namespace {

constexpr int64_t kSizeMax = int64_t{1} << 24;
constexpr char kAttention[] = ".self_attn.";

absl::Status Wrong(const RawTensor& tensor, const std::string& what) {
  return absl::InvalidArgumentError(tensor.file + ": tensor " + tensor.name + ": " + what);
}

}  // namespace

absl::StatusOr<calibration::LinearWeight> AttentionWeights::Projection::Decode() const {
  return calibration::DecodeWeight(weight, scale ? &*scale : nullptr);
}

absl::StatusOr<std::unique_ptr<AttentionWeights>> AttentionWeights::Open(const std::string& dir) {
  CRUMB_ASSIGN_OR_RETURN(nlohmann::json config, ReadJsonObject(dir + "/config.json"));
  if (HasField(config, "text_config") && config["text_config"].is_object()) {
    nlohmann::json text = config["text_config"];
    // Its place differs between architectures.
    if (!HasField(text, "quantization_config") && HasField(config, "quantization_config")) {
      text["quantization_config"] = config["quantization_config"];
    }
    config = std::move(text);
  }
  CRUMB_ASSIGN_OR_RETURN(auto checkpoint, models::Checkpoint::Open(dir));
  std::unique_ptr<AttentionWeights> weights(
      new AttentionWeights(dir, std::move(config), std::move(checkpoint)));
  CRUMB_RETURN_IF_ERROR(weights->ReadSizes());
  CRUMB_RETURN_IF_ERROR(weights->FindPrefix());
  return weights;
}

absl::Status AttentionWeights::ReadSizes() {
  const std::string where = dir_ + "/config.json";
  const std::pair<const char*, int*> fields[] = {{"num_hidden_layers", &layers_},
                                                 {"num_attention_heads", &q_heads_},
                                                 {"num_key_value_heads", &kv_heads_},
                                                 {"hidden_size", &hidden_}};
  for (const auto& [name, value] : fields) {
    CRUMB_ASSIGN_OR_RETURN(*value, IntField(config_, name, 1, kSizeMax, where));
  }
  head_dim_ = hidden_ / q_heads_;
  if (HasField(config_, "head_dim")) {
    CRUMB_ASSIGN_OR_RETURN(head_dim_, IntField(config_, "head_dim", 1, kSizeMax, where));
  }
  if (q_heads_ % kv_heads_ == 0 && head_dim_ > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(where + ": num_attention_heads is no multiple of " +
                                    "num_key_value_heads, or head_dim is 0");
}

absl::Status AttentionWeights::FindPrefix() {
  std::set<std::string> prefixes;
  for (const std::string& name : checkpoint_->names()) {
    const size_t layers = name.find("layers.");
    const std::string end = std::string(kAttention) + "v_proj.weight";
    if (layers == std::string::npos || name.size() < end.size() ||
        name.compare(name.size() - end.size(), end.size(), end) != 0) {
      continue;
    }
    prefixes.insert(name.substr(0, layers));
  }
  if (prefixes.size() == 1) {
    prefix_ = *prefixes.begin();
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      dir_ + (prefixes.empty()
                  ? ": the weights lack tensors layers.N.self_attn.v_proj.weight"
                  : ": more than one set of layers has v_proj; which is the model's is not known"));
}

absl::Status AttentionWeights::CheckLinearInValues() const {
  CRUMB_ASSIGN_OR_RETURN(const bool gate,
                         BoolField(config_, "attn_output_gate", false, dir_ + "/config.json"));
  if (gate) {
    return absl::InvalidArgumentError(
        dir_ +
        "/config.json: attn_output_gate: a gate multiplies channels between attention and "
        "o_proj, which a rotation does not pass; keep R_V at run time for this model");
  }
  for (const std::string& name : checkpoint_->names()) {
    if (name.find(std::string(kAttention) + "v_norm") == std::string::npos) continue;
    return absl::InvalidArgumentError(
        dir_ + ": tensor " + name +
        ": values are normalised behind v_proj; keep R_V at run time for this model");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int>> AttentionWeights::LayersOf(const RotationFile& file,
                                                            const std::string& path) const {
  const bool layers_fit = file.layers == 1 || file.layers == layers_ ||
                          (!file.layer_ids.empty() && file.layer_ids.back() < layers_);
  if (file.head_dim != head_dim_ || (file.kv_heads != 1 && file.kv_heads != kv_heads_) ||
      !layers_fit) {
    return absl::InvalidArgumentError(fmt::format(
        "{} is for {} layers, {} KV heads, head_dim {}; {} has {}, {}, {}", path, file.layers,
        file.kv_heads, file.head_dim, dir_, layers_, kv_heads_, head_dim_));
  }
  if (!file.layer_ids.empty()) return file.layer_ids;
  std::vector<int> layers(layers_);
  for (int i = 0; i < layers_; ++i) layers[i] = i;
  return layers;
}

absl::Status AttentionWeights::CheckLayer(int layer) const {
  CRUMB_ASSIGN_OR_RETURN(const Projection v, ValueProjection(layer));
  return OutputProjection(layer).status();
}

absl::StatusOr<AttentionWeights::Projection> AttentionWeights::ValueProjection(int layer) const {
  return Find(layer, "v_proj", int64_t{kv_heads_} * head_dim_, hidden_);
}

absl::StatusOr<AttentionWeights::Projection> AttentionWeights::OutputProjection(int layer) const {
  return Find(layer, "o_proj", hidden_, int64_t{q_heads_} * head_dim_);
}

absl::StatusOr<AttentionWeights::Projection> AttentionWeights::Find(int layer,
                                                                    const std::string& name,
                                                                    int64_t rows,
                                                                    int64_t columns) const {
  const std::string base = fmt::format("{}layers.{}{}{}", prefix_, layer, kAttention, name);
  Projection projection;
  CRUMB_ASSIGN_OR_RETURN(projection.weight, checkpoint_->FindRaw(base + ".weight"));
  if (projection.weight.shape != std::vector<int64_t>{rows, columns}) {
    return Wrong(projection.weight, "shape " + ShapeText(projection.weight.shape) +
                                        ", config.json requires " + ShapeText({rows, columns}));
  }
  for (const char* scale : {".weight_scale", ".weight_scale_inv"}) {
    if (!checkpoint_->Has(base + scale)) continue;
    CRUMB_ASSIGN_OR_RETURN(projection.scale, checkpoint_->FindRaw(base + scale));
    CRUMB_RETURN_IF_ERROR(calibration::CheckScale(projection.weight, *projection.scale));
  }
  if (checkpoint_->Has(base + ".bias")) {
    CRUMB_ASSIGN_OR_RETURN(projection.bias, checkpoint_->FindRaw(base + ".bias"));
    if (projection.bias->shape != std::vector<int64_t>{rows}) {
      return Wrong(*projection.bias, "shape " + ShapeText(projection.bias->shape) +
                                         ", the weight requires " + ShapeText({rows}));
    }
  }
  projection.static_input_scale = checkpoint_->Has(base + ".input_scale");
  return projection;
}

absl::StatusOr<calibration::LinearWeight> AttentionWeights::DecodeBias(const RawTensor& bias) {
  RawTensor row = bias;
  row.shape.insert(row.shape.begin(), 1);
  return calibration::DecodeWeight(row, nullptr);
}

void AttentionWeights::Release(const Projection& projection) const {
  checkpoint_->ReleasePages(projection.weight);
}

namespace {

absl::StatusOr<std::vector<Eigen::MatrixXd>> HessiansOf(const AttentionWeights& weights,
                                                        int layer) {
  CRUMB_ASSIGN_OR_RETURN(const auto projection, weights.OutputProjection(layer));
  CRUMB_ASSIGN_OR_RETURN(const auto linear, projection.Decode());
  weights.Release(projection);
  const int dim = weights.head_dim(), group = weights.q_heads() / weights.kv_heads();
  std::vector<Eigen::MatrixXd> hessians;
  for (int head = 0; head < weights.kv_heads(); ++head) {
    Eigen::MatrixXf sum = Eigen::MatrixXf::Zero(dim, dim);
    for (int g = 0; g < group; ++g) {
      const auto columns = linear.values.middleCols((head * group + g) * dim, dim);
      sum.noalias() += columns.transpose() * columns;
    }
    hessians.push_back(sum.cast<double>());
  }
  return hessians;
}

}  // namespace

absl::StatusOr<calibration::ValueHessians> OutputProjectionHessians(
    const std::string& model, const calibration::ModelShape& shape) {
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<AttentionWeights> weights, AttentionWeights::Open(model));
  if (weights->head_dim() != shape.head_dim || weights->kv_heads() != shape.kv_heads ||
      weights->q_heads() != shape.q_heads || weights->layers() < shape.layers) {
    return absl::InvalidArgumentError(fmt::format(
        "{}/config.json: {} layers, {} query heads, {} KV heads, head_dim {}; the activations have "
        "{}, {}, {}, {}",
        model, weights->layers(), weights->q_heads(), weights->kv_heads(), weights->head_dim(),
        shape.layers, shape.q_heads, shape.kv_heads, shape.head_dim));
  }
  // Missing weights are reported before the work begins.
  for (int layer = 0; layer < shape.layers; ++layer) {
    CRUMB_RETURN_IF_ERROR(weights->OutputProjection(shape.LayerId(layer)).status());
  }
  return [weights, ids = shape.layer_ids](int layer) {
    return HessiansOf(*weights, ids.empty() ? layer : ids[layer]);
  };
}

}  // namespace crumb::tools
