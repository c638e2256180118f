// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-device-bench times the device worker on the first GPU with the shapes of Qwen3-8B (36
// layers, 8 KV heads, 32 query heads, head_dim 128). It measures two things
// (bench/device/device_workload.h): fetching a prefix from host memory, beside one pinned copy of
// as many bytes, with the checksums verified on the GPU; and decode passes of whole batches as one
// CUDA graph (append, attention and eviction, without projections), including a pass in which a
// window of every sequence is evicted and published. With --idle-device it measures the host's work
// alone and needs no GPU.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <memory>
#include <string>
#include <variant>

#include "CLI/CLI.hpp"
#include "bench/device/device_workload.h"
#include "bench/gpu_run.h"
#include "crumb/device_worker.h"
#include "tools/cli.h"

namespace crumb::bench {
namespace {

struct Arguments {
  bool json = false;
  GpuRun run;
  bool idle_device = false;
  DeviceWorkload workload;
};

// Pages of different contents in host memory. BF16 pages take eight times the memory of INT2 pages,
// so there are fewer of them.
constexpr int kBf16HostPages = 32;

std::variant<Arguments, tools::EarlyExit> Parse(int argc, const char* const* argv) {
  Arguments arguments;
  arguments.run.SetCommand("crumb-device-bench", argc, argv);
  DeviceWorkload& workload = arguments.workload;
  workload.options = Qwen3Of8B();
  workload.batches = {1, 8, 32};
  workload.options.verify_every = 0;
  workload.options.publish_queue_max = 1 << 16;
  std::string history = "int2";
  CLI::App app("Times the device worker on the first GPU.", "crumb-device-bench");
  app.add_flag("--json", arguments.json, "print one JSON object instead of text");
  app.add_option("--commit", arguments.run.commit, "commit to name in the JSON object");
  app.add_option("--context", workload.context, "tokens that a decoding sequence holds")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch", workload.batches, "sequences that decode together")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--passes", workload.passes, "decode passes of each batch")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--load-kernel-layers", workload.load_kernel_layers,
                 "layers of a prefix that the fetch kernel copies")
      ->capture_default_str();
  app.add_option("--history", history, "format of history pages")
      ->check(CLI::IsMember({"int2", "bf16"}))
      ->capture_default_str();
  app.add_flag("--idle-device", arguments.idle_device,
               "measure the host's work alone, without a GPU");
  if (auto exit = tools::ParseArguments(app, argc, argv)) return *std::move(exit);
  if (history == "bf16") {
    workload.options.history_format = kernels::PageFormat::kBf16;
    workload.host_pages = kBf16HostPages;
  }
  return arguments;
}

// Ends the program if a CUDA call failed.
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

// Measures the host's work alone.
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
  auto parsed = Parse(argc, argv);
  if (const auto* exit = std::get_if<tools::EarlyExit>(&parsed)) return tools::ReportExit(*exit);
  auto& arguments = std::get<Arguments>(parsed);
  if (arguments.idle_device) return RunIdle(arguments);
  const auto device = client::OpenCudaDevice(0);
  if (!device.ok()) {
    std::fprintf(stderr, "crumb-device-bench: %s\n", device.status().ToString().c_str());
    return 1;
  }
  if (const std::string error = DescribeGpu(0, &arguments.run); !error.empty()) {
    std::fprintf(stderr, "crumb-device-bench: the first GPU: %s\n", error.c_str());
    return 1;
  }
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
