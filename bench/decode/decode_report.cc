// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/decode/decode_report.h"

#include <cstdarg>
#include <cstdio>

namespace crumb::bench {
namespace {

// JSON is written by hand, because the program links only the C++ library.
__attribute__((format(printf, 1, 2))) std::string Format(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

struct Floor {
  double bytes, us, percent, percent_of_read;
};
Floor FloorOf(const DecodeRun& run, const ModelShape& model, const DecodeRow& row) {
  const auto bytes =
      static_cast<double>(StepBytes(model, SequenceOf(run.context), row.kv, row.batch));
  const double us = bytes / run.copy_tbps * 1e-6, read_us = bytes / run.read_tbps * 1e-6;
  return {bytes, us, 100 * us / row.MeanStepUs(), 100 * read_us / row.MeanStepUs()};
}

double EvictPercent(const DecodeRow& row) {
  return 100 * row.evict_us / DecodeRow::kEvictPeriod / row.MeanStepUs();
}

bool Fits(const DecodeRun& run, const ModelShape& model, const DecodeRow& row) {
  return row.batch <= LargestBatch(model, SequenceOf(run.context), row.kv, run.memory_bytes());
}

double SpeedOf(const DecodeRows& rows, KvFormat kv, int batch) {
  for (const DecodeRow& row : rows.rows) {
    if (row.kv == kv && row.batch == batch) return row.TokensPerSecond();
  }
  return 0.0;
}

double Ratio(double above, double below) { return below > 0 ? above / below : 0.0; }

// Returns the gain, or 0 if one of the formats was not measured.
std::string GainJson(double gain) { return gain > 0 ? Format("%.3f", gain) : "null"; }
std::string GainText(double gain) { return gain > 0 ? Format("%.2f", gain) : "not measured"; }

std::string RowJson(const DecodeRun& run, const ModelShape& model, const DecodeRow& r) {
  const Floor floor = FloorOf(run, model, r);
  return Format(
      "   {\"kv\": \"%s\", \"batch\": %d, \"fits_memory\": %s, \"step_us\": %.1f, "
      "\"attention_us\": %.1f, \"projections_us\": %.1f, \"evict_us\": %.1f, "
      "\"evict_percent\": %.2f, \"tokens_per_second_request\": %.1f, "
      "\"tokens_per_second_gpu\": %.1f, \"bytes\": %.0f, \"floor_us\": %.1f, "
      "\"percent_of_floor\": %.1f, \"percent_of_read\": %.1f, \"sane\": %s}",
      Name(r.kv), r.batch, Fits(run, model, r) ? "true" : "false", r.step_us, r.attention_us,
      r.projections_us, r.evict_us, EvictPercent(r), r.TokensPerSecond() / r.batch,
      r.TokensPerSecond(), floor.bytes, floor.us, floor.percent, floor.percent_of_read,
      r.sane ? "true" : "false");
}

std::string ShapeJson(const DecodeRun& run, const DecodeRows& shape) {
  std::string json =
      "  {\"shape\": " + Quoted(shape.model.name) +
      Format(", \"tokens_attended\": %d, \"weight_bytes\": %lld, \"rows\": [",
             SequenceOf(run.context).tokens(), static_cast<long long>(shape.model.weight_bytes()));
  const char* separator = "\n";
  for (const DecodeRow& row : shape.rows) {
    json += separator + RowJson(run, shape.model, row);
    separator = ",\n";
  }
  const DecodeGains gains = GainsOf(run, shape);
  return json +
         Format("],\n   \"largest_batch\": {\"bf16\": %d, \"int2\": %d}, ", gains.largest_bf16,
                gains.largest_int2) +
         "\"gain_batch_1\": " + GainJson(gains.batch_1) +
         ", \"gain_batch_1_of_bytes\": " + GainJson(gains.batch_1_of_bytes) +
         ", \"gain_per_gpu\": " + GainJson(gains.per_gpu) +
         ", \"gain_per_gpu_of_bytes\": " + GainJson(gains.per_gpu_of_bytes) + "}";
}

}  // namespace

DecodeGains GainsOf(const DecodeRun& run, const DecodeRows& rows) {
  const SequenceShape sequence = SequenceOf(run.context);
  DecodeGains gains;
  gains.largest_bf16 = LargestBatch(rows.model, sequence, KvFormat::kBf16, run.memory_bytes());
  gains.largest_int2 = LargestBatch(rows.model, sequence, KvFormat::kInt2, run.memory_bytes());
  const auto measured = [&rows](int bf16, int int2) {
    return Ratio(SpeedOf(rows, KvFormat::kInt2, int2), SpeedOf(rows, KvFormat::kBf16, bf16));
  };
  const auto of_bytes = [&](int bf16, int int2) {  // bytes per token
    const auto bytes = [&](KvFormat kv, int batch) {
      return Ratio(static_cast<double>(StepBytes(rows.model, sequence, kv, batch)), batch);
    };
    return Ratio(bytes(KvFormat::kBf16, bf16), bytes(KvFormat::kInt2, int2));
  };
  gains.batch_1 = measured(1, 1);
  gains.batch_1_of_bytes = of_bytes(1, 1);
  gains.per_gpu = measured(gains.largest_bf16, gains.largest_int2);
  gains.per_gpu_of_bytes = of_bytes(gains.largest_bf16, gains.largest_int2);
  return gains;
}

std::string RunText(const DecodeRun& run) {
  return GpuRunText(run.gpu) + Format(", cuBLAS %d, read %.3f TB/s, copy %.3f TB/s\n", run.cublas,
                                      run.read_tbps, run.copy_tbps);
}

std::string ShapeText(const DecodeRun& run, const ModelShape& model) {
  return model.name +
         Format(", %d tokens attended, %.1f GB of weights\n", SequenceOf(run.context).tokens(),
                1e-9 * static_cast<double>(model.weight_bytes())) +
         Format("%-5s %5s %5s %10s %10s %9s %9s %7s %9s %8s %7s %7s\n", "kv", "batch", "fits",
                "step us", "attention", "project", "evict", "evict%", "tok/s/req", "tok/s/GPU",
                "%floor", "%read");
}

std::string RowText(const DecodeRun& run, const ModelShape& model, const DecodeRow& r) {
  const Floor floor = FloorOf(run, model, r);
  return Format("%-5s %5d %5s %10.1f %10.1f %9.1f %9.1f %7.2f %9.1f %9.1f %7.1f %7.1f%s\n",
                Name(r.kv), r.batch, Fits(run, model, r) ? "yes" : "no", r.step_us, r.attention_us,
                r.projections_us, r.evict_us, EvictPercent(r), r.TokensPerSecond() / r.batch,
                r.TokensPerSecond(), floor.percent, floor.percent_of_read,
                r.sane ? "" : "  logits are no numbers");
}

std::string GainsText(const DecodeRun& run, const DecodeRows& rows) {
  const DecodeGains gains = GainsOf(run, rows);
  return Format("largest batch in %.0f GB: %d bf16, %d int2; INT2 over BF16: ", run.memory_gb,
                gains.largest_bf16, gains.largest_int2) +
         GainText(gains.batch_1) + " at batch 1 (bytes allow " + GainText(gains.batch_1_of_bytes) +
         "), " + GainText(gains.per_gpu) + " in tokens per second of a GPU (bytes allow " +
         GainText(gains.per_gpu_of_bytes) + ")\n";
}

std::string DecodeJson(const DecodeRun& run, const std::vector<DecodeRows>& shapes) {
  std::string json =
      "{" + GpuRunJson(run.gpu) + Format(", \"cublas\": %d", run.cublas) +
      Format(
          ",\n \"read_tbps\": %.3f, \"copy_tbps\": %.3f, \"context\": %d, \"memory_gb\": %g,\n"
          " \"shapes\": [",
          run.read_tbps, run.copy_tbps, run.context, run.memory_gb);
  const char* separator = "\n";
  for (const DecodeRows& shape : shapes) {
    json += separator + ShapeJson(run, shape);
    separator = ",\n";
  }
  return json + "]}\n";
}

}  // namespace crumb::bench
