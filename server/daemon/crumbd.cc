// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumbd: the daemon that keeps pages for the workers of this host.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "CLI/CLI.hpp"
#include "common/config.h"
#include "common/errno_status.h"
#include "common/logging.h"
#include "common/unique_fd.h"
#include "server/daemon/daemon.h"
#include "server/daemon/descriptor_check.h"
#include "server/daemon/memory_check.h"
#include "server/daemon/options.h"
#include "server/daemon/takeover.h"
#include "server/daemon/version.h"

namespace {

using crumb::ConfigVisitor;
using crumb::server::Daemon;
using crumb::server::Options;

using crumb::server::TakeoverListener;
using crumb::storage::HandedOverMemory;

// The takeover listener sends this signal to the main thread when a successor requests a takeover.
constexpr int kSuccessorSignal = SIGUSR2;
// Limits of waits during a takeover: of the successor for memory, in addition to the time that the
// predecessor may take to stop; of the predecessor for a successor that recovers the SSD folder; of
// the successor for the predecessor's end after ConfirmTakeover; and for a predecessor that was
// killed.
constexpr auto kHandOverWait = std::chrono::seconds(60);
constexpr auto kSuccessorWait = std::chrono::minutes(15);
constexpr auto kEndWait = std::chrono::seconds(30);
constexpr auto kDyingWait = std::chrono::seconds(10);

constexpr int kExitOk = 0;
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

// Sends the service manager a state such as "READY=1": one datagram to the socket that systemd
// names in NOTIFY_SOCKET, a path or "@name" of an abstract one. Does nothing without that variable:
// no service manager waits. A failure is logged, for crumbd serves without a service manager, too.
void NotifyServiceManager(const std::string& state) {
  const char* const variable = std::getenv("NOTIFY_SOCKET");
  const std::string socket = variable == nullptr ? "" : variable;
  if (socket.empty()) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if ((socket[0] != '/' && socket[0] != '@') || socket.size() >= sizeof(address.sun_path)) {
    crumb::LogWarning("NOTIFY_SOCKET is '{}', must be a path or @name of a Unix socket", socket);
    return;
  }
  std::memcpy(address.sun_path, socket.data(), socket.size());
  if (socket[0] == '@') address.sun_path[0] = '\0';
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket.size());
  const crumb::UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() || ::sendto(fd.get(), state.data(), state.size(), MSG_NOSIGNAL,
                              reinterpret_cast<const sockaddr*>(&address), size) < 0) {
    const absl::Status failed = crumb::ErrnoStatus(errno, "sending " + state + " to " + socket);
    crumb::LogWarning("{}", std::string(failed.message()));
  }
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "crumbd: %s\n", std::string(status.message()).c_str());
  return kExitFailed;
}

absl::Status ReadOptions(const std::string& path, Options& options) {
  if (!path.empty()) {
    absl::Status read =
        crumb::ReadConfigFile(path, [&](ConfigVisitor& visitor) { options.Visit(visitor); });
    if (!read.ok()) return read;
  }
  options.Complete();
  return options.Validate();
}

// Reports whether the configuration is valid and, if `here`, whether this machine has the resources
// that it names.
int Check(const Options& options, bool here) {
  if (here) {
    const absl::Status usable = CheckListeners(options);
    if (!usable.ok()) return Fail(usable);
    const auto needs = CheckMemory(options.store.host, crumb::server::ReadMemoryFacts(""));
    if (!needs.ok()) return Fail(needs.status());
    for (const std::string& line : *needs) std::puts(line.c_str());
    const auto descriptors = CheckDescriptors(crumb::server::DescriptorNeedsOf(options));
    if (!descriptors.ok()) return Fail(descriptors.status());
    for (const std::string& line : *descriptors) std::puts(line.c_str());
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
    if (signal == SIGTERM || signal == SIGINT || signal == kSuccessorSignal) return signal;
    if (signal == SIGHUP || errno == EAGAIN) daemon.Reload(signal == SIGHUP);
  }
}

using DaemonOr = absl::StatusOr<std::unique_ptr<Daemon>>;

DaemonOr StartWith(const Options& options, std::unique_ptr<HandedOverMemory> memory) {
  return Daemon::Start(options, crumb::storage::TieredStore::Open, std::move(memory));
}

// Starts with the memory of the crumbd that runs, which ends when this one serves, and goes on when
// it does not. Without one, or when it dies meanwhile, starts without.
DaemonOr StartInPlaceOfAnother(const Options& options) {
  // Checks that can be made while the other process is still running.
  const auto fits = CheckMemory(options.store.host, crumb::server::ReadMemoryFacts(""));
  if (!fits.ok()) return fits.status();
  const auto descriptors = CheckDescriptors(crumb::server::DescriptorNeedsOf(options));
  if (!descriptors.ok()) return descriptors.status();
  const absl::Status usable = options.listen.tls.CheckFiles(std::chrono::system_clock::now());
  if (!usable.ok()) return usable;
  auto takeover = crumb::server::TakeOver(options, 2 * options.stop_grace + kHandOverWait);
  if (absl::IsNotFound(takeover.status())) {
    crumb::LogInfo("there is no crumbd to take over from");
    return StartWith(options, nullptr);
  }
  if (absl::IsUnavailable(takeover.status())) {
    crumb::LogWarning("the crumbd that ran died while it handed over: starting without its memory");
    const auto until = crumb::Clock::Real().Now() + kDyingWait;
    DaemonOr daemon = StartWith(options, nullptr);
    while (!daemon.ok() && crumb::Clock::Real().Now() < until) {  // it still holds folder or ports
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      daemon = StartWith(options, nullptr);
    }
    return daemon;
  }
  if (!takeover.ok()) return takeover.status();
  DaemonOr daemon = StartWith(options, std::move(takeover->memory));
  if (!daemon.ok()) return daemon;
  const absl::Status ended = crumb::server::ConfirmTakeover(*std::move(takeover), kEndWait);
  if (!ended.ok()) crumb::LogWarning("the crumbd before has not ended: {}", ended.ToString());
  return daemon;
}

// Gives everything to the successor that requested it. True: it serves, and this process is to end.
// False: `daemon` serves again, or is an error.
bool HandOver(const Options& options, crumb::UniqueFd successor, DaemonOr& daemon) {
  crumb::LogInfo("handing over to another crumbd");
  absl::StatusOr<HandedOverMemory> taken = (*daemon)->HandOver();
  if (!taken.ok()) crumb::LogWarning("without host memory: {}", taken.status().ToString());
  auto memory = std::make_unique<HandedOverMemory>();
  if (taken.ok()) *memory = *std::move(taken);
  daemon->reset();
  const auto pid = crumb::server::HandMemoryOver(successor.get(), *memory, kSuccessorWait);
  if (pid.ok()) {
    if (*pid > 0) NotifyServiceManager("MAINPID=" + std::to_string(*pid));
    crumb::LogInfo("the other crumbd serves");
    return true;
  }
  crumb::LogWarning("the other crumbd does not serve, going on: {}", pid.status().ToString());
  successor.Reset();
  daemon = StartWith(options, std::move(memory));
  return false;
}

// Serves until SIGTERM or SIGINT, or until a successor does. `signals` are blocked in every thread;
// a second one ends the process at once. `served` is called once.
int Serve(const Options& options, const sigset_t& signals, bool takeover,
          const std::function<void()>& served) {
  DaemonOr daemon = takeover ? StartInPlaceOfAnother(options) : StartWith(options, nullptr);
  if (!daemon.ok()) return Fail(daemon.status());
  NotifyServiceManager("READY=1");
  served();
  while (true) {
    auto listener = TakeoverListener::Start(options, [] { ::kill(::getpid(), kSuccessorSignal); });
    if (!listener.ok()) {
      crumb::LogWarning("no other crumbd can take over from this one: {}",
                        listener.status().ToString());
    }
    const int signal = WaitForEnd(**daemon, options, signals);
    if (signal == kSuccessorSignal) {
      if (!listener.ok()) continue;
      crumb::UniqueFd successor = (*listener)->TakeSuccessor();
      listener->reset();
      if (!successor.valid()) continue;  // the signal came from another process
      if (HandOver(options, std::move(successor), daemon)) return kExitOk;
      if (!daemon.ok()) return Fail(daemon.status());
      continue;
    }
    if (listener.ok()) listener->reset();
    crumb::LogInfo("signal {}: stopping, a second one ends at once", signal);
    NotifyServiceManager("STOPPING=1");
    ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    const absl::Status stopped = (*daemon)->Stop();
    return stopped.ok() ? kExitOk : Fail(stopped);
  }
}

// Goes on in a child without a terminal. The parent ends with status 0 once the child has written a
// byte to the descriptor that is returned, with 1 when it ends before. Call before any thread is
// started.
crumb::UniqueFd Detach() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return {};
  crumb::UniqueFd read_end(ends[0]);
  crumb::UniqueFd write_end(ends[1]);
  const pid_t child = ::fork();
  if (child < 0) return {};
  if (child == 0) {
    ::setsid();
    return write_end;
  }
  write_end.Reset();
  char byte = 0;
  ssize_t size;
  while ((size = ::read(read_end.get(), &byte, 1)) < 0 && errno == EINTR) {
  }
  std::_Exit(size == 1 ? kExitOk : kExitFailed);
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
  bool takeover = false;
  bool detach = false;
  app.add_flag("--takeover", takeover,
               "Take over from the crumbd that runs with these sockets: its host memory stays. It "
               "ends when this one serves, and goes on when this one cannot. Refused by a crumbd "
               "of another image version or SSD folder. Starts empty when none runs");
  app.add_flag("--detach", detach, "Go on in the background, and return when that process serves");
  app.add_flag("--check", check, "Check configuration, sockets, ports and memory, then exit");
  app.add_flag("--check-config", check_config, "Check the configuration alone, then exit");
  app.add_flag("--print-config", print, "Print every setting with its meaning, then exit");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::fprintf(stderr, "crumbd: %s (see crumbd --help)\n", error.what());
    return kExitUsage;
  }

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
  crumb::UniqueFd parent;
  if (detach) {
    parent = Detach();
    if (!parent.valid()) return Fail(absl::InternalError("--detach: no process can be made"));
  }
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::sigaddset(&signals, SIGINT);
  ::sigaddset(&signals, SIGHUP);
  ::sigaddset(&signals, kSuccessorSignal);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a file at the process's limit is a full disk, not the end
  return Serve(options, signals, takeover, [&] {
    if (!parent.valid()) return;
    [[maybe_unused]] const ssize_t written = ::write(parent.get(), "s", 1);
    parent.Reset();
  });
}
