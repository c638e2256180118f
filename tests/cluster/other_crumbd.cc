// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A crumbd of another release: it reports that it supports other versions.
//   other_crumbd CONFIG WIRE_MIN WIRE_MAX LAYOUT [FRAMES_MIN FRAMES_MAX]
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "common/config.h"
#include "common/logging.h"
#include "server/daemon/daemon.h"

int main(int argc, char** argv) {
  using crumb::server::Daemon;
  if (argc != 5 && argc != 7) {
    std::fprintf(stderr, "usage: %s CONFIG WIRE_MIN WIRE_MAX LAYOUT [FRAMES_MIN FRAMES_MAX]\n",
                 argv[0]);
    return 2;
  }
  const auto number = [argv](int i) {
    return static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10));
  };
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  crumb::server::Options options;
  const auto failed = [](const absl::Status& status) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  };
  const absl::Status read = crumb::ReadConfigFile(
      argv[1], [&](crumb::ConfigVisitor& visitor) { options.Visit(visitor); });
  if (!read.ok()) return failed(read);
  options.Complete();
  const absl::Status valid = options.Validate();
  if (!valid.ok()) return failed(valid);
  crumb::server::ProtocolVersions versions{
      .wire_min = number(2), .wire_max = number(3), .layout_id = number(4)};
  if (argc == 7) {
    versions.frames = {static_cast<uint16_t>(number(5)), static_cast<uint16_t>(number(6))};
  }
  const auto daemon = Daemon::Start(options, crumb::storage::TieredStore::Open, nullptr, versions);
  if (!daemon.ok()) return failed(daemon.status());
  int signal = 0;
  ::sigwait(&signals, &signal);
  return (*daemon)->Stop().ok() ? 0 : 1;
}
