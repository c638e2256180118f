// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-kernel-bench times the CUDA kernels on the first GPU. Its rows are decode (a graph of 20
// layers with cold L2 and permuted pages; bench/kernels/decode_bench.h), evict (one launch with
// cold L2), verify, dequantize and append (bench/kernels/paged_bench.h) and prefill
// (bench/kernels/prefill_bench.h). A rate is the bytes that the algorithm needs over time; percent
// is relative to the read rate measured in the same run, for dequantize to the copy rate.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/gpu_run.h"
#include "bench/kernels/decode_bench.h"
#include "bench/kernels/device_memory.h"
#include "bench/kernels/device_rates.h"
#include "bench/kernels/evict_bench.h"
#include "bench/kernels/paged_bench.h"
#include "bench/kernels/prefill_bench.h"
#include "tools/cli.h"

namespace crumb::bench {
namespace {

struct Arguments {
  bool json = false;
  GpuRun run;
  std::vector<int> only;
  std::string kernel;
  int evict_row = -1;  // -1: all

  bool Wants(const char* name) const { return kernel.empty() ? only.empty() : kernel == name; }
};

// Reads all of `text` as the number of a row.
bool ParseRow(std::string_view text, int* row) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *row);
  return error == std::errc() && end == text.data() + text.size() && *row >= 0;
}

// Reads the value of --only: evict, evict:N, or numbers separated by commas.
bool ParseOnly(std::string_view list, Arguments* arguments) {
  if (list.substr(0, 5) == "evict") {
    arguments->kernel = "evict";
    if (list.size() == 5) return true;
    return list[5] == ':' && ParseRow(list.substr(6), &arguments->evict_row);
  }
  for (size_t at = 0; at <= list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    arguments->only.push_back(0);
    if (!ParseRow(list.substr(at, comma - at), &arguments->only.back())) return false;
    at = comma + 1;
  }
  return true;
}

std::variant<Arguments, tools::EarlyExit> Parse(int argc, const char* const* argv) {
  Arguments arguments;
  arguments.run.SetCommand("crumb-kernel-bench", argc, argv);
  CLI::App app("Times the CUDA kernels on the first GPU: all rows without --only and --kernel.",
               "crumb-kernel-bench");
  app.add_flag("--json", arguments.json, "print one JSON object instead of a table");
  app.add_option("--commit", arguments.run.commit, "commit to name in the JSON object");
  app.add_option_function<std::string>(
         "--only",
         [&arguments](const std::string& list) {
           if (ParseOnly(list, &arguments)) return;
           throw CLI::ValidationError("--only", "'" + list + "' is neither rows nor evict[:ROW]");
         },
         "decode rows by number, separated by commas; or evict, or evict:N, one row of evict")
      ->type_name("N,N...|evict[:N]");
  app.add_option("--kernel", arguments.kernel, "the rows of one kernel")
      ->check(CLI::IsMember({"decode", "evict", "verify", "dequantize", "append", "prefill"}));
  if (auto exit = tools::ParseArguments(app, argc, argv)) return *std::move(exit);
  return arguments;
}

std::string Context(const DecodeWorkload& w) {
  for (const int context : w.contexts) {
    if (context != w.contexts[0]) return "ragged";
  }
  return std::to_string(w.contexts[0]);
}

// The mean context of a batch. The sequences of a ragged batch differ; its name says so.
int64_t MeanContext(const DecodeWorkload& w) {
  return std::accumulate(w.contexts.begin(), w.contexts.end(), int64_t{0}) /
         static_cast<int64_t>(w.contexts.size());
}

void PrintHeader(const Arguments& arguments, double read, double copy) {
  if (arguments.json) {
    std::printf("{%s, \"read_tbps\": %.3f, \"copy_tbps\": %.3f,\n \"rows\": [",
                GpuRunJson(arguments.run).c_str(), read, copy);
    return;
  }
  std::printf("%s; read %.3f TB/s, copy %.3f\n", GpuRunText(arguments.run).c_str(), read, copy);
  std::printf("%3s %-20s %5s %3s %3s %5s %8s %9s %7s %6s %9s %7s\n", "row", "decode", "heads", "kv",
              "q", "batch", "context", "us", "TB/s", "%read", "error", "goal us");
}

void PrintRow(const Arguments& arguments, bool first, int number, const DecodeWorkload& w,
              const DecodeResult& r, double read) {
  const double rate = r.bytes / r.us * 1e-6;
  if (arguments.json) {
    std::printf(
        "%s\n  {\"kernel\": \"decode\", \"name\": \"%s\", \"query_heads\": %d, \"kv_heads\": %d, "
        "\"q_tokens\": %d, \"head_dim\": %d, \"group_size\": %d, \"batch\": %zu, \"context\": "
        "%lld, \"recent\": 287, \"l2\": \"cold\", \"us\": %.2f, \"bytes\": %.0f, \"tbps\": %.3f, "
        "\"percent_of_read\": %.1f, \"rel_error\": %.2e}",
        first ? "" : ",", w.name.c_str(), w.q_heads, w.kv_heads, w.q_tokens, w.tile.head_dim,
        w.tile.group_size, w.contexts.size(), static_cast<long long>(MeanContext(w)), r.us, r.bytes,
        rate, 100.0 * rate / read, r.rel_error);
  } else {
    std::printf("%3d %-20s %5d %3d %3d %5zu %8s %9.2f %7.3f %6.1f %9.1e %7.0f\n", number,
                w.name.c_str(), w.q_heads, w.kv_heads, w.q_tokens, w.contexts.size(),
                Context(w).c_str(), r.us, rate, 100.0 * rate / read, r.rel_error, w.target_us);
  }
  std::fflush(stdout);
}

void PrintEvictRow(const Arguments& arguments, bool first, const EvictWorkload& w,
                   const EvictResult& r, double read) {
  const double rate = r.bytes / r.us * 1e-6;
  if (arguments.json) {
    std::printf(
        "%s\n  {\"kernel\": \"evict\", \"method\": \"%s\", \"query_heads\": 0, \"kv_heads\": 8, "
        "\"head_dim\": 128, \"group_size\": 128, \"layers\": %d, \"batch\": %d, \"context\": %d, "
        "\"recent\": 64, \"tokens\": %d, \"sums\": %s, \"l2\": \"cold\", \"us\": %.2f, \"bytes\": "
        "%.0f, \"tbps\": %.3f, \"percent_of_read\": %.1f, \"rel_error\": %.2e, \"codes_differ\": "
        "%.2e}",
        first ? "" : ",", w.method.c_str(), w.layers, w.tokens / 64, w.tokens, w.tokens,
        w.sums ? "true" : "false", r.us, r.bytes, rate, 100.0 * rate / read, r.rel_error,
        r.codes_differ);
  } else {
    std::printf("    evict %-8s layers %2d tokens %6d %-4s %20s %9.2f %7.3f %6.1f %9.1e %7.0f\n",
                w.method.c_str(), w.layers, w.tokens, w.sums ? "sums" : "", "", r.us, rate,
                100.0 * rate / read, r.rel_error, w.target_us);
  }
  std::fflush(stdout);
}

void PrintVerifyRow(const Arguments& arguments, bool first, const VerifyWorkload& w,
                    const VerifyResult& r, double read) {
  const double rate = r.bytes / r.us * 1e-6;
  if (arguments.json) {
    std::printf(
        "%s\n  {\"kernel\": \"verify\", \"kv_heads\": 8, \"pages\": %d, \"pages_reported\": %d, "
        "\"us\": %.2f, \"bytes\": %.0f, \"tbps\": %.3f, \"percent_of_read\": %.1f}",
        first ? "" : ",", w.pages, r.reported, r.us, r.bytes, rate, 100.0 * rate / read);
  } else {
    std::printf("    verify pages %6d reported %d %33s %9.2f %7.3f %6.1f\n", w.pages, r.reported,
                "", r.us, rate, 100.0 * rate / read);
  }
  std::fflush(stdout);
}

void PrintDequantizeRow(const Arguments& arguments, bool first, const DequantizeWorkload& w,
                        const PagedResult& r, double read, double copy) {
  const double rate = r.bytes / r.us * 1e-6;
  if (arguments.json) {
    std::printf(
        "%s\n  {\"kernel\": \"dequantize\", \"name\": \"%s\", \"query_heads\": 0, \"kv_heads\": 8, "
        "\"layers\": %d, \"batch\": 1, \"context\": %d, \"recent\": 0, \"tokens\": %d, "
        "\"block_tokens\": %d, \"l2\": \"%s\", \"us\": %.2f, \"bytes\": %.0f, \"tbps\": %.3f, "
        "\"percent_of_read\": %.1f, \"percent_of_copy\": %.1f, \"rel_error\": %.2e}",
        first ? "" : ",", w.name.c_str(), w.layers, w.tokens, w.tokens, w.block_tokens,
        r.warm ? "warm" : "cold", r.us, r.bytes, rate, 100.0 * rate / read, 100.0 * rate / copy,
        r.rel_error);
  } else {
    std::printf(
        "    dequantize %-12s layers %2d tokens %6d block %3d %12s %9.2f %7.3f %5.1f%% of copy, "
        "goal %.0f%%, error %.1e\n",
        w.name.c_str(), w.layers, w.tokens, w.block_tokens, "", r.us, rate, 100.0 * rate / copy,
        w.target_percent, r.rel_error);
  }
  std::fflush(stdout);
}

void PrintAppendRow(const Arguments& arguments, bool first, const AppendWorkload& w,
                    const PagedResult& r, double read) {
  const double rate = r.bytes / r.us * 1e-6;
  if (arguments.json) {
    std::printf(
        "%s\n  {\"kernel\": \"append\", \"kv_heads\": 8, \"batch\": %d, \"q_tokens\": %d, "
        "\"us\": %.2f, \"bytes\": %.0f, \"tbps\": %.3f, \"percent_of_read\": %.1f}",
        first ? "" : ",", w.batch, w.q_tokens, r.us, r.bytes, rate, 100.0 * rate / read);
  } else {
    std::printf("    append batch %3d tokens %d %36s %9.2f %24s %7.1f\n", w.batch, w.q_tokens, "",
                r.us, "", w.target_us);
  }
  std::fflush(stdout);
}

void PrintPrefillRow(const Arguments& arguments, bool first, const PrefillWorkload& w,
                     const PrefillResult& r) {
  if (arguments.json) {
    std::printf(
        "%s\n  {\"kernel\": \"prefill\", \"name\": \"%s\", \"query_heads\": %d, \"kv_heads\": %d, "
        "\"fresh\": %d, \"cached\": %d, \"head_dim\": %d, \"group_size\": %d, \"us\": %.1f, "
        "\"tflops\": %.1f, \"rel_error\": %.2e}",
        first ? "" : ",", w.name.c_str(), w.q_heads, w.kv_heads, w.fresh, w.cached, w.head_dim,
        w.group_size, r.us, r.tflops, r.rel_error);
  } else {
    std::printf("    prefill %-28s %9.1f us %6.0f TFLOPS, error %.1e\n", w.name.c_str(), r.us,
                r.tflops, r.rel_error);
  }
  std::fflush(stdout);
}

// Runs the workloads of all kernels but decode. `first`: no row was printed yet. `read` and `copy`
// are the rates of memory.
void RunOthers(const Arguments& arguments, bool first, double read, double copy) {
  if (arguments.Wants("evict")) {
    const std::vector<EvictWorkload> evicts = StandardEvictWorkloads();
    for (size_t i = 0; i < evicts.size(); ++i) {
      if (arguments.evict_row >= 0 && arguments.evict_row != static_cast<int>(i)) continue;
      PrintEvictRow(arguments, first, evicts[i], RunEvict(evicts[i]), read);
      first = false;
    }
  }
  if (arguments.Wants("verify")) {
    for (const VerifyWorkload& w : StandardVerifyWorkloads()) {
      PrintVerifyRow(arguments, first, w, RunVerify(w), read);
      first = false;
    }
  }
  if (arguments.Wants("dequantize")) {
    for (const DequantizeWorkload& w : StandardDequantizeWorkloads()) {
      PrintDequantizeRow(arguments, first, w, RunDequantize(w), read, copy);
      first = false;
    }
  }
  if (arguments.Wants("append")) {
    for (const AppendWorkload& w : StandardAppendWorkloads()) {
      PrintAppendRow(arguments, first, w, RunAppend(w), read);
      first = false;
    }
  }
  if (arguments.Wants("prefill")) {
    for (const PrefillWorkload& w : StandardPrefillWorkloads()) {
      PrintPrefillRow(arguments, first, w, RunPrefill(w));
      first = false;
    }
  }
}

int Main(int argc, char** argv) {
  auto parsed = Parse(argc, argv);
  if (const auto* exit = std::get_if<tools::EarlyExit>(&parsed)) return tools::ReportExit(*exit);
  auto& arguments = std::get<Arguments>(parsed);
  std::vector<DecodeWorkload> workloads = StandardDecodeWorkloads();
  std::vector<DecodeWorkload> chosen;
  std::vector<int> numbers;
  for (size_t i = 0; i < workloads.size(); ++i) {
    bool wanted = arguments.Wants("decode");
    for (const int number : arguments.only) wanted |= number == static_cast<int>(i);
    if (!wanted || !DecodeBench::Supported(workloads[i])) continue;
    chosen.push_back(workloads[i]);
    numbers.push_back(static_cast<int>(i));
  }
  DecodeBench bench(chosen);
  const Device<char> spare = Allocate<char>(chosen.empty() ? size_t{4} << 30 : 1);
  void* arena = chosen.empty() ? spare.get() : static_cast<void*>(bench.arena());
  const size_t bytes =
      std::min<size_t>(chosen.empty() ? size_t{4} << 30 : bench.arena_bytes(), size_t{8} << 30);
  const double read = ReadRate(arena, bytes), copy = CopyRate(arena, bytes);
  if (const std::string error = DescribeGpu(0, &arguments.run); !error.empty()) {
    std::fprintf(stderr, "crumb-kernel-bench: the first GPU: %s\n", error.c_str());
    return tools::kExitFailure;
  }
  PrintHeader(arguments, read, copy);
  for (size_t i = 0; i < chosen.size(); ++i) {
    PrintRow(arguments, i == 0, numbers[i], chosen[i], bench.Run(chosen[i]), read);
  }
  RunOthers(arguments, chosen.empty(), read, copy);
  if (arguments.json) std::printf("\n ]}\n");
  return 0;
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) { return crumb::bench::Main(argc, argv); }
