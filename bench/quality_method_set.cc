// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_method_set.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "bench/quality_cuda/device_attention.h"
#include "bench/quality_methods/block_gtq.h"
#include "bench/quality_methods/kvarn.h"
#include "bench/quality_methods/optr.h"
#include "bench/quality_methods/paged_cache.h"
#include "bench/quality_methods/window_codecs.h"
#include "calibration/calibrator.h"
#include "common/status_macros.h"
#include "crumb/worker.h"
#include "fmt/format.h"
#include "tools/activations.h"
#include "tools/attention_weights.h"

namespace crumb::bench {
namespace {

constexpr int kGroupSizeMax = 128;

std::shared_ptr<const WindowCodec> CodecNamed(const std::string& name, int head_dim) {
  if (name == "kivi") return std::make_shared<Kivi>(head_dim);
  if (name == "int4-hadamard") return std::make_shared<Int4Hadamard>(head_dim);
  if (name == "kvarn") return std::make_shared<Kvarn>(head_dim);
  if (name == "turboquant3") {
    return std::make_shared<TurboQuant>(head_dim, TurboQuant::Keys::kProduct);
  }
  if (name == "turboquant3-mse") {
    return std::make_shared<TurboQuant>(head_dim, TurboQuant::Keys::kMse);
  }
  return nullptr;
}

// Returns the bits per element that codecs store for one window, on average.
double BitsOf(const std::vector<std::shared_ptr<const WindowCodec>>& codecs, int head_dim) {
  double bytes = 0.0, elements = 0.0;
  for (const auto& codec : codecs) {
    const WindowRows rows = WindowRows::Random(codec->window_tokens(), head_dim);
    bytes += static_cast<double>(codec->Encode(kernels::TilePart::kKey, rows).size() +
                                 codec->Encode(kernels::TilePart::kValue, rows).size());
    elements += 2.0 * static_cast<double>(rows.size());
  }
  return 8.0 * bytes / elements;
}

// Block-GTQ's K2V2: bits per channel on average and their bounds per RoPE block, as the authors
// have them.
constexpr int kGtqBits = 2;
constexpr int kGtqBitsMin = 1;
constexpr int kGtqBitsMax = 8;

// Returns W_o,h' W_o,h / hidden size of every query head of a layer.
absl::StatusOr<std::vector<Eigen::MatrixXf>> GramsOf(const tools::AttentionWeights& weights,
                                                     int layer) {
  CRUMB_ASSIGN_OR_RETURN(const auto projection, weights.OutputProjection(layer));
  CRUMB_ASSIGN_OR_RETURN(const auto linear, projection.Decode());
  const int dim = weights.head_dim();
  std::vector<Eigen::MatrixXf> grams;
  for (int head = 0; head < weights.q_heads(); ++head) {
    const auto columns = linear.values.middleCols(head * dim, dim);
    grams.emplace_back(columns.transpose() * columns / static_cast<float>(linear.values.rows()));
  }
  return grams;
}

}  // namespace

absl::StatusOr<std::unique_ptr<QualityMethodSet>> QualityMethodSet::Open(
    const QualityOptions& options, const models::ModelConfig& model, int context) {
  auto set = std::unique_ptr<QualityMethodSet>(new QualityMethodSet(options, model, context));
  if (options.device == "cuda") {
    CRUMB_ASSIGN_OR_RETURN(set->device_attend_, OpenDeviceAttention());
  }
  return set;
}

absl::StatusOr<QualityMethod> QualityMethodSet::Named(const std::string& name) {
  if (name == "bf16") return Bf16();
  if (name == "naive") return Naive();
  if (name == "oscar") {
    const auto clips = calibration::DefaultCalibration(kernels::Method::kOscar);
    return Oscar(clips.clip_k, clips.clip_v);
  }
  if (name == "hadamard") {
    CRUMB_ASSIGN_OR_RETURN(const RotationFile file,
                           calibration::HadamardRotations(model_.head_dim));
    return Int2(name, file);
  }
  if (name == "crumb" || name == "crumb-context") {
    const int tokens = name == "crumb" ? options_.calibration_context : context_;
    CRUMB_ASSIGN_OR_RETURN(const RotationFile file, CalibrateFor(kernels::Method::kCrumb, tokens));
    return Int2(name, file);
  }
  PagedCacheOptions pages;
  if (name == "block-gtq") {
    CRUMB_ASSIGN_OR_RETURN(pages.codecs, BlockGtqCodecs());
  } else if (name == "optr" || name == "optr-mean") {
    CRUMB_ASSIGN_OR_RETURN(pages.codecs, OptrCodecs(name == "optr"));
  } else if (auto codec = CodecNamed(name, model_.head_dim)) {
    pages.codecs.push_back(std::move(codec));
  } else {
    return absl::InvalidArgumentError(fmt::format(
        "no method is called {}; there are bf16, naive, hadamard, kivi, turboquant3, "
        "turboquant3-mse, int4-hadamard, kvarn, block-gtq, optr, optr-mean, oscar, crumb and "
        "crumb-context",
        name));
  }
  return OfPages(name, std::move(pages));
}

absl::StatusOr<std::vector<std::shared_ptr<const WindowCodec>>> QualityMethodSet::BlockGtqCodecs()
    const {
  CRUMB_ASSIGN_OR_RETURN(const auto source, CalibrationSource(options_.calibration_context));
  CRUMB_ASSIGN_OR_RETURN(const auto energies, BlockEnergies(*source));
  std::vector<std::shared_ptr<const WindowCodec>> codecs;
  SphereCodebooks codebooks;
  for (const std::vector<double>& energy : energies) {
    const int budget = kGtqBits * static_cast<int>(energy.size());
    codecs.push_back(std::make_shared<BlockGtq>(
        AllocateBits(energy, budget, kGtqBitsMin, kGtqBitsMax), kGtqBits, codebooks));
  }
  return codecs;
}

absl::StatusOr<std::vector<std::shared_ptr<const WindowCodec>>> QualityMethodSet::OptrCodecs(
    bool learn) {
  CRUMB_RETURN_IF_ERROR(CalibrateOscar());
  CRUMB_ASSIGN_OR_RETURN(const auto source, CalibrationSource(context_));
  CRUMB_ASSIGN_OR_RETURN(const auto weights, tools::AttentionWeights::Open(options_.model));
  OptrOptions options;
  if (!learn) options.steps = 0;
  return LearnOptr(
      *source, *oscar_, [&](int layer) { return GramsOf(*weights, layer); },
      [&](int count, const std::function<void(int)>& body) {
        source->pool().ParallelFor(count, body);
      },
      options);
}

absl::Status QualityMethodSet::CalibrateOscar() {
  if (oscar_ != nullptr) return absl::OkStatus();
  CRUMB_ASSIGN_OR_RETURN(RotationFile file,
                         CalibrateFor(kernels::Method::kOscar, options_.calibration_context));
  oscar_ = std::make_unique<RotationFile>(std::move(file));
  return absl::OkStatus();
}

absl::StatusOr<QualityMethod> QualityMethodSet::Oscar(float clip_k, float clip_v) {
  CRUMB_RETURN_IF_ERROR(CalibrateOscar());
  RotationFile file = *oscar_;
  file.clip_k = clip_k;
  file.clip_v = clip_v;
  return Int2("oscar", file);
}

absl::StatusOr<QualityMethod> QualityMethodSet::FromRotationFile(const std::string& path) const {
  CRUMB_ASSIGN_OR_RETURN(const RotationFile file, ReadRotationFile(path));
  return Int2(std::filesystem::path(path).filename().string(), file);
}

absl::StatusOr<std::unique_ptr<tools::ModelActivations>> QualityMethodSet::CalibrationSource(
    int sequence_tokens) const {
  if (options_.calibration_texts.empty()) {
    return absl::InvalidArgumentError(
        "the methods oscar, crumb, block-gtq and optr need calibration text: --calibration-text");
  }
  return tools::ModelActivations::Open({.model = options_.model,
                                        .texts = options_.calibration_texts,
                                        .context = sequence_tokens,
                                        .tokens = options_.calibration_tokens,
                                        .threads = options_.threads});
}

absl::StatusOr<RotationFile> QualityMethodSet::CalibrateFor(kernels::Method method,
                                                            int sequence_tokens) const {
  CRUMB_ASSIGN_OR_RETURN(const auto source, CalibrationSource(sequence_tokens));
  auto calibration = calibration::DefaultCalibration(method);
  calibration.positions = context_;
  if (method == kernels::Method::kCrumb) {
    CRUMB_ASSIGN_OR_RETURN(calibration.value_hessians,
                           tools::OutputProjectionHessians(options_.model, source->shape()));
  }
  return calibration::Calibrate(*source, calibration, nullptr);
}

client::WorkerOptions QualityMethodSet::WorkerFor() const {
  client::WorkerOptions worker;
  worker.model = worker.weights = "quality";
  worker.layers = model_.layers;
  worker.kv_heads = model_.kv_heads;
  worker.q_heads = model_.q_heads;
  worker.head_dim = model_.head_dim;
  worker.group_size = std::min(model_.head_dim, kGroupSizeMax);
  worker.prefill_block = options_.prefill_block;
  worker.draft_slots = kStepTokens - 1;
  worker.watch_every = 0;  // a bad method must be measured, not replaced by BF16
  return worker;
}

absl::StatusOr<QualityMethod> QualityMethodSet::Bf16() const {
  if (device_attend_) return OfPages("bf16", {});
  client::WorkerOptions worker = WorkerFor();
  worker.history_format = kernels::PageFormat::kBf16;
  worker.clip_k = worker.clip_v = 0.0f;
  return OfWorker("bf16", worker);
}

absl::StatusOr<QualityMethod> QualityMethodSet::Naive() const {
  RotationFile file;
  file.method = "naive";
  return Int2("naive", file);
}

absl::StatusOr<QualityMethod> QualityMethodSet::Int2(const std::string& name,
                                                     const RotationFile& file) const {
  const auto method = kernels::MethodNamed(file.method);
  if (!method) {
    return absl::InvalidArgumentError(
        fmt::format("{}: method \"{}\" is not known", name, file.method));
  }
  client::WorkerOptions worker = WorkerFor();
  worker.method = *method;
  worker.clip_k = file.clip_k;
  worker.clip_v = file.clip_v;
  if (file.head_dim > 0) {
    CRUMB_ASSIGN_OR_RETURN(worker.rotations, client::RotationSet::FromFile(file, name));
  }
  if (!device_attend_) return OfWorker(name, worker);
  CRUMB_RETURN_IF_ERROR(worker.Validate());
  PagedCacheOptions pages;
  pages.int2 = true;
  pages.method = worker.method;
  pages.clip_k = worker.clip_k;
  pages.clip_v = worker.clip_v;
  pages.layers = worker.rotations.Expand(model_.layers, model_.kv_heads);
  pages.position_blocks = worker.rotations.position_blocks();
  pages.pages_per_position_block = worker.rotations.pages_per_position_block();
  return OfPages(name, std::move(pages));
}

absl::StatusOr<QualityMethod> QualityMethodSet::OfWorker(
    const std::string& name, const client::WorkerOptions& worker) const {
  const kernels::TileShape shape = worker.tile_shape();
  QualityMethod method{.name = name, .clip_k = worker.clip_k, .clip_v = worker.clip_v, .begin = {}};
  method.bits = 16.0 * static_cast<double>(shape.bytes(worker.history_format)) /
                static_cast<double>(shape.bf16_bytes());
  // Sequences of one worker share equal pages, but pages of prefill and decode differ.
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<client::Worker> decode,
                         client::Worker::Open(worker, nullptr));
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<client::Worker> prefill,
                         client::Worker::Open(worker, nullptr));
  method.begin = [decode, prefill](std::span<const int32_t> prompt) {
    return WorkerCache::Begin(prompt.size() > kStepTokens ? *prefill : *decode, prompt);
  };
  return method;
}

absl::StatusOr<QualityMethod> QualityMethodSet::OfPages(const std::string& name,
                                                        PagedCacheOptions pages) const {
  pages.model = model_;
  pages.context = context_;
  if (device_attend_) pages.attend = device_attend_;
  QualityMethod method{.name = name, .clip_k = pages.clip_k, .clip_v = pages.clip_v, .begin = {}};
  const kernels::TileShape shape = WorkerFor().tile_shape();
  method.bits = !pages.codecs.empty() ? BitsOf(pages.codecs, model_.head_dim)
                : pages.int2          ? 16.0 * static_cast<double>(shape.int2_bytes()) /
                                   static_cast<double>(shape.bf16_bytes())
                             : 16.0;
  auto decode = std::make_shared<const PagedCacheOptions>(pages);
  pages.prefill_block = options_.prefill_block;
  auto prefill = std::make_shared<const PagedCacheOptions>(std::move(pages));
  method.begin =
      [decode,
       prefill](std::span<const int32_t> prompt) -> absl::StatusOr<std::unique_ptr<MethodCache>> {
    return std::make_unique<PagedCache>(prompt.size() > kStepTokens ? *prefill : *decode);
  };
  return method;
}

}  // namespace crumb::bench
