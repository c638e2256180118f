// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-device-hit-bench [--json] [--commit ID] [--crumbd PROGRAM | --socket-dir DIR]
//                        [--tokens N] [--rounds N] [--idle-device] [--peer N] [--cold]
//
// Times a prefix hit in the device tier on the first GPU with the shapes of Qwen3-8B (36 layers, 8
// KV heads, head_dim 128): bench/device/device_hit.h. Starts a crumbd of its own, the one beside
// this program, unless it is told which.
//
// --cold: the prompt's keys are hashed each time, as those of a prompt that the worker has not
// seen.
// --peer: the prefixes lie in pools of GPU N and are copied, --rounds of them (5), beside a plain
// copy of as many bytes from there. --idle-device: the host's work alone, without a GPU.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "bench/device/device_hit.h"
#include "bench/device/idle_device.h"
#include "bench/device/model_options.h"
#include "bench/kernels/ask_gpu.h"
#include "bench/servers_under_test.h"
#include "common/status_macros.h"
#include "crumb/cuda_device.h"

namespace crumb::bench {
namespace {

constexpr int kPeerRounds = 5;

struct Arguments {
  bool json = false;
  GpuRun run;
  std::string crumbd;
  bool idle_device = false;
  int peer = -1;
  DeviceHitWorkload workload;
};

bool Parse(int argc, char** argv, Arguments* arguments) {
  std::error_code ignored;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", ignored);
  arguments->crumbd = (self.parent_path() / "crumbd").string();
  arguments->run.SetCommand("crumb-device-hit-bench", argc, argv);
  for (int i = 1; i < argc; ++i) {
    const bool more = i + 1 < argc;
    if (std::strcmp(argv[i], "--json") == 0) {
      arguments->json = true;
    } else if (std::strcmp(argv[i], "--commit") == 0 && more) {
      arguments->run.commit = argv[++i];
    } else if (std::strcmp(argv[i], "--crumbd") == 0 && more) {
      arguments->crumbd = argv[++i];
    } else if (std::strcmp(argv[i], "--socket-dir") == 0 && more) {
      arguments->workload.socket_dir = argv[++i];
    } else if (std::strcmp(argv[i], "--idle-device") == 0) {
      arguments->idle_device = true;
    } else if (std::strcmp(argv[i], "--cold") == 0) {
      arguments->workload.options.known_prompt_tokens = 0;
    } else if (std::strcmp(argv[i], "--peer") == 0 && more) {
      arguments->peer = std::stoi(argv[++i]);
      arguments->workload.rounds = kPeerRounds;
    } else if (std::strcmp(argv[i], "--tokens") == 0 && more) {
      arguments->workload.tokens = std::stoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--rounds") == 0 && more) {
      arguments->workload.rounds = std::stoi(argv[++i]);
    } else {
      std::fprintf(
          stderr,
          "usage: crumb-device-hit-bench [--json] [--commit ID] [--crumbd PROGRAM | "
          "--socket-dir DIR] [--tokens N] [--rounds N] [--idle-device] [--peer N] [--cold]\n");
      return false;
    }
  }
  return arguments->workload.rounds > 0 && arguments->workload.tokens >= 1024;
}

absl::StatusOr<client::OpenDevice> OpenDevice(Arguments& arguments, int ordinal) {
  if (arguments.idle_device) return client::OpenDevice(OpenIdleDevice(ordinal).release());
  CRUMB_ASSIGN_OR_RETURN(client::OpenDevice device, client::OpenCudaDevice(ordinal));
  const cudaError_t error = ordinal == 0 ? AskGpu(0, &arguments.run) : cudaSuccess;
  if (error != cudaSuccess) return absl::InternalError(cudaGetErrorString(error));
  return device;
}

// Null where one is there already.
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

// GB/s of cudaMemcpyPeer from GPU `peer` to the first one; 0: it failed.
double PlainCopyRate(int peer, size_t bytes) {
  void* from = nullptr;
  void* to = nullptr;
  std::vector<double> seconds;
  bool done = cudaSetDevice(peer) == cudaSuccess && cudaMalloc(&from, bytes) == cudaSuccess &&
              cudaSetDevice(0) == cudaSuccess && cudaMalloc(&to, bytes) == cudaSuccess;
  // Without it copies pass host memory. Where it cannot be had, they do.
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
  // Behind it: the driver lets the GPUs reach each other once pools are mapped.
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
  Arguments arguments;
  arguments.workload.options = Qwen3Of8B();
  if (!Parse(argc, argv, &arguments)) return 2;
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
