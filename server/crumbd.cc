// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumbd: the daemon that keeps pages for the workers of this host.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "CLI/CLI.hpp"
#include "common/config.h"
#include "common/logging.h"
#include "server/daemon.h"
#include "server/listen_check.h"
#include "server/memory_check.h"
#include "server/options.h"
#include "server/ready_notice.h"
#include "server/version.h"

namespace {

using crumb::ConfigVisitor;
using crumb::server::Daemon;
using crumb::server::Options;

constexpr int kExitOk = 0;
constexpr int kExitFailed = 1;

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "crumbd: %s\n", std::string(status.message()).c_str());
  return kExitFailed;
}

absl::Status ReadOptions(const std::string& path, Options& options) {
  if (!path.empty()) {
    const absl::Status read =
        crumb::ReadConfigFile(path, [&](ConfigVisitor& visitor) { options.Visit(visitor); });
    if (!read.ok()) return read;
  }
  options.Complete();
  return options.Validate();
}

// Says that the configuration is valid, and, when `here`, whether this machine has what it names.
int Check(const Options& options, bool here) {
  if (here) {
    const absl::Status usable = CheckListeners(options);
    if (!usable.ok()) return Fail(usable);
    const auto needs = CheckMemory(options.store.host, crumb::server::ReadMemoryFacts(""));
    if (!needs.ok()) return Fail(needs.status());
    for (const std::string& line : *needs) std::puts(line.c_str());
  }
  std::puts("crumbd: the configuration is valid");
  return kExitOk;
}

// How long crumbd sleeps between looks at files that change; none: there are none.
std::optional<timespec> BetweenLooks(const Options& options) {
  std::optional<crumb::Duration> interval;
  if (options.tenants.enabled()) interval = options.tenants.reload_interval;
  if (options.listen.tls.enabled()) {
    interval =
        std::min(interval.value_or(crumb::Duration::max()), options.listen.tls.reload_interval);
  }
  if (!interval) return std::nullopt;
  const auto count = std::chrono::duration_cast<std::chrono::nanoseconds>(*interval).count();
  return timespec{.tv_sec = count / 1'000'000'000, .tv_nsec = count % 1'000'000'000};
}

// Returns the signal that ends crumbd. Meanwhile looks after files that change: at SIGHUP, and
// where there are tenants or certificates at their intervals.
int WaitForEnd(Daemon& daemon, const Options& options, const sigset_t& signals) {
  const std::optional<timespec> pause = BetweenLooks(options);
  while (true) {
    const int signal = ::sigtimedwait(&signals, nullptr, pause ? &*pause : nullptr);
    if (signal == SIGTERM || signal == SIGINT) return signal;
    if (signal == SIGHUP || errno == EAGAIN) daemon.Reload(signal == SIGHUP);
  }
}

// Serves until SIGTERM or SIGINT. `signals` are blocked in every thread; a second one ends the
// process at once.
int Serve(const Options& options, const sigset_t& signals) {
  auto daemon = Daemon::Start(options);
  if (!daemon.ok()) return Fail(daemon.status());
  const char* const manager = std::getenv("NOTIFY_SOCKET");
  const auto tell = [&](const char* state) {
    const absl::Status told = crumb::server::SendNotice(manager == nullptr ? "" : manager, state);
    if (!told.ok()) crumb::LogWarning("{}", std::string(told.message()));
  };
  tell("READY=1");
  const int signal = WaitForEnd(**daemon, options, signals);
  crumb::LogInfo("signal {}: stopping, a second one ends at once", signal);
  tell("STOPPING=1");
  ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  const absl::Status stopped = (*daemon)->Stop();
  return stopped.ok() ? kExitOk : Fail(stopped);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Keeps KV pages for the inference workers of this host."};
  app.set_version_flag("--version", std::string("crumbd ") + crumb::server::kVersion);
  std::string config;
  bool check = false;
  bool check_config = false;
  bool print = false;
  app.add_option("--config", config, "YAML file; without one the defaults apply");
  app.add_flag("--check", check, "Check configuration, sockets, ports and memory, then exit");
  app.add_flag("--check-config", check_config, "Check the configuration alone, then exit");
  app.add_flag("--print-config", print, "Print every setting with its meaning, then exit");
  CLI11_PARSE(app, argc, argv);

  Options options;
  const absl::Status read = ReadOptions(config, options);
  if (!read.ok()) return Fail(read);
  if (print) {
    const std::string text = crumb::PrintConfig(
        [&](ConfigVisitor& visitor) { options.Visit(visitor); }, /*comments=*/true);
    std::fputs(text.c_str(), stdout);
    return kExitOk;
  }
  if (check_config || check) return Check(options, check);
  if (const absl::Status set = crumb::SetLogSeverity(options.log.severity); !set.ok()) {
    return Fail(set);
  }
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::sigaddset(&signals, SIGINT);
  ::sigaddset(&signals, SIGHUP);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  return Serve(options, signals);
}
