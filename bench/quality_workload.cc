// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_workload.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <random>

#include "calibration/calibrator.h"
#include "client/examples/tiny_lm/sequence_cache.h"
#include "common/json_file.h"
#include "common/status_macros.h"
#include "crumb/worker.h"
#include "fmt/format.h"
#include "models/dense_kv_cache.h"
#include "models/engine.h"
#include "models/logit_metrics.h"
#include "models/tokenizer.h"
#include "tools/model_activations.h"

namespace crumb::bench {
namespace {

constexpr int kStepTokens = 64;  // as many as are evicted together
constexpr int kGroupSizeMax = 128;
constexpr int kBootstrapDraws = 10000;
constexpr int64_t kTextBytesMax = int64_t{1} << 30;

// Sums over the positions of one sequence that predict a token of it.
struct SequenceScore {
  double kl = 0.0;
  double log_loss = 0.0;
  double top1 = 0.0;
};

struct Method {
  std::string name;
  std::unique_ptr<client::Worker> worker;
  double bits = 0.0;
  std::vector<SequenceScore> scores;  // means over positions, one per sequence
};

double LogLoss(std::span<const float> row, int32_t token) {
  const double most = *std::max_element(row.begin(), row.end());
  double sum = 0.0;
  for (const float logit : row) sum += std::exp(logit - most);
  return most + std::log(sum) - row[token];
}

size_t MostLikely(std::span<const float> row) {
  return std::max_element(row.begin(), row.end()) - row.begin();
}

struct Estimate {
  double mean = 0.0;
  double error = 0.0;  // standard error of the mean
};

Estimate EstimateOf(const std::vector<double>& values) {
  const double n = static_cast<double>(values.size());
  Estimate estimate;
  for (const double value : values) estimate.mean += value / n;
  double squares = 0.0;
  for (const double value : values) squares += std::pow(value - estimate.mean, 2);
  if (n > 1) estimate.error = std::sqrt(squares / (n - 1) / n);
  return estimate;
}

class QualityRun {
 public:
  explicit QualityRun(const QualityOptions& options) : options_(options) {}

  absl::StatusOr<QualityResult> Run() {
    CRUMB_RETURN_IF_ERROR(OpenModel());
    for (const std::string& name : options_.methods) {
      CRUMB_ASSIGN_OR_RETURN(Method method, OpenMethod(name));
      methods_.push_back(std::move(method));
    }
    for (const std::string& path : options_.rotations) {
      CRUMB_ASSIGN_OR_RETURN(Method method, OpenRotation(path));
      methods_.push_back(std::move(method));
    }
    std::vector<double> exact_loss;
    for (const std::vector<int32_t>& tokens : sequences_) {
      models::DenseKvCache dense(engine_->config(), engine_->pool());
      CRUMB_ASSIGN_OR_RETURN(const models::Logits exact,
                             engine_->Forward(dense, tokens, models::LogitRows::kAll));
      double loss = 0.0;
      for (size_t i = 0; i + 1 < tokens.size(); ++i) {
        loss += LogLoss(exact.row(static_cast<int>(i)), tokens[i + 1]);
      }
      exact_loss.push_back(loss / static_cast<double>(tokens.size() - 1));
      for (Method& method : methods_) {
        CRUMB_ASSIGN_OR_RETURN(const SequenceScore score, Score(*method.worker, tokens, exact));
        method.scores.push_back(score);
      }
    }
    return Summarize(std::exp(EstimateOf(exact_loss).mean));
  }

 private:
  absl::Status OpenModel() {
    CRUMB_ASSIGN_OR_RETURN(const auto tokenizer, models::Tokenizer::Load(options_.model));
    CRUMB_ASSIGN_OR_RETURN(engine_,
                           models::Engine::Load(options_.model, {.threads = options_.threads}));
    if (options_.context > engine_->config().max_positions) {
      return absl::InvalidArgumentError(fmt::format("{} has {} positions, the context is {}",
                                                    options_.model, engine_->config().max_positions,
                                                    options_.context));
    }
    for (const std::string& path : options_.texts) {
      CRUMB_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kTextBytesMax));
      const std::vector<int32_t> ids = tokenizer->Encode(text);
      for (size_t begin = 0; begin + options_.context <= ids.size() &&
                             static_cast<int>(sequences_.size()) < options_.sequences;
           begin += options_.context) {
        sequences_.emplace_back(ids.begin() + begin, ids.begin() + begin + options_.context);
      }
    }
    if (sequences_.size() >= 2) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("the texts give {} sequences of {} tokens, at least 2 are needed",
                    sequences_.size(), options_.context));
  }

  absl::StatusOr<RotationFile> CalibrateFor(kernels::Method method) {
    if (options_.calibration_texts.empty()) {
      return absl::InvalidArgumentError("the methods oscar and crumb need calibration text");
    }
    if (activations_ == nullptr) {
      CRUMB_ASSIGN_OR_RETURN(activations_,
                             tools::ModelActivations::Open({.model = options_.model,
                                                            .texts = options_.calibration_texts,
                                                            .context = options_.calibration_context,
                                                            .tokens = options_.calibration_tokens,
                                                            .threads = options_.threads}));
    }
    auto calibration = calibration::DefaultCalibration(method);
    calibration.positions = options_.context;
    return calibration::Calibrate(*activations_, calibration, nullptr);
  }

  absl::StatusOr<RotationFile> RotationsOf(kernels::Method method) {
    if (method == kernels::Method::kHadamard) {
      return calibration::HadamardRotations(engine_->config().head_dim);
    }
    return CalibrateFor(method);
  }

  client::WorkerOptions WorkerFor() const {
    const models::ModelConfig& config = engine_->config();
    client::WorkerOptions worker;
    worker.model = worker.weights = "quality";
    worker.layers = config.layers;
    worker.kv_heads = config.kv_heads;
    worker.q_heads = config.q_heads;
    worker.head_dim = config.head_dim;
    worker.group_size = std::min(config.head_dim, kGroupSizeMax);
    worker.draft_slots = kStepTokens - 1;
    worker.parallel_for = [this](int count, const std::function<void(int)>& body) {
      engine_->pool().ParallelFor(count, body);
    };
    return worker;
  }

  static absl::StatusOr<Method> Open(const std::string& name, const client::WorkerOptions& worker) {
    const kernels::TileShape shape = worker.tile_shape();
    Method result{.name = name, .worker = nullptr, .bits = 0.0, .scores = {}};
    result.bits = 16.0 * static_cast<double>(shape.bytes(worker.history_format)) /
                  static_cast<double>(shape.bf16_bytes());
    CRUMB_ASSIGN_OR_RETURN(result.worker, client::Worker::Open(worker, nullptr));
    return result;
  }

  absl::StatusOr<Method> OpenRotation(const std::string& path) const {
    client::WorkerOptions worker = WorkerFor();
    CRUMB_RETURN_IF_ERROR(worker.UseRotationFile(path));
    return Open(std::filesystem::path(path).filename().string(), worker);
  }

  absl::StatusOr<Method> OpenMethod(const std::string& name) {
    client::WorkerOptions worker = WorkerFor();
    if (name == "bf16") {
      worker.history_format = kernels::PageFormat::kBf16;
    } else {
      const auto method = kernels::MethodNamed(name);
      if (!method) return absl::InvalidArgumentError("no method is called " + name);
      worker.method = *method;
      worker.clip_k = worker.clip_v = 0.0f;
      if (*method != kernels::Method::kNaive) {
        CRUMB_ASSIGN_OR_RETURN(const RotationFile file, RotationsOf(*method));
        CRUMB_ASSIGN_OR_RETURN(worker.rotations, client::RotationSet::FromFile(file));
        worker.clip_k = file.clip_k;
        worker.clip_v = file.clip_v;
      }
    }
    return Open(name, worker);
  }

  absl::StatusOr<SequenceScore> Score(client::Worker& worker, std::span<const int32_t> tokens,
                                      const models::Logits& exact) const {
    client::SequenceOptions alone;
    alone.publish = client::Publish::kNone;
    CRUMB_ASSIGN_OR_RETURN(const auto sequence, worker.Begin(tokens.first(kStepTokens), alone));
    tiny_lm::SequenceCache cache(*sequence);
    SequenceScore score;
    const double count = static_cast<double>(tokens.size() - 1);
    for (size_t begin = 0; begin < tokens.size(); begin += kStepTokens) {
      const auto step = tokens.subspan(begin, std::min<size_t>(kStepTokens, tokens.size() - begin));
      CRUMB_ASSIGN_OR_RETURN(const models::Logits ours,
                             engine_->Forward(cache, step, models::LogitRows::kAll));
      for (size_t i = 0; i < step.size() && begin + i + 1 < tokens.size(); ++i) {
        const auto row = ours.row(static_cast<int>(i));
        const auto reference = exact.row(static_cast<int>(begin + i));
        score.kl += models::KlDivergence(reference, row) / count;
        score.log_loss += LogLoss(row, tokens[begin + i + 1]) / count;
        score.top1 += (MostLikely(row) == MostLikely(reference)) / count;
      }
    }
    return score;
  }

  static std::vector<double> Column(const Method& method, double SequenceScore::*member) {
    std::vector<double> values;
    for (const SequenceScore& score : method.scores) values.push_back(score.*member);
    return values;
  }

  // The 2.5 and 97.5 % points of sum(kl) / sum(oscar's kl) over sequences drawn with replacement.
  static void Bootstrap(const std::vector<double>& kl, const std::vector<double>& oscar,
                        QualityRow& row) {
    std::mt19937 random(1);
    std::vector<double> ratios(kBootstrapDraws);
    for (double& ratio : ratios) {
      double ours = 0.0, theirs = 0.0;
      for (size_t i = 0; i < kl.size(); ++i) {
        const size_t drawn = random() % kl.size();
        ours += kl[drawn];
        theirs += oscar[drawn];
      }
      ratio = ours / theirs;
    }
    std::sort(ratios.begin(), ratios.end());
    row.kl_over_oscar = EstimateOf(kl).mean / EstimateOf(oscar).mean;
    row.kl_over_oscar_low = ratios[kBootstrapDraws / 40];
    row.kl_over_oscar_high = ratios[kBootstrapDraws - 1 - kBootstrapDraws / 40];
  }

  QualityResult Summarize(double exact_perplexity) const {
    QualityResult result;
    result.sequences = static_cast<int>(sequences_.size());
    result.context = options_.context;
    result.exact_perplexity = exact_perplexity;
    const auto oscar = std::find_if(methods_.begin(), methods_.end(),
                                    [](const Method& method) { return method.name == "oscar"; });
    for (const Method& method : methods_) {
      const std::vector<double> kl = Column(method, &SequenceScore::kl);
      const Estimate loss = EstimateOf(Column(method, &SequenceScore::log_loss));
      const Estimate top1 = EstimateOf(Column(method, &SequenceScore::top1));
      QualityRow row{.method = method.name, .bits = method.bits};
      row.kl = EstimateOf(kl).mean;
      row.kl_error = EstimateOf(kl).error;
      row.perplexity = std::exp(loss.mean);
      row.perplexity_error = row.perplexity * loss.error;
      row.top1 = top1.mean;
      row.top1_error = top1.error;
      if (oscar != methods_.end()) Bootstrap(kl, Column(*oscar, &SequenceScore::kl), row);
      result.rows.push_back(row);
    }
    return result;
  }

  const QualityOptions& options_;
  std::unique_ptr<models::Engine> engine_;
  std::unique_ptr<tools::ModelActivations> activations_;
  std::vector<std::vector<int32_t>> sequences_;
  std::vector<Method> methods_;
};

}  // namespace

absl::StatusOr<QualityResult> RunQualityWorkload(const QualityOptions& options) {
  return QualityRun(options).Run();
}

nlohmann::json QualityJson(const QualityResult& result) {
  nlohmann::json json = {{"sequences", result.sequences},
                         {"context", result.context},
                         {"exact_ppl", result.exact_perplexity},
                         {"rows", nlohmann::json::array()}};
  for (const QualityRow& row : result.rows) {
    json["rows"].push_back({{"method", row.method},
                            {"bits", row.bits},
                            {"kl", row.kl},
                            {"kl_error", row.kl_error},
                            {"ppl", row.perplexity},
                            {"ppl_error", row.perplexity_error},
                            {"top1", row.top1},
                            {"top1_error", row.top1_error},
                            {"kl_over_oscar", row.kl_over_oscar},
                            {"kl_over_oscar_low", row.kl_over_oscar_low},
                            {"kl_over_oscar_high", row.kl_over_oscar_high}});
  }
  return json;
}

std::string QualityText(const QualityResult& result) {
  std::string text =
      fmt::format("{} sequences of {} tokens, perplexity {:.3f} with exact keys and values\n\n",
                  result.sequences, result.context, result.exact_perplexity);
  text += fmt::format("{:>9}  {:>5}  {:>7} {:>8}  {:>6}  {:>6}  {}\n", "method", "bits", "KL", "+-",
                      "ppl", "top-1", "KL / oscar's, 95 %");
  for (const QualityRow& row : result.rows) {
    text += fmt::format("{:>9}  {:>5.2f}  {:>7.4f} {:>8.4f}  {:>6.3f}  {:>6.3f}", row.method,
                        row.bits, row.kl, row.kl_error, row.perplexity, row.top1);
    if (row.kl_over_oscar > 0) {
      text += fmt::format("  {:.3f} [{:.3f}, {:.3f}]", row.kl_over_oscar, row.kl_over_oscar_low,
                          row.kl_over_oscar_high);
    }
    text += "\n";
  }
  return text;
}

}  // namespace crumb::bench
