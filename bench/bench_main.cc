// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-bench measures Crumb. Its workloads are:
//
//   codec     CPU kernels, compared with memory bandwidth     bench/codec_workload.h
//   kernels   CUDA kernels on a GPU                           bench/gpu_programs.h
//   decode    whole decode steps on a GPU                     bench/gpu_programs.h
//   store     the planes of a crumbd, and Redis               bench/store_workload.h
//   simulate  a trace over a cluster of many nodes            bench/simulate_workload.h
//   replay    hit rates of traces under eviction policies     bench/replay_workload.h
//   quality   KL, perplexity and passkeys on 2-bit history    bench/quality_workload.h

#include <iostream>
#include <utility>

#include "absl/status/statusor.h"
#include "bench/command_line.h"
#include "bench/measure.h"
#include "bench/quality_output.h"
#include "bench/workload_output.h"
#include "common/atomic_file.h"
#include "common/status_macros.h"

namespace crumb::bench {
namespace {

struct Output {
  std::string text;
  nlohmann::json json;
};

absl::StatusOr<Output> Run(const CodecOptions& options) {
  const std::vector<CodecRow> rows = RunCodecWorkload(options);
  return Output{CodecText(rows), CodecJson(rows)};
}

absl::StatusOr<Output> Run(const StoreWorkloadOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(const StoreResult result, RunStoreWorkload(options));
  return Output{StoreText(result), StoreJson(result)};
}

absl::StatusOr<Output> Run(const ReplayOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(const std::vector<ReplayRow> rows, RunReplayWorkload(options));
  return Output{ReplayText(rows), ReplayJson(options, rows)};
}

absl::StatusOr<Output> Run(const SimulateOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(const std::vector<SimulateRow> rows, RunSimulateWorkload(options));
  return Output{SimulateText(rows), SimulateJson(options, rows)};
}

absl::StatusOr<Output> Run(const QualityOptions& options) {
  if (!options.plot.empty()) CRUMB_RETURN_IF_ERROR(CheckWritable(options.plot));
  CRUMB_ASSIGN_OR_RETURN(const QualityResult result, RunQualityWorkload(options));
  if (!options.plot.empty()) {
    const absl::Status written =
        WriteAtomically(options.plot, [&result](std::ostream& out) { out << QualityPlot(result); });
    // The figures are printed even if the plot could not be written.
    if (!written.ok()) std::cerr << "crumb-bench: " << std::string(written.message()) << "\n";
  }
  return Output{QualityText(result), QualityJson(result)};
}

// These are never called, because main runs other programs for them.
absl::StatusOr<Output> Run(const KernelsOptions&) { return Output{}; }
absl::StatusOr<Output> Run(const DecodeOptions&) { return Output{}; }

int Main(int argc, char** argv) {
  const auto parsed = ParseCommandLine(argc, argv, tools::ProgramFolder());
  if (const auto* exit = std::get_if<EarlyExit>(&parsed)) return tools::ReportExit(*exit);
  CatchInterrupts();
  const auto& line = std::get<CommandLine>(parsed);
  const auto* kernels = std::get_if<KernelsOptions>(&line.workload);
  const auto* decode = std::get_if<DecodeOptions>(&line.workload);
  if (kernels != nullptr || decode != nullptr) {
    const std::string commit = RunInfo(argc, argv).value("commit", "unknown");
    const absl::Status status = kernels != nullptr ? RunKernels(*kernels, line.json, commit)
                                                   : RunDecode(*decode, line.json, commit);
    std::cerr << "crumb-bench: " << std::string(status.message()) << "\n";
    return kExitFailure;
  }
  auto output = std::visit([](const auto& options) { return Run(options); }, line.workload);
  if (!output.ok()) {
    std::cerr << "crumb-bench: " << std::string(output.status().message()) << "\n";
    return kExitFailure;
  }
  if (line.json) {
    output->json.update(RunInfo(argc, argv));
    std::cout << output->json.dump(2) << "\n";
  } else {
    std::cout << output->text;
  }
  return Interrupted() ? kExitFailure : 0;
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) { return crumb::bench::Main(argc, argv); }
