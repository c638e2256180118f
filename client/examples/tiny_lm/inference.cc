// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/examples/tiny_lm/inference.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "client/examples/tiny_lm/checkpoint_digest.h"
#include "common/sha256.h"
#include "common/status_macros.h"
#include "models/kv_cache.h"
#include "models/logits.h"
#include "models/rope.h"

namespace crumb::tiny_lm {
namespace {

constexpr int kDefaultGroupSizeMax = 128;
constexpr int kAttempts = 3;  // attempts at a prompt whose cached pages are damaged
constexpr Duration kPublishTimeout = std::chrono::seconds(30);

double SecondsSince(TimePoint start) {
  return std::chrono::duration<double>(Clock::Real().Now() - start).count();
}

std::string FolderName(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  const size_t begin = path.find_last_of('/', end);
  return path.substr(begin == std::string::npos ? 0 : begin + 1,
                     end - (begin == std::string::npos ? -1 : begin));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Inference>> Inference::Open(const RunOptions& options) {
  auto inference = std::unique_ptr<Inference>(new Inference(options));
  CRUMB_RETURN_IF_ERROR(inference->OpenModel());
  CRUMB_RETURN_IF_ERROR(inference->OpenStore());
  return inference;
}

absl::Status Inference::OpenModel() {
  CRUMB_ASSIGN_OR_RETURN(tokenizer_, models::Tokenizer::Load(options_.model));
  CRUMB_ASSIGN_OR_RETURN(engine_,
                         models::Engine::Load(options_.model, {.threads = options_.threads}));
  return absl::OkStatus();
}

absl::Status Inference::OpenStore() {
  if (options_.store != "none") {
    client::ClientOptions client_options;
    client_options.socket_dir = options_.store;
    client_options.process_name = "crumb-tiny-lm";
    CRUMB_ASSIGN_OR_RETURN(client_, client::Client::Open(client_options));
  }
  CRUMB_ASSIGN_OR_RETURN(const client::WorkerOptions worker_options, MakeWorkerOptions());
  CRUMB_ASSIGN_OR_RETURN(runner_,
                         options_.device == "cuda"
                             ? OpenCudaRunner(options_.model, worker_options, client_.get())
                             : OpenCpuRunner(*engine_, worker_options, client_.get()));
  return absl::OkStatus();
}

absl::StatusOr<client::WorkerOptions> Inference::MakeWorkerOptions() const {
  const models::ModelConfig& config = engine_->config();
  client::WorkerOptions worker;
  worker.model = FolderName(options_.model);
  worker.weights = options_.weights_version;
  if (worker.weights.empty()) {
    CRUMB_ASSIGN_OR_RETURN(worker.weights, CheckpointDigest(options_.model));
  }
  worker.layers = config.layers;
  worker.kv_heads = config.kv_heads;
  worker.q_heads = config.q_heads;
  worker.head_dim = config.head_dim;
  worker.group_size = options_.group_size > 0 ? options_.group_size
                                              : std::min(config.head_dim, kDefaultGroupSizeMax);
  worker.history_format =
      options_.kv == "int2" ? kernels::PageFormat::kInt2 : kernels::PageFormat::kBf16;
  CRUMB_RETURN_IF_ERROR(SetQuantizer(worker));
  worker.rope = models::DescribeRope(config.rope);
  worker.parallel_for = [this](int count, const std::function<void(int)>& body) {
    engine_->pool().ParallelFor(count, body);
  };
  return worker;
}

absl::Status Inference::SetQuantizer(client::WorkerOptions& worker) const {
  const std::string& rotation = options_.rotation;
  if (rotation != "hadamard" && rotation != "identity") {
    CRUMB_RETURN_IF_ERROR(worker.UseRotationFile(rotation));
    const std::string method(kernels::MethodName(worker.method));
    if (!options_.method.empty() && options_.method != method) {
      return absl::InvalidArgumentError(
          fmt::format("{} is for the method {}, not {}", rotation, method, options_.method));
    }
    return absl::OkStatus();
  }
  const std::string method = options_.method.empty() ? "oscar" : options_.method;
  if (method == "crumb") {
    return absl::InvalidArgumentError("the method crumb needs a rotation file: --rotation FILE");
  }
  worker.method = *kernels::MethodNamed(method);
  if (worker.method == kernels::Method::kNaive) {
    worker.clip_k = worker.clip_v = 0.0f;
  } else if (rotation == "hadamard") {
    CRUMB_ASSIGN_OR_RETURN(worker.rotations, client::RotationSet::Hadamard(worker.head_dim));
  }
  return absl::OkStatus();
}

client::SequenceOptions Inference::MakeSequenceOptions(client::Publish publish) const {
  client::SequenceOptions sequence;
  if (!options_.salt.empty()) sequence.extra.push_back(Sha256(options_.salt));
  sequence.publish = publish;
  return sequence;
}

absl::StatusOr<RunReport> Inference::Run(const Prompt& full_prompt) {
  const std::span<const int32_t> prompt = full_prompt.tokens;
  const int room = engine_->config().max_positions - static_cast<int>(prompt.size());
  if (prompt.empty() || room < options_.generate) {
    return absl::InvalidArgumentError(fmt::format(
        "the prompt has {} tokens and {} are to be generated; the model has {} positions",
        prompt.size(), options_.generate, engine_->config().max_positions));
  }
  RunReport report;
  const TimePoint start = Clock::Real().Now();
  std::unique_ptr<RunningSequence> sequence;
  absl::StatusOr<std::vector<int32_t>> answer;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    sequence.reset();
    CRUMB_ASSIGN_OR_RETURN(sequence,
                           runner_->Begin(prompt, MakeSequenceOptions(client::Publish::kAll)));
    answer = Generate(*sequence, full_prompt, report);
    if (!absl::IsDataLoss(answer.status())) break;  // otherwise cached pages were damaged
  }
  CRUMB_RETURN_IF_ERROR(answer.status());
  const std::vector<int32_t>& generated = *answer;
  report.decode_seconds = SecondsSince(start) - report.ttft_seconds;
  report.text = tokenizer_->Decode(generated);
  report.generated_tokens = static_cast<int>(generated.size());
  report.stats = sequence->stats();
  const kernels::TileShape shape = runner_->options().tile_shape();
  report.history_bits_per_element =
      16.0 * static_cast<double>(shape.bytes(runner_->options().history_format)) /
      static_cast<double>(shape.bf16_bytes());
  CRUMB_RETURN_IF_ERROR(sequence->Finish());
  if (options_.compare) {
    CRUMB_ASSIGN_OR_RETURN(report.comparison, Compare(prompt, generated));
  }
  CRUMB_RETURN_IF_ERROR(Publish(report));
  return report;
}

absl::StatusOr<std::vector<int32_t>> Inference::Generate(RunningSequence& sequence,
                                                         const Prompt& prompt, RunReport& report) {
  const TimePoint start = Clock::Real().Now();
  const std::vector<int32_t>& stops = engine_->config().eos_ids;
  std::vector<int32_t> generated;
  auto fresh = std::span(prompt.tokens).subspan(static_cast<size_t>(sequence.cached_tokens()));
  do {
    CRUMB_ASSIGN_OR_RETURN(const models::Logits logits,
                           sequence.Forward(fresh, models::LogitRows::kLast));
    if (generated.empty()) report.ttft_seconds = SecondsSince(start);
    const int32_t token = models::GreedyToken(logits.last());
    if (token == prompt.end_of_turn || std::binary_search(stops.begin(), stops.end(), token)) break;
    generated.push_back(token);
    fresh = std::span(generated).last(1);
  } while (static_cast<int>(generated.size()) < options_.generate);
  return generated;
}

// Both runs read the same tokens. The worker's prompt is processed as when it is served, and the
// generated tokens one by one.
absl::StatusOr<Comparison> Inference::Compare(std::span<const int32_t> prompt,
                                              std::span<const int32_t> generated) {
  CRUMB_ASSIGN_OR_RETURN(auto sequence,
                         runner_->Begin(prompt, MakeSequenceOptions(client::Publish::kNone)));
  const auto cached = static_cast<size_t>(sequence->cached_tokens());
  CRUMB_ASSIGN_OR_RETURN(models::Logits ours,
                         sequence->Forward(prompt.subspan(cached), models::LogitRows::kAll));
  models::DenseKvCache dense(engine_->config(), engine_->pool());
  if (cached > 0) {
    CRUMB_RETURN_IF_ERROR(
        engine_->Forward(dense, prompt.first(cached), models::LogitRows::kLast).status());
  }
  CRUMB_ASSIGN_OR_RETURN(models::Logits exact,
                         engine_->Forward(dense, prompt.subspan(cached), models::LogitRows::kAll));
  for (size_t i = 0; i < generated.size(); ++i) {
    const auto token = generated.subspan(i, 1);
    CRUMB_ASSIGN_OR_RETURN(const models::Logits our_row,
                           sequence->Forward(token, models::LogitRows::kLast));
    CRUMB_ASSIGN_OR_RETURN(const models::Logits exact_row,
                           engine_->Forward(dense, token, models::LogitRows::kLast));
    ours.values.insert(ours.values.end(), our_row.values.begin(), our_row.values.end());
    exact.values.insert(exact.values.end(), exact_row.values.begin(), exact_row.values.end());
    ++ours.rows;
    ++exact.rows;
  }
  return Comparison{static_cast<int>(cached), models::CompareLogits(exact, ours)};
}

absl::Status Inference::Publish(RunReport& report) {
  report.store_state = "off";
  if (client_ == nullptr) return absl::OkStatus();
  CRUMB_RETURN_IF_ERROR(runner_->WaitPublished(kPublishTimeout));
  report.store_state = client_->connected() ? "connected" : "unavailable";
  if (options_.flush && client_->connected()) {
    CRUMB_RETURN_IF_ERROR(client_->Flush(kPublishTimeout).status());
  }
  const client::WorkerCounters counters = runner_->counters();
  report.published_pages = counters.published_pages + counters.deduplicated_pages;
  report.dropped_pages = counters.publish_dropped_queue + counters.publish_dropped_room +
                         counters.publish_dropped_unavailable + counters.publish_refused;
  return absl::OkStatus();
}

}  // namespace crumb::tiny_lm
