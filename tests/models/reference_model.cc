// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/models/reference_model.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "kernels/bf16.h"

namespace crumb::models {
namespace {

using Row = std::vector<double>;

constexpr int kLayers = 2, kHidden = 48, kInner = 80, kQHeads = 4, kKvHeads = 2, kHeadDim = 32;
constexpr int kVocabulary = 96;
constexpr double kTheta = 5000.0, kEps = 1e-6;

double ThroughBf16(double x) {
  return kernels::Bf16ToFloat(kernels::Bf16FromFloat(static_cast<float>(x)));
}

// The tensors of one layer, by their short names.
class Layer {
 public:
  Layer(const SmallModel& model, int index)
      : model_(model), prefix_("model.layers." + std::to_string(index) + ".") {}

  Row Vector(const std::string& name) const { return Values(prefix_ + name); }

  // Returns W x, plus the bias if there is one.
  Row Project(const std::string& name, const Row& x) const {
    const Row weight = Values(prefix_ + name + ".weight");
    Row out(weight.size() / x.size());
    if (model_.tensors.contains(prefix_ + name + ".bias")) out = Values(prefix_ + name + ".bias");
    for (size_t r = 0; r < out.size(); ++r) {
      for (size_t c = 0; c < x.size(); ++c) out[r] += weight[r * x.size() + c] * x[c];
    }
    return out;
  }

 private:
  Row Values(const std::string& name) const {
    const std::string& bytes = model_.tensors.at(name).bytes;
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return {values.begin(), values.end()};
  }

  const SmallModel& model_;
  const std::string prefix_;
};

Row Normalised(const Row& x, const Row& weight) {
  double squares = 0.0;
  for (const double value : x) squares += value * value;
  Row out(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    out[i] = x[i] / std::sqrt(squares / static_cast<double>(x.size()) + kEps) * weight[i];
  }
  return out;
}

Row HeadOf(const Row& rows, int head) {
  return Row(rows.begin() + head * kHeadDim, rows.begin() + (head + 1) * kHeadDim);
}

// Applies norm, RoPE and rounding to one head.
Row NormedAndTurned(const Row& head, const Row& weight, int position) {
  const Row x = Normalised(head, weight);
  Row out(kHeadDim);
  for (int i = 0; i < kHeadDim / 2; ++i) {
    const double angle = position * std::pow(kTheta, -2.0 * i / kHeadDim);
    const double a = x[i], b = x[i + kHeadDim / 2];
    out[i] = ThroughBf16(a * std::cos(angle) - b * std::sin(angle));
    out[i + kHeadDim / 2] = ThroughBf16(b * std::cos(angle) + a * std::sin(angle));
  }
  return out;
}

Row Attend(const Row& q, const std::vector<Row>& keys, const std::vector<Row>& values) {
  Row weights, out(kHeadDim);
  double sum = 0.0;
  for (const Row& key : keys) {
    double dot = 0.0;
    for (int c = 0; c < kHeadDim; ++c) dot += q[c] * key[c];
    weights.push_back(std::exp(dot / std::sqrt(kHeadDim)));
    sum += weights.back();
  }
  for (size_t t = 0; t < values.size(); ++t) {
    for (int c = 0; c < kHeadDim; ++c) out[c] += weights[t] / sum * values[t][c];
  }
  return out;
}

using HeadRows = std::vector<Row>;  // rows of all tokens so far

// Adds the output of one layer to the residual stream of the token at `position`.
void AddLayer(const Layer& layer, int position, std::vector<HeadRows>& keys,
              std::vector<HeadRows>& values, Row& hidden) {
  const Row x = Normalised(hidden, layer.Vector("input_layernorm.weight"));
  const Row q = layer.Project("self_attn.q_proj", x), k = layer.Project("self_attn.k_proj", x),
            v = layer.Project("self_attn.v_proj", x);
  for (int head = 0; head < kKvHeads; ++head) {
    keys[head].push_back(
        NormedAndTurned(HeadOf(k, head), layer.Vector("self_attn.k_norm.weight"), position));
    Row value = HeadOf(v, head);
    for (double& element : value) element = ThroughBf16(element);
    values[head].push_back(value);
  }
  Row attended;
  for (int head = 0; head < kQHeads; ++head) {
    const int kv = head / (kQHeads / kKvHeads);
    const Row turned =
        NormedAndTurned(HeadOf(q, head), layer.Vector("self_attn.q_norm.weight"), position);
    const Row out = Attend(turned, keys[kv], values[kv]);
    attended.insert(attended.end(), out.begin(), out.end());
  }
  const Row added = layer.Project("self_attn.o_proj", attended);
  for (int c = 0; c < kHidden; ++c) hidden[c] += added[c];

  const Row y = Normalised(hidden, layer.Vector("post_attention_layernorm.weight"));
  Row gate = layer.Project("mlp.gate_proj", y);
  const Row up = layer.Project("mlp.up_proj", y);
  for (int i = 0; i < kInner; ++i) gate[i] *= up[i] / (1.0 + std::exp(-gate[i]));
  const Row more = layer.Project("mlp.down_proj", gate);
  for (int c = 0; c < kHidden; ++c) hidden[c] += more[c];
}

// Writes random tensors with one standard deviation around one mean.
class RandomTensors {
 public:
  RandomTensors(uint32_t seed, RawTensors& out) : random_(seed), out_(out) {}

  void Add(const std::string& name, std::vector<int64_t> shape, double mean, double deviation) {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    std::normal_distribution<double> normal(mean, deviation);
    std::vector<float> values(elements);
    for (float& value : values) value = static_cast<float>(normal(random_));
    out_[name] = {"F32", std::move(shape),
                  std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size())};
  }
  void AddProjection(const std::string& name, int64_t rows, int64_t columns) {
    Add(name + ".weight", {rows, columns}, 0.0, 1.0 / std::sqrt(static_cast<double>(columns)));
  }

 private:
  std::mt19937 random_;
  RawTensors& out_;
};

}  // namespace

SmallModel RandomSmallModel(bool attention_bias, uint32_t seed) {
  SmallModel model;
  model.config = {{"architectures", {"Qwen3ForCausalLM"}},
                  {"vocab_size", kVocabulary},
                  {"hidden_size", kHidden},
                  {"intermediate_size", kInner},
                  {"num_hidden_layers", kLayers},
                  {"num_attention_heads", kQHeads},
                  {"num_key_value_heads", kKvHeads},
                  {"head_dim", kHeadDim},
                  {"max_position_embeddings", 512},
                  {"rms_norm_eps", kEps},
                  {"rope_theta", kTheta},
                  {"tie_word_embeddings", true},
                  {"attention_bias", attention_bias}};
  RandomTensors random(seed, model.tensors);
  random.Add("model.embed_tokens.weight", {kVocabulary, kHidden}, 0.0, 1.0);
  random.Add("model.norm.weight", {kHidden}, 1.0, 0.1);
  const struct {
    const char* name;
    int64_t rows, columns;
  } attention[] = {{"q_proj", kQHeads * kHeadDim, kHidden},
                   {"k_proj", kKvHeads * kHeadDim, kHidden},
                   {"v_proj", kKvHeads * kHeadDim, kHidden},
                   {"o_proj", kHidden, kQHeads * kHeadDim}};
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    for (const auto& projection : attention) {
      const std::string name = prefix + "self_attn." + projection.name;
      random.AddProjection(name, projection.rows, projection.columns);
      if (attention_bias) random.Add(name + ".bias", {projection.rows}, 0.0, 1.0);
    }
    random.AddProjection(prefix + "mlp.gate_proj", kInner, kHidden);
    random.AddProjection(prefix + "mlp.up_proj", kInner, kHidden);
    random.AddProjection(prefix + "mlp.down_proj", kHidden, kInner);
    random.Add(prefix + "input_layernorm.weight", {kHidden}, 1.0, 0.1);
    random.Add(prefix + "post_attention_layernorm.weight", {kHidden}, 1.0, 0.1);
    random.Add(prefix + "self_attn.q_norm.weight", {kHeadDim}, 1.0, 0.1);
    random.Add(prefix + "self_attn.k_norm.weight", {kHeadDim}, 1.0, 0.1);
  }
  return model;
}

void WriteModel(const SmallModel& model, const ModelFolder& folder) {
  folder.Write("config.json", model.config);
  folder.Write("model.safetensors", FormatSafetensors(model.tensors));
}

std::vector<double> ReferenceLogits(const SmallModel& model, std::span<const int32_t> tokens) {
  std::vector<float> embedding(kVocabulary * kHidden), norm(kHidden);
  std::memcpy(embedding.data(), model.tensors.at("model.embed_tokens.weight").bytes.data(),
              embedding.size() * sizeof(float));
  std::memcpy(norm.data(), model.tensors.at("model.norm.weight").bytes.data(),
              norm.size() * sizeof(float));
  std::vector<std::vector<HeadRows>> keys(kLayers, std::vector<HeadRows>(kKvHeads));
  std::vector<std::vector<HeadRows>> values = keys;
  std::vector<double> logits;
  for (size_t position = 0; position < tokens.size(); ++position) {
    const auto begin = embedding.begin() + tokens[position] * kHidden;
    Row hidden(begin, begin + kHidden);
    for (int layer = 0; layer < kLayers; ++layer) {
      AddLayer(Layer(model, layer), static_cast<int>(position), keys[layer], values[layer], hidden);
    }
    const Row last = Normalised(hidden, Row(norm.begin(), norm.end()));
    for (int id = 0; id < kVocabulary; ++id) {
      double logit = 0.0;
      for (int c = 0; c < kHidden; ++c) logit += embedding[id * kHidden + c] * last[c];
      logits.push_back(logit);
    }
  }
  return logits;
}

double RelativeDifference(std::span<const float> a, std::span<const double> b) {
  double difference = 0.0, whole = 0.0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    whole += b[i] * b[i];
  }
  return std::sqrt(difference / whole);
}

}  // namespace crumb::models
