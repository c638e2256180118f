// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-device-bench [--json] [--commit ID] [--context N] [--batch N,N...] [--passes N]
//                    [--load-kernel-layers N] [--idle-device] [--history int2|bf16]
//
// Times the device worker on the first GPU with the shapes of Qwen3-8B (36 layers, 8 KV heads, 32
// query heads, head_dim 128): a prefix from host memory beside one pinned copy of as many bytes,
// with the sums verified on the GPU; and decode passes of whole batches as one CUDA graph (append,
// attention, eviction; no projections), with what a pass costs in which a window of every sequence
// leaves and is published; of INT2 history, or of BF16. bench/device/device_workload.h.
// --idle-device: the host's work alone, without a GPU.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>

#include "bench/device/device_workload.h"
#include "bench/device/idle_device.h"
#include "bench/device/model_options.h"
#include "bench/kernels/ask_gpu.h"
#include "crumb/cuda_device.h"

namespace crumb::bench {
namespace {

struct Arguments {
  bool json = false;
  GpuRun run;
  bool idle_device = false;
  DeviceWorkload workload;
};

bool Parse(int argc, char** argv, Arguments* arguments) {
  arguments->run.SetCommand("crumb-device-bench", argc, argv);
  for (int i = 1; i < argc; ++i) {
    const bool more = i + 1 < argc;
    if (std::strcmp(argv[i], "--json") == 0) {
      arguments->json = true;
    } else if (std::strcmp(argv[i], "--idle-device") == 0) {
      arguments->idle_device = true;
    } else if (std::strcmp(argv[i], "--commit") == 0 && more) {
      arguments->run.commit = argv[++i];
    } else if (std::strcmp(argv[i], "--context") == 0 && more) {
      arguments->workload.context = std::stoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--passes") == 0 && more) {
      arguments->workload.passes = std::stoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--load-kernel-layers") == 0 && more) {
      arguments->workload.load_kernel_layers = std::stoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--history") == 0 && more) {
      const bool bf16 = std::strcmp(argv[++i], "bf16") == 0;
      if (!bf16) continue;
      arguments->workload.options.history_format = kernels::PageFormat::kBf16;
      arguments->workload.host_pages = 32;
    } else if (std::strcmp(argv[i], "--batch") == 0 && more) {
      std::stringstream list(argv[++i]);
      arguments->workload.batches.clear();
      for (std::string item; std::getline(list, item, ',');) {
        arguments->workload.batches.push_back(std::stoi(item));
      }
    } else {
      std::fprintf(stderr,
                   "usage: crumb-device-bench [--json] [--commit ID] [--context N] "
                   "[--batch N,N...] [--passes N] [--load-kernel-layers N] [--idle-device] "
                   "[--history int2|bf16]\n");
      return false;
    }
  }
  return true;
}

// Ends the program when a CUDA call failed.
void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "crumb-device-bench: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

std::function<void()> Captured(client::DeviceStream handle, const std::function<void()>& pass) {
  const auto stream = reinterpret_cast<cudaStream_t>(handle);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  pass();
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&executable, graph, 0), "graph");
  Check(cudaGraphDestroy(graph), "graph");
  const std::shared_ptr<void> owner(
      executable, [](void* held) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(held)); });
  return [owner, executable, stream] { Check(cudaGraphLaunch(executable, stream), "launch"); };
}

void PrintText(const DeviceResult& result) {
  const FetchResult& f = result.fetch;
  std::printf("prefix of %.2f GB: %.1f GB/s, %.0f %% of a pinned copy's %.1f GB/s\n",
              static_cast<double>(f.bytes) / 1e9, f.fetch_gbps, 100.0 * f.fetch_gbps / f.copy_gbps,
              f.copy_gbps);
  std::printf("Begin %.2f ms, first layer after %.2f ms, all after %.2f ms\n",
              f.begin_seconds * 1e3, f.first_layer_seconds * 1e3, f.all_layers_seconds * 1e3);
  std::printf("with the prompt's rest: first layer attended after %.2f ms, all after %.2f ms\n",
              f.first_attended_seconds * 1e3, f.all_attended_seconds * 1e3);
  for (const DecodeResult& d : result.decode) {
    std::printf(
        "batch %d: step %.1f us, with a window of each %.1f us (+%.1f %%), mean %.1f us, "
        "beside a prefix that comes %.1f us (there after %.1f ms), %llu pages published\n",
        d.batch, d.step_seconds * 1e6, d.evict_seconds * 1e6,
        100.0 * (d.evict_seconds / d.step_seconds - 1.0), d.mean_seconds * 1e6,
        d.beside_load_seconds * 1e6, d.load_seconds * 1e3,
        static_cast<unsigned long long>(d.published_pages));
  }
}

void PrintJson(const Arguments& arguments, const DeviceResult& result) {
  const FetchResult& f = result.fetch;
  std::printf(
      "{%s, \"context\": %d,\n"
      " \"fetch\": {\"bytes\": %lld, \"load_kernel_layers\": %d, \"gbps\": %.2f, \"copy_gbps\": "
      "%.2f, "
      "\"percent_of_copy\": %.1f,\n  \"begin_ms\": %.3f, \"first_layer_ms\": %.3f, "
      "\"all_layers_ms\": %.3f, \"first_attended_ms\": %.3f, \"all_attended_ms\": %.3f},\n"
      " \"decode\": [",
      GpuRunJson(arguments.run).c_str(), arguments.workload.context,
      static_cast<long long>(f.bytes), arguments.workload.load_kernel_layers, f.fetch_gbps,
      f.copy_gbps, 100.0 * f.fetch_gbps / f.copy_gbps, f.begin_seconds * 1e3,
      f.first_layer_seconds * 1e3, f.all_layers_seconds * 1e3, f.first_attended_seconds * 1e3,
      f.all_attended_seconds * 1e3);
  for (size_t i = 0; i < result.decode.size(); ++i) {
    const DecodeResult& d = result.decode[i];
    std::printf(
        "%s\n  {\"batch\": %d, \"step_us\": %.2f, \"evict_step_us\": %.2f, "
        "\"evict_percent\": %.2f, \"mean_us\": %.2f, \"beside_load_us\": %.2f, "
        "\"load_ms\": %.3f, \"published_pages\": %llu}",
        i == 0 ? "" : ",", d.batch, d.step_seconds * 1e6, d.evict_seconds * 1e6,
        100.0 * (d.evict_seconds / d.step_seconds - 1.0), d.mean_seconds * 1e6,
        d.beside_load_seconds * 1e6, d.load_seconds * 1e3,
        static_cast<unsigned long long>(d.published_pages));
  }
  std::printf("]}\n");
}

// The host's work alone.
int RunIdle(const Arguments& arguments) {
  const auto device = OpenIdleDevice();
  const auto result = RunDeviceWorkload(arguments.workload, *device, CapturePass());
  if (!result.ok()) {
    std::fprintf(stderr, "crumb-device-bench: %s\n", result.status().ToString().c_str());
    return 1;
  }
  PrintText(*result);
  return 0;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  arguments.workload.options = Qwen3Of8B();
  arguments.workload.options.verify_every = 0;
  arguments.workload.options.publish_queue_max = 1 << 16;
  arguments.workload.batches = {1, 8, 32};
  if (!Parse(argc, argv, &arguments)) return 2;
  if (arguments.idle_device) return RunIdle(arguments);
  const auto device = client::OpenCudaDevice(0);
  if (!device.ok()) {
    std::fprintf(stderr, "crumb-device-bench: %s\n", device.status().ToString().c_str());
    return 1;
  }
  Check(AskGpu(0, &arguments.run), "device");
  const auto result = RunDeviceWorkload(arguments.workload, **device, Captured);
  if (!result.ok()) {
    std::fprintf(stderr, "crumb-device-bench: %s\n", result.status().ToString().c_str());
    return 1;
  }
  if (arguments.json) {
    PrintJson(arguments, *result);
  } else {
    PrintText(*result);
  }
  return 0;
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) { return crumb::bench::Main(argc, argv); }
