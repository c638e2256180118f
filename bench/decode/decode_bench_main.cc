// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-decode-bench times whole decode steps of real models' shapes with random weights on the
// first GPU: INT2 pages against BF16 keys and values. Each row is one format and one batch; a step
// is one CUDA graph, and the row shows the median of 5 replays. `floor` is the bytes that a step
// must read (weights, keys, values) over the copy bandwidth measured in the same run.
// docs/decode.md explains the figures.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/decode/decode_report.h"
#include "bench/decode/decode_step.h"
#include "bench/decode/kv_cache.h"
#include "bench/decode/step_weights.h"
#include "bench/gpu_run.h"
#include "bench/kernels/device_memory.h"
#include "bench/kernels/device_rates.h"
#include "bench/model_shape.h"
#include "models/cuda/projections.h"
#include "tools/cli.h"

namespace crumb::bench {
namespace {

// Algorithms of cuBLASLt that are timed for each projection.
constexpr int kCandidates = 12;

struct Arguments {
  Arguments() {
    run.context = 102400;
    run.memory_gb = 80;
  }

  std::vector<ModelShape> models;
  std::vector<int> batches = {1, 8, 32};
  std::vector<KvFormat> formats;
  bool json = false;
  DecodeRun run;
};

std::variant<Arguments, tools::EarlyExit> Parse(int argc, const char* const* argv) {
  Arguments a;
  a.run.gpu.SetCommand("crumb-decode-bench", argc, argv);
  std::vector<std::string> shapes = {"qwen3-8b"}, formats = {"bf16", "int2"};
  CLI::App app(
      "Times whole decode steps on the first GPU. Batches that do not fit into the device's memory "
      "are left out; the largest that fits into --memory-gb is measured beside those named.",
      "crumb-decode-bench");
  app.add_option("--shape", shapes, "models whose shapes are measured")
      ->delimiter(',')
      ->check(CLI::IsMember(ModelShapeNames()))
      ->capture_default_str();
  app.add_option("--context", a.run.context, "tokens of each sequence")
      ->check(CLI::Range(kDecodeContextMin, kDecodeContextMax))
      ->capture_default_str();
  app.add_option("--batch", a.batches, "sequences that decode together")
      ->delimiter(',')
      ->check(CLI::Range(1, kDecodeBatchMax))
      ->capture_default_str();
  app.add_option("--kv", formats, "formats of keys and values")
      ->delimiter(',')
      ->check(CLI::IsMember({"bf16", "int2"}))
      ->capture_default_str();
  app.add_option("--memory-gb", a.run.memory_gb, "device memory of the largest batch, in GB")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  app.add_flag("--json", a.json, "print one JSON object instead of a table");
  app.add_option("--commit", a.run.gpu.commit, "commit to name in the JSON object");
  if (auto exit = tools::ParseArguments(app, argc, argv)) return *std::move(exit);
  for (const std::string& shape : shapes) a.models.push_back(*ModelShapeNamed(shape));
  for (const std::string& format : formats) {
    a.formats.push_back(format == "bf16" ? KvFormat::kBf16 : KvFormat::kInt2);
  }
  return a;
}

bool FitsDevice(const ModelShape& model, const SequenceShape& sequence, KvFormat kv, int batch) {
  size_t free = 0, total = 0;
  Check(cudaMemGetInfo(&free, &total), "memory");
  return batch * HeldBytes(model, sequence, kv) + kReservedBytes / 2 < static_cast<int64_t>(free);
}

DecodeRow Measure(const StepWeights& weights, models::cuda::Projections& projections,
                  const SequenceShape& sequence, KvFormat kv, int batch) {
  std::unique_ptr<KvCache> cache;
  if (kv == KvFormat::kBf16) {
    cache = std::make_unique<Bf16KvCache>(weights.model, sequence, batch);
  } else {
    cache = std::make_unique<Int2KvCache>(weights.model, sequence, batch);
  }
  DecodeStep step(weights, projections, *cache, sequence, batch);
  step.Tune(kCandidates);
  DecodeRow row;
  row.kv = kv;
  row.batch = batch;
  row.step_us = TimeGraph([&](cudaStream_t stream) { step.Enqueue(stream); });
  row.sane = step.Sane();
  row.attention_us = TimeGraph([&](cudaStream_t stream) { step.EnqueueAttention(stream); });
  row.projections_us = TimeGraph([&](cudaStream_t stream) { step.EnqueueProjections(stream); });
  if (cache->Evicts()) {
    const double both = TimeGraph([&](cudaStream_t stream) {
      cache->Evict(stream);
      step.Enqueue(stream);
    });
    row.evict_us = std::max(0.0, both - row.step_us);
  }
  return row;
}

// The requested batches and the largest that fits into --memory-gb, ascending.
std::vector<int> BatchesOf(const Arguments& a, const ModelShape& model, KvFormat kv) {
  std::vector<int> batches = a.batches;
  const int largest = LargestBatch(model, SequenceOf(a.run.context), kv, a.run.memory_bytes());
  if (largest > 0) batches.push_back(std::min(largest, kDecodeBatchMax));
  std::sort(batches.begin(), batches.end());
  batches.erase(std::unique(batches.begin(), batches.end()), batches.end());
  return batches;
}

DecodeRows MeasureShape(const Arguments& a, const ModelShape& model,
                        models::cuda::Projections& projections) {
  const SequenceShape sequence = SequenceOf(a.run.context);
  const StepWeights weights(model);
  DecodeRows rows{model, {}};
  for (const KvFormat kv : a.formats) {
    for (const int batch : BatchesOf(a, model, kv)) {
      if (!FitsDevice(model, sequence, kv, batch)) {
        std::fprintf(stderr,
                     "crumb-decode-bench: %s, batch %d: %.1f GB of keys and values do not fit "
                     "into this device's memory\n",
                     Name(kv), batch,
                     1e-9 * static_cast<double>(batch * HeldBytes(model, sequence, kv)));
        continue;
      }
      rows.rows.push_back(Measure(weights, projections, sequence, kv, batch));
      if (!a.json) std::fputs(RowText(a.run, model, rows.rows.back()).c_str(), stdout);
      std::fflush(stdout);
    }
  }
  return rows;
}

void MeasureDevice(DecodeRun* run) {
  if (const std::string error = DescribeGpu(0, &run->gpu); !error.empty()) {
    std::fprintf(stderr, "crumb-decode-bench: the first GPU: %s\n", error.c_str());
    std::exit(tools::kExitFailure);
  }
  constexpr size_t kBytes = size_t{8} << 30;
  const Device<char> memory = Allocate<char>(kBytes);
  run->read_tbps = ReadRate(memory.get(), kBytes);
  run->copy_tbps = CopyRate(memory.get(), kBytes);
}

int Run(Arguments a) {
  std::string error;
  const std::unique_ptr<models::cuda::Projections> projections =
      models::cuda::Projections::Open(&error);
  if (projections == nullptr) {
    std::fprintf(stderr, "crumb-decode-bench: %s\n", error.c_str());
    return 1;
  }
  MeasureDevice(&a.run);
  a.run.cublas = projections->version();
  if (!a.json) std::fputs(RunText(a.run).c_str(), stdout);
  std::vector<DecodeRows> shapes;
  bool sane = true;
  for (const ModelShape& model : a.models) {
    if (!a.json) std::fputs(ShapeText(a.run, model).c_str(), stdout);
    shapes.push_back(MeasureShape(a, model, *projections));
    for (const DecodeRow& row : shapes.back().rows) sane = sane && row.sane;
    if (!a.json) std::fputs(GainsText(a.run, shapes.back()).c_str(), stdout);
  }
  if (a.json) std::fputs(DecodeJson(a.run, shapes).c_str(), stdout);
  return sane ? 0 : 1;
}

int Main(int argc, char** argv) {
  auto parsed = Parse(argc, argv);
  if (const auto* exit = std::get_if<tools::EarlyExit>(&parsed)) return tools::ReportExit(*exit);
  return Run(std::get<Arguments>(std::move(parsed)));
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) { return crumb::bench::Main(argc, argv); }
