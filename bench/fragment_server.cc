// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-fragment-server BYTES PAGES ADDRESS_FILE [ADDRESS] serves the fragments of plane ucx-tcp of
// `crumb-bench store` from a separate process, over UCX on ADDRESS, by default the loopback
// address. It writes the address at which it listens to ADDRESS_FILE, and ends at SIGTERM or with
// its parent process.

#include <signal.h>
#include <sys/prctl.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "bench/ucx_plane.h"
#include "common/atomic_file.h"
#include "transport/ucx_transport.h"

namespace crumb::bench {
namespace {

int Main(int argc, char** argv) {
  if (argc != 4 && argc != 5) {
    std::cerr << "usage: crumb-fragment-server BYTES PAGES ADDRESS_FILE [ADDRESS]\n";
    return 2;
  }
  const size_t bytes = std::strtoull(argv[1], nullptr, 10);
  const size_t pages = std::strtoull(argv[2], nullptr, 10);
  if (bytes == 0 || pages == 0) {
    std::cerr << "crumb-fragment-server: BYTES and PAGES must be positive\n";
    return 2;
  }
  // SIGTERM is blocked before there are other threads, which inherit this, so that sigwait receives
  // it.
  sigset_t ends;
  ::sigemptyset(&ends);
  ::sigaddset(&ends, SIGTERM);
  ::sigprocmask(SIG_BLOCK, &ends, nullptr);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  FragmentSetSource source(bytes, pages);
  auto transport =
      transport::OpenUcxTransport(UcxPlaneOptions(argc == 5 ? argv[4] : "127.0.0.1"), &source);
  if (!transport.ok()) {
    std::cerr << "crumb-fragment-server: " << std::string(transport.status().message()) << "\n";
    return 1;
  }
  const absl::Status written = WriteAtomically(
      argv[3], [&](std::ostream& file) { file << (*transport)->address() << "\n"; });
  if (!written.ok()) {
    std::cerr << "crumb-fragment-server: " << std::string(written.message()) << "\n";
    return 1;
  }
  int signal = 0;
  return ::sigwait(&ends, &signal) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) { return crumb::bench::Main(argc, argv); }
