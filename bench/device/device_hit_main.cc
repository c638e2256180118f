// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-device-hit-bench [--json] [--commit ID] [--crumbd PROGRAM | --socket-dir DIR]
//                        [--tokens N] [--rounds N] [--idle-device]
//
// Times a prefix hit in the device tier on the first GPU with the shapes of Qwen3-8B (36 layers, 8
// KV heads, head_dim 128): bench/device/device_hit.h. Starts a crumbd of its own, the one beside
// this program, unless it is told which. --idle-device: the host's work alone, without a GPU.
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "bench/device/device_hit.h"
#include "bench/device/idle_device.h"
#include "bench/device/model_options.h"
#include "bench/servers_under_test.h"
#include "common/status_macros.h"
#include "crumb/cuda_device.h"

namespace crumb::bench {
namespace {

struct Arguments {
  bool json = false;
  std::string commit = "unknown";
  std::string command = "crumb-device-hit-bench";
  std::string crumbd;
  bool idle_device = false;
  DeviceHitWorkload workload;
};

bool Parse(int argc, char** argv, Arguments* arguments) {
  std::error_code ignored;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", ignored);
  arguments->crumbd = (self.parent_path() / "crumbd").string();
  for (int i = 1; i < argc; ++i) arguments->command.append(" ").append(argv[i]);
  for (int i = 1; i < argc; ++i) {
    const bool more = i + 1 < argc;
    if (std::strcmp(argv[i], "--json") == 0) {
      arguments->json = true;
    } else if (std::strcmp(argv[i], "--commit") == 0 && more) {
      arguments->commit = argv[++i];
    } else if (std::strcmp(argv[i], "--crumbd") == 0 && more) {
      arguments->crumbd = argv[++i];
    } else if (std::strcmp(argv[i], "--socket-dir") == 0 && more) {
      arguments->workload.socket_dir = argv[++i];
    } else if (std::strcmp(argv[i], "--idle-device") == 0) {
      arguments->idle_device = true;
    } else if (std::strcmp(argv[i], "--tokens") == 0 && more) {
      arguments->workload.tokens = std::stoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--rounds") == 0 && more) {
      arguments->workload.rounds = std::stoi(argv[++i]);
    } else {
      std::fprintf(stderr,
                   "usage: crumb-device-hit-bench [--json] [--commit ID] [--crumbd PROGRAM | "
                   "--socket-dir DIR] [--tokens N] [--rounds N] [--idle-device]\n");
      return false;
    }
  }
  return arguments->workload.rounds > 0 && arguments->workload.tokens >= 1024;
}

absl::StatusOr<client::OpenDevice> OpenDevice(const Arguments& arguments) {
  if (arguments.idle_device) return client::OpenDevice(OpenIdleDevice().release());
  return client::OpenCudaDevice(0);
}

absl::StatusOr<DeviceHitResult> Run(Arguments& arguments) {
  CRUMB_ASSIGN_OR_RETURN(const client::OpenDevice device, OpenDevice(arguments));
  std::unique_ptr<CrumbdUnderTest> crumbd;
  if (arguments.workload.socket_dir.empty()) {
    auto started =
        CrumbdUnderTest::Start({.program = arguments.crumbd, .host_bytes = {uint64_t{256} << 20}});
    if (!started.ok()) return started.status();
    crumbd = *std::move(started);
    arguments.workload.socket_dir = crumbd->socket_dir();
  }
  return RunDeviceHit(arguments.workload, *device);
}

int Main(int argc, char** argv) {
  Arguments arguments;
  arguments.workload.options = Qwen3Of8B();
  if (!Parse(argc, argv, &arguments)) return 2;
  const auto result = Run(arguments);
  if (!result.ok()) {
    std::fprintf(stderr, "crumb-device-hit-bench: %s\n", result.status().ToString().c_str());
    return 1;
  }
  const DeviceHitResult& r = *result;
  if (arguments.json) {
    std::printf(
        "{\"commit\": \"%s\", \"command\": \"%s\", \"rows\": [{\"plane\": \"device\", "
        "\"op\": \"device_hit\", \"pages\": %d, \"rounds\": %d, \"ready_ms_p50\": %.3f, "
        "\"ready_ms_p99\": %.3f, \"begin_ms_p50\": %.3f, \"acquire_ms_p50\": %.3f}]}\n",
        arguments.commit.c_str(), arguments.command.c_str(), r.pages, r.rounds, r.ready_ms_p50,
        r.ready_ms_p99, r.begin_ms_p50, r.acquire_ms_p50);
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
