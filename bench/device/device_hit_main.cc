// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-device-hit-bench times a prefix hit in the device tier on the first GPU with the shapes of
// Qwen3-8B (36 layers, 8 KV heads, head_dim 128; bench/device/device_hit.h). Unless it is given the
// socket folder of a running crumbd, it starts the crumbd that lies beside it.
//
// --cold hashes the prompt's keys each time, as for a prompt that the worker has not seen before.
// --peer N places the prefixes in the pools of GPU N, from which they are copied, beside a plain
// copy of as many bytes. --idle-device measures the host's work alone and needs no GPU.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/device/device_hit.h"
#include "bench/device/device_workload.h"
#include "bench/gpu_run.h"
#include "bench/servers_under_test.h"
#include "common/status_macros.h"
#include "crumb/device_worker.h"
#include "fmt/format.h"
#include "tools/cli.h"

namespace crumb::bench {
namespace {

// Rounds of a measurement with --peer, each of which needs a prefix of its own in the peer's
// memory.
constexpr int kPeerRounds = 5;
// The shortest prompt, in tokens, of which enough pages hit to be timed.
constexpr int kTokensMin = 1024;

struct Arguments {
  bool json = false;
  GpuRun run;
  std::string crumbd = tools::ProgramFolder() + "/crumbd";
  bool idle_device = false;
  int peer = -1;
  DeviceHitWorkload workload;
};

std::variant<Arguments, tools::EarlyExit> Parse(int argc, const char* const* argv) {
  Arguments arguments;
  arguments.run.SetCommand("crumb-device-hit-bench", argc, argv);
  DeviceHitWorkload& workload = arguments.workload;
  workload.options = Qwen3Of8B();
  bool cold = false;
  CLI::App app("Times a prefix hit in the device tier.", "crumb-device-hit-bench");
  app.add_flag("--json", arguments.json, "print one JSON object instead of text");
  app.add_option("--commit", arguments.run.commit, "commit to name in the JSON object");
  CLI::Option* socket_dir = app.add_option("--socket-dir", workload.socket_dir,
                                           "folder of a running crumbd's sockets; without it a "
                                           "crumbd is started in a temporary folder");
  app.add_option("--crumbd", arguments.crumbd, "the crumbd to start")
      ->excludes(socket_dir)
      ->capture_default_str();
  app.add_option("--tokens", workload.tokens, "tokens of the prompt")
      ->check(CLI::Range(kTokensMin, 1 << 24))
      ->capture_default_str();
  CLI::Option* rounds = app.add_option("--rounds", workload.rounds,
                                       fmt::format("rounds; default with --peer: {}", kPeerRounds))
                            ->check(CLI::PositiveNumber)
                            ->capture_default_str();
  app.add_option("--peer", arguments.peer, "number of the GPU whose pools hold the prefixes")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--cold", cold, "hash the prompt's keys in every round");
  app.add_flag("--idle-device", arguments.idle_device,
               "measure the host's work alone, without a GPU");
  if (auto exit = tools::ParseArguments(app, argc, argv)) return *std::move(exit);
  if (arguments.peer >= 0 && rounds->count() == 0) workload.rounds = kPeerRounds;
  if (cold) workload.options.prompt_key_cache_tokens = 0;
  return arguments;
}

absl::StatusOr<client::OpenDevice> OpenDevice(Arguments& arguments, int ordinal) {
  if (arguments.idle_device) return client::OpenDevice(OpenIdleDevice(ordinal).release());
  CRUMB_ASSIGN_OR_RETURN(client::OpenDevice device, client::OpenCudaDevice(ordinal));
  const std::string error = ordinal == 0 ? DescribeGpu(0, &arguments.run) : "";
  if (!error.empty()) return absl::InternalError("the first GPU: " + error);
  return device;
}

// Returns null if the arguments name a crumbd that runs already.
absl::StatusOr<std::unique_ptr<CrumbdUnderTest>> StartCrumbd(Arguments& arguments) {
  if (!arguments.workload.socket_dir.empty()) return nullptr;
  CRUMB_ASSIGN_OR_RETURN(
      auto crumbd,
      CrumbdUnderTest::Start({.program = arguments.crumbd, .host_bytes = {uint64_t{256} << 20}}));
  arguments.workload.socket_dir = crumbd->socket_dir();
  return crumbd;
}

absl::StatusOr<DeviceHitResult> Run(Arguments& arguments) {
  CRUMB_ASSIGN_OR_RETURN(const client::OpenDevice device, OpenDevice(arguments, 0));
  CRUMB_ASSIGN_OR_RETURN(const auto crumbd, StartCrumbd(arguments));
  return RunDeviceHit(arguments.workload, *device);
}

// Returns the rate of cudaMemcpyPeer from GPU `peer` to the first GPU in GB/s, or 0 if it failed.
double PlainCopyRate(int peer, size_t bytes) {
  void* from = nullptr;
  void* to = nullptr;
  std::vector<double> seconds;
  bool done = cudaSetDevice(peer) == cudaSuccess && cudaMalloc(&from, bytes) == cudaSuccess &&
              cudaSetDevice(0) == cudaSuccess && cudaMalloc(&to, bytes) == cudaSuccess;
  // Without peer access, copies pass through host memory; the figure is then that rate.
  if (done && cudaDeviceEnablePeerAccess(peer, 0) != cudaSuccess) cudaGetLastError();
  for (int round = 0; done && round < kPeerRounds + 1; ++round) {
    const auto start = std::chrono::steady_clock::now();
    done = cudaMemcpyPeer(to, 0, from, peer, bytes) == cudaSuccess &&
           cudaDeviceSynchronize() == cudaSuccess;
    const auto took = std::chrono::steady_clock::now() - start;
    if (round > 0) seconds.push_back(std::chrono::duration<double>(took).count());
  }
  cudaFree(from);
  cudaFree(to);
  if (!done) return 0.0;
  std::sort(seconds.begin(), seconds.end());
  return static_cast<double>(bytes) / seconds[seconds.size() / 2] / 1e9;
}

absl::StatusOr<PeerHitResult> RunPeer(Arguments& arguments, double* plain_gbps) {
  CRUMB_ASSIGN_OR_RETURN(const client::OpenDevice device, OpenDevice(arguments, 0));
  CRUMB_ASSIGN_OR_RETURN(const client::OpenDevice peer, OpenDevice(arguments, arguments.peer));
  CRUMB_ASSIGN_OR_RETURN(const auto crumbd, StartCrumbd(arguments));
  CRUMB_ASSIGN_OR_RETURN(const PeerHitResult result,
                         RunPeerHit(arguments.workload, *device, *peer, arguments.peer));
  // This comes last because the driver enables access between the GPUs once pools are mapped.
  if (!arguments.idle_device) {
    *plain_gbps = PlainCopyRate(arguments.peer, static_cast<size_t>(result.bytes));
  }
  return result;
}

int PeerMain(Arguments& arguments) {
  double plain_gbps = 0.0;
  const auto result = RunPeer(arguments, &plain_gbps);
  if (!result.ok()) {
    std::fprintf(stderr, "crumb-device-hit-bench: %s\n", result.status().ToString().c_str());
    return 1;
  }
  const PeerHitResult& r = *result;
  if (arguments.json) {
    std::printf(
        "{%s, \"rows\": [{\"plane\": \"device\", \"op\": \"peer_hit\", \"pages\": %d, \"rounds\": "
        "%d, \"bytes\": %lld, "
        "\"begin_ms_p50\": %.3f, \"first_layer_ms_p50\": %.3f, \"all_layers_ms_p50\": %.3f, "
        "\"gbps\": %.2f, \"plain_copy_gbps\": %.2f}]}\n",
        GpuRunJson(arguments.run).c_str(), r.pages, r.rounds, static_cast<long long>(r.bytes),
        r.begin_ms, r.first_layer_ms, r.all_layers_ms, r.gbps, plain_gbps);
  } else {
    std::printf(
        "peer_hit of %d pages, %.2f GB: Begin %.3f ms, first layer after %.3f ms, all after "
        "%.3f ms (medians of %d), %.1f GB/s; a plain copy from the peer %.1f GB/s\n",
        r.pages, static_cast<double>(r.bytes) / 1e9, r.begin_ms, r.first_layer_ms, r.all_layers_ms,
        r.rounds, r.gbps, plain_gbps);
  }
  return 0;
}

int Main(int argc, char** argv) {
  auto parsed = Parse(argc, argv);
  if (const auto* exit = std::get_if<tools::EarlyExit>(&parsed)) return tools::ReportExit(*exit);
  auto& arguments = std::get<Arguments>(parsed);
  if (arguments.peer >= 0) return PeerMain(arguments);
  const auto result = Run(arguments);
  if (!result.ok()) {
    std::fprintf(stderr, "crumb-device-hit-bench: %s\n", result.status().ToString().c_str());
    return 1;
  }
  const DeviceHitResult& r = *result;
  if (arguments.json) {
    std::printf(
        "{%s, \"rows\": [{\"plane\": \"device\", \"op\": \"device_hit\", \"pages\": %d, "
        "\"rounds\": %d, \"ready_ms_p50\": %.3f, "
        "\"ready_ms_p99\": %.3f, \"begin_ms_p50\": %.3f, \"acquire_ms_p50\": %.3f}]}\n",
        GpuRunJson(arguments.run).c_str(), r.pages, r.rounds, r.ready_ms_p50, r.ready_ms_p99,
        r.begin_ms_p50, r.acquire_ms_p50);
  } else {
    std::printf(
        "device_hit of %d pages: ready after %.3f ms (median of %d; p99 %.3f ms), Begin %.3f ms, "
        "of that an Acquire takes %.3f ms\n",
        r.pages, r.ready_ms_p50, r.rounds, r.ready_ms_p99, r.begin_ms_p50, r.acquire_ms_p50);
  }
  return 0;
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) { return crumb::bench::Main(argc, argv); }
