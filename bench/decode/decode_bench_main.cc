// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-decode-bench: whole decode steps of real models' shapes with random weights, INT2 pages
// against plain BF16 keys and values, on the first GPU. A row: one format and batch, one CUDA graph
// a step, median of 5 replays. `floor` is what a step must read (weights, keys, values) over the
// copy bandwidth measured in the same run. docs/decode.md says how to read it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "bench/decode/decode_report.h"
#include "bench/decode/decode_step.h"
#include "bench/decode/kv_cache.h"
#include "bench/decode/model_shape.h"
#include "bench/decode/step_weights.h"
#include "bench/kernels/ask_gpu.h"
#include "bench/kernels/device_memory.h"
#include "bench/kernels/device_rates.h"
#include "models/cuda/projections.h"

namespace crumb::bench {
namespace {

constexpr int kCandidates = 12;

constexpr const char* kUsage =
    "usage: crumb-decode-bench [--shape qwen3-4b,qwen3-8b,glm-4.7] [--context TOKENS]\n"
    "         [--batch N,N...] [--kv bf16,int2] [--memory-gb GB] [--json] [--commit ID]\n"
    "Times whole decode steps on the first GPU. Batches that do not fit into the device's memory\n"
    "are left out; the largest that fits into --memory-gb is measured beside those named.\n";

struct Arguments {
  Arguments() {
    run.context = 102400;
    run.memory_gb = 80;
  }

  std::vector<ModelShape> models = {*ModelShapeNamed("qwen3-8b")};
  std::vector<int> batches = {1, 8, 32};
  std::vector<KvFormat> formats = {KvFormat::kBf16, KvFormat::kInt2};
  bool json = false;
  bool help = false;
  DecodeRun run;
};

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> items;
  std::stringstream list(text);
  for (std::string item; std::getline(list, item, ',');) items.push_back(item);
  return items;
}

std::optional<int> Number(const std::string& text, int least, int most) {
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < least || value > most) return std::nullopt;
  return static_cast<int>(value);
}

bool SetShapes(const std::string& text, Arguments* a) {
  a->models.clear();
  for (const std::string& item : Split(text)) {
    const std::optional<ModelShape> shape = ModelShapeNamed(item);
    if (!shape) return false;
    a->models.push_back(*shape);
  }
  return !a->models.empty();
}

bool SetBatches(const std::string& text, Arguments* a) {
  a->batches.clear();
  for (const std::string& item : Split(text)) {
    const std::optional<int> batch = Number(item, 1, kDecodeBatchMax);
    if (!batch) return false;
    a->batches.push_back(*batch);
  }
  return !a->batches.empty();
}

bool SetFormats(const std::string& text, Arguments* a) {
  a->formats.clear();
  for (const std::string& item : Split(text)) {
    if (item != "bf16" && item != "int2") return false;
    a->formats.push_back(item == "bf16" ? KvFormat::kBf16 : KvFormat::kInt2);
  }
  return !a->formats.empty();
}

bool SetContext(const std::string& text, Arguments* a) {
  const std::optional<int> context = Number(text, kDecodeContextMin, kDecodeContextMax);
  if (context) a->run.context = *context;
  return context.has_value();
}

bool SetMemory(const std::string& text, Arguments* a) {
  char* end = nullptr;
  a->run.memory_gb = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' && a->run.memory_gb >= 1 && a->run.memory_gb <= 1e6;
}

bool SetCommit(const std::string& text, Arguments* a) {
  a->run.gpu.commit = text;
  return true;
}

// False: `wrong` says what.
bool Parse(int argc, char** argv, Arguments* a, std::string* wrong) {
  struct Option {
    const char* name;
    bool (*set)(const std::string&, Arguments*);
  };
  constexpr Option kOptions[] = {{"--shape", SetShapes},     {"--context", SetContext},
                                 {"--batch", SetBatches},    {"--kv", SetFormats},
                                 {"--memory-gb", SetMemory}, {"--commit", SetCommit}};
  a->run.gpu.SetCommand("crumb-decode-bench", argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--json" || word == "--help") {
      (word == "--json" ? a->json : a->help) = true;
      continue;
    }
    const Option* option = std::find_if(std::begin(kOptions), std::end(kOptions),
                                        [&word](const Option& o) { return word == o.name; });
    if (option == std::end(kOptions) || i + 1 == argc) {
      *wrong = "'" + word + "' is no option, or its value is missing";
      return false;
    }
    if (!option->set(argv[++i], a)) {
      *wrong = word + " does not take '" + argv[i] + "'";
      return false;
    }
  }
  return true;
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

// Those asked for, and the largest that fits.
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
  Check(AskGpu(0, &run->gpu), "device");
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
  Arguments arguments;
  std::string wrong;
  if (!Parse(argc, argv, &arguments, &wrong)) {
    std::fprintf(stderr, "crumb-decode-bench: %s (see crumb-decode-bench --help)\n", wrong.c_str());
    return 2;
  }
  if (arguments.help) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  return Run(arguments);
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) { return crumb::bench::Main(argc, argv); }
