// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/servers_under_test.h"

#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "bench/measure.h"
#include "bench/resp_client.h"
#include "common/errno_status.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

constexpr Duration kStartWait = std::chrono::seconds(30);
constexpr size_t kLogTailBytes = 500;

std::string LogTail(const std::string& path) {
  std::ifstream in(path);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  return text.size() <= kLogTailBytes ? text : "..." + text.substr(text.size() - kLogTailBytes);
}

std::string CrumbdConfig(const CrumbdSettings& settings, const std::string& folder) {
  const bool ssd = settings.ssd_bytes.value > 0;
  return fmt::format(
      "listen:\n  socket_dir: {}\nadmin:\n  listen: \"\"\nlog:\n  severity: warning\n"
      "store:\n  host:\n    bytes_max: {}\n    slab_bytes: {}\n    policy: {}\n"
      "  ssd:\n    path: \"{}\"\n    bytes_max: {}\n"
      "    io_threads: {}\n",
      folder, settings.host_bytes.value, settings.slab_bytes.value, settings.host_policy,
      ssd ? folder + "/ssd" : "", ssd ? settings.ssd_bytes.value : uint64_t{1} << 30,
      settings.ssd_threads);
}

}  // namespace

absl::Status WaitReady(const std::string& name, ChildProcess& process, const std::string& log,
                       const std::function<bool()>& ready) {
  const TimePoint end = Clock::Real().Now() + kStartWait;
  while (!ready()) {
    if (!process.Running() || Clock::Real().Now() > end || Interrupted()) {
      return absl::UnavailableError(name + " did not become ready: " + LogTail(log));
    }
    std::this_thread::sleep_for(kPollInterval);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ScratchFolder>> ScratchFolder::Create() {
  std::error_code error;
  const auto base = std::filesystem::temp_directory_path(error);
  if (error) return ErrnoStatus(error.value(), "temporary folder");
  std::string pattern = (base / "crumb-bench-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) return ErrnoStatus(errno, pattern);
  return std::unique_ptr<ScratchFolder>(new ScratchFolder(pattern));
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

absl::StatusOr<std::unique_ptr<CrumbdUnderTest>> CrumbdUnderTest::Start(
    const CrumbdSettings& settings) {
  auto crumbd = std::make_unique<CrumbdUnderTest>();
  CRUMB_ASSIGN_OR_RETURN(crumbd->folder_, ScratchFolder::Create());
  const std::string& folder = crumbd->folder_->path();
  const std::string config = folder + "/crumbd.yaml", log = folder + "/crumbd.log";
  std::ofstream(config) << CrumbdConfig(settings, folder);
  CRUMB_ASSIGN_OR_RETURN(crumbd->process_,
                         ChildProcess::Start({settings.program, "--config", config}, log));
  CRUMB_RETURN_IF_ERROR(WaitReady(settings.program, *crumbd->process_, log, [&] {
    return std::filesystem::exists(folder + "/crumbd.endpoints.json");
  }));
  return crumbd;
}

absl::StatusOr<std::unique_ptr<RedisUnderTest>> RedisUnderTest::Start() {
  auto redis = std::make_unique<RedisUnderTest>();
  CRUMB_ASSIGN_OR_RETURN(redis->folder_, ScratchFolder::Create());
  CRUMB_ASSIGN_OR_RETURN(redis->port_, FreeLoopbackPort());
  const std::string& folder = redis->folder_->path();
  const std::string log = folder + "/redis.log";
  CRUMB_ASSIGN_OR_RETURN(
      redis->process_,
      ChildProcess::Start({"redis-server", "--port", std::to_string(redis->port_), "--bind",
                           "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder},
                          log));
  CRUMB_RETURN_IF_ERROR(WaitReady("redis-server", *redis->process_, log, [&] {
    auto client = RespClient::Connect("127.0.0.1", redis->port_);
    return client.ok() && (*client)->Ping().ok();
  }));
  return redis;
}

}  // namespace crumb::bench
