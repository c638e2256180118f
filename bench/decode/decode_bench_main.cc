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

#include "bench/decode/decode_step.h"
#include "bench/decode/kv_cache.h"
#include "bench/decode/model_shape.h"
#include "bench/decode/step_weights.h"
#include "bench/kernels/device_memory.h"
#include "bench/kernels/device_rates.h"
#include "models/cuda/projections.h"

namespace crumb::bench {
namespace {

constexpr int kCandidates = 12;
constexpr int kEvictPeriod = 64;  // steps from one window of a sequence to the next

constexpr const char* kUsage =
    "usage: crumb-decode-bench [--shape qwen3-4b|qwen3-8b|glm-4.7] [--context TOKENS]\n"
    "         [--batch N,N...] [--kv bf16,int2] [--memory-gb GB] [--json] [--commit ID]\n"
    "Times whole decode steps on the first GPU. Batches that do not fit into the device's memory\n"
    "are left out; the largest that fits into --memory-gb is measured beside those named.\n";

struct Arguments {
  ModelShape model = *ModelShapeNamed("qwen3-8b");
  int context = 102400;
  std::vector<int> batches = {1, 8, 32};
  std::vector<KvFormat> formats = {KvFormat::kBf16, KvFormat::kInt2};
  double memory_gb = 80;
  bool json = false;
  bool help = false;
  std::string commit = "unknown";
  std::string command = "crumb-decode-bench";
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

bool SetShape(const std::string& text, Arguments* a) {
  const std::optional<ModelShape> shape = ModelShapeNamed(text);
  if (shape) a->model = *shape;
  return shape.has_value();
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
  if (context) a->context = *context;
  return context.has_value();
}

bool SetMemory(const std::string& text, Arguments* a) {
  char* end = nullptr;
  a->memory_gb = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' && a->memory_gb >= 1 && a->memory_gb <= 1e6;
}

bool SetCommit(const std::string& text, Arguments* a) {
  a->commit = text;
  return true;
}

// False: `wrong` says what.
bool Parse(int argc, char** argv, Arguments* a, std::string* wrong) {
  struct Option {
    const char* name;
    bool (*set)(const std::string&, Arguments*);
  };
  constexpr Option kOptions[] = {{"--shape", SetShape},      {"--context", SetContext},
                                 {"--batch", SetBatches},    {"--kv", SetFormats},
                                 {"--memory-gb", SetMemory}, {"--commit", SetCommit}};
  for (int i = 1; i < argc; ++i) a->command.append(" ").append(argv[i]);
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

struct Row {
  KvFormat kv = KvFormat::kInt2;
  int batch = 0;
  bool fits = false;  // into --memory-gb
  double step_us = 0, attention_us = 0, projections_us = 0;
  double evict_us = 0;  // what a step takes longer that evicts a window of every sequence
  bool sane = false;

  double MeanStepUs() const { return step_us + evict_us / kEvictPeriod; }
  double TokensPerSecond() const { return 1e6 * batch / MeanStepUs(); }
};

struct Rates {
  double read = 0, copy = 0;
};

class Output {
 public:
  Output(const Arguments& a, const SequenceShape& sequence, const Rates& rates)
      : a_(a), sequence_(sequence), rates_(rates) {}

  void Header(int cublas) const {
    cudaDeviceProp device;
    Check(cudaGetDeviceProperties(&device, 0), "properties");
    if (!a_.json) {
      std::printf(
          "%s, cuBLAS %d, read %.3f TB/s, copy %.3f TB/s\n%s, %d tokens attended, %.1f GB of "
          "weights\n",
          device.name, cublas, rates_.read, rates_.copy, a_.model.name.c_str(), sequence_.tokens(),
          1e-9 * static_cast<double>(a_.model.weight_bytes()));
      std::printf("%-5s %5s %5s %10s %9s %7s %9s %9s %9s %8s %7s %7s\n", "kv", "batch", "fits",
                  "step us", "evict us", "evict%", "atten us", "proj us", "tok/s/req", "tok/s",
                  "%floor", "%read");
      return;
    }
    std::printf(
        "{\"device\": \"%s\", \"cublas\": %d, \"commit\": \"%s\", \"command\": \"%s\", "
        "\"read_tbps\": %.3f, \"copy_tbps\": %.3f,\n \"shape\": \"%s\", \"context\": %d, "
        "\"tokens_attended\": %d, \"memory_gb\": %.1f, \"weight_bytes\": %lld,\n \"rows\": [",
        device.name, cublas, a_.commit.c_str(), a_.command.c_str(), rates_.read, rates_.copy,
        a_.model.name.c_str(), a_.context, sequence_.tokens(), a_.memory_gb,
        static_cast<long long>(a_.model.weight_bytes()));
  }

  void Add(const Row& r) {
    const double bytes = static_cast<double>(StepBytes(a_.model, sequence_, r.kv, r.batch));
    const double floor = bytes / rates_.copy * 1e-6, read_floor = bytes / rates_.read * 1e-6;
    const double evict_percent = 100 * r.evict_us / kEvictPeriod / r.MeanStepUs();
    if (a_.json) {
      std::printf(
          "%s\n  {\"kv\": \"%s\", \"batch\": %d, \"fits_memory\": %s, \"step_us\": %.1f, "
          "\"evict_us\": %.1f, \"evict_percent\": %.2f, \"attention_us\": %.1f, "
          "\"projections_us\": %.1f, \"tokens_per_second_request\": %.1f, "
          "\"tokens_per_second_gpu\": %.1f, \"bytes\": %.0f, \"floor_us\": %.1f, "
          "\"percent_of_floor\": %.1f, \"percent_of_read\": %.1f, \"sane\": %s}",
          first_ ? "" : ",", Name(r.kv), r.batch, r.fits ? "true" : "false", r.step_us, r.evict_us,
          evict_percent, r.attention_us, r.projections_us, r.TokensPerSecond() / r.batch,
          r.TokensPerSecond(), bytes, floor, 100 * floor / r.MeanStepUs(),
          100 * read_floor / r.MeanStepUs(), r.sane ? "true" : "false");
    } else {
      std::printf("%-5s %5d %5s %10.1f %9.1f %7.2f %9.1f %9.1f %9.1f %8.1f %7.1f %7.1f%s\n",
                  Name(r.kv), r.batch, r.fits ? "yes" : "no", r.step_us, r.evict_us, evict_percent,
                  r.attention_us, r.projections_us, r.TokensPerSecond() / r.batch,
                  r.TokensPerSecond(), 100 * floor / r.MeanStepUs(),
                  100 * read_floor / r.MeanStepUs(), r.sane ? "" : "  (logits are no numbers)");
    }
    std::fflush(stdout);
    first_ = false;
  }

  // The largest batches, and what INT2 gains where both formats were measured.
  void Footer(const std::vector<Row>& rows) const {
    const auto memory = static_cast<int64_t>(a_.memory_gb * 1e9);
    const int bf16 = LargestBatch(a_.model, sequence_, KvFormat::kBf16, memory);
    const int int2 = LargestBatch(a_.model, sequence_, KvFormat::kInt2, memory);
    const double latency = Gain(rows, 1, 1), throughput = Gain(rows, bf16, int2);
    if (a_.json) {
      std::printf(
          "\n ],\n \"largest_batch\": {\"bf16\": %d, \"int2\": %d}, \"gain_batch_1\": %.3f, "
          "\"gain_batch_1_of_bytes\": %.3f, \"gain_per_gpu\": %.3f, \"gain_per_gpu_of_bytes\": "
          "%.3f}\n",
          bf16, int2, latency, BytesGain(1, 1), throughput, BytesGain(bf16, int2));
      return;
    }
    std::printf(
        "largest batch in %.0f GB: %d bf16, %d int2\nINT2 over BF16 at batch 1: %.2f (bytes: "
        "%.2f); tokens per second of a GPU at the largest batches: %.2f (bytes: %.2f)\n",
        a_.memory_gb, bf16, int2, latency, BytesGain(1, 1), throughput, BytesGain(bf16, int2));
  }

 private:
  static double Gain(const std::vector<Row>& rows, int bf16, int int2) {
    const auto speed = [&rows](KvFormat kv, int batch) {
      for (const Row& row : rows) {
        if (row.kv == kv && row.batch == batch) return row.TokensPerSecond();
      }
      return 0.0;
    };
    const double base = speed(KvFormat::kBf16, bf16);
    return base > 0 ? speed(KvFormat::kInt2, int2) / base : 0.0;
  }

  double BytesGain(int bf16, int int2) const {
    if (bf16 == 0) return 0.0;
    const auto seconds = [this](KvFormat kv, int batch) {
      return static_cast<double>(StepBytes(a_.model, sequence_, kv, batch)) / batch;
    };
    return seconds(KvFormat::kBf16, bf16) / seconds(KvFormat::kInt2, int2);
  }

  const Arguments& a_;
  const SequenceShape sequence_;
  const Rates rates_;
  bool first_ = true;
};

bool FitsDevice(const ModelShape& model, const SequenceShape& sequence, KvFormat kv, int batch) {
  size_t free = 0, total = 0;
  Check(cudaMemGetInfo(&free, &total), "memory");
  return batch * HeldBytes(model, sequence, kv) + kReservedBytes / 2 < static_cast<int64_t>(free);
}

Row Measure(const Arguments& a, const StepWeights& weights, models::cuda::Projections& projections,
            const SequenceShape& sequence, KvFormat kv, int batch) {
  std::unique_ptr<KvCache> cache;
  if (kv == KvFormat::kBf16) {
    cache = std::make_unique<Bf16KvCache>(a.model, sequence, batch);
  } else {
    cache = std::make_unique<Int2KvCache>(a.model, sequence, batch);
  }
  DecodeStep step(weights, projections, *cache, sequence, batch);
  step.Tune(kCandidates);
  Row row;
  row.kv = kv;
  row.batch = batch;
  row.fits = batch <= LargestBatch(a.model, sequence, kv, static_cast<int64_t>(a.memory_gb * 1e9));
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

Rates MeasureRates() {
  constexpr size_t kBytes = size_t{8} << 30;
  const Device<char> memory = Allocate<char>(kBytes);
  return {ReadRate(memory.get(), kBytes), CopyRate(memory.get(), kBytes)};
}

int Run(const Arguments& a) {
  std::string error;
  const std::unique_ptr<models::cuda::Projections> projections =
      models::cuda::Projections::Open(&error);
  if (projections == nullptr) {
    std::fprintf(stderr, "crumb-decode-bench: %s\n", error.c_str());
    return 1;
  }
  const SequenceShape sequence = SequenceOf(a.context);
  Output output(a, sequence, MeasureRates());
  const StepWeights weights(a.model);
  output.Header(projections->version());
  std::vector<Row> rows;
  bool sane = true;
  for (const KvFormat kv : a.formats) {
    std::vector<int> batches = a.batches;
    const int largest =
        LargestBatch(a.model, sequence, kv, static_cast<int64_t>(a.memory_gb * 1e9));
    if (largest > 0) batches.push_back(std::min(largest, kDecodeBatchMax));
    std::sort(batches.begin(), batches.end());
    batches.erase(std::unique(batches.begin(), batches.end()), batches.end());
    for (const int batch : batches) {
      if (!FitsDevice(a.model, sequence, kv, batch)) {
        std::fprintf(stderr,
                     "crumb-decode-bench: %s, batch %d: %.1f GB of keys and values do not "
                     "fit into this device's memory\n",
                     Name(kv), batch,
                     1e-9 * static_cast<double>(batch * HeldBytes(a.model, sequence, kv)));
        continue;
      }
      rows.push_back(Measure(a, weights, *projections, sequence, kv, batch));
      sane = sane && rows.back().sane;
      output.Add(rows.back());
    }
  }
  output.Footer(rows);
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
