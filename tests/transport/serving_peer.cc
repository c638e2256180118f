// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A peer in a process of its own, which tests stop and kill. It serves pages 0 to 7 of 256 tiles of
// 16 KiB, prints its address, and ends with its parent process. With an argument, tiles are
// transferred by rendezvous.

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>

#include "tests/transport/sample_source.h"
#include "transport/ucx_transport.h"

int main(int argc, char**) {
  using namespace crumb::transport;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  TransportOptions options;
  options.listen = "127.0.0.1:0";
  if (argc > 1) options.frame_bytes.value = 1 << 20;
  SampleSource source;
  for (int page = 0; page < 8; ++page) source.Add(page, {{{0, 32}, {0, 8}}}, 16 << 10);
  const auto transport = OpenUcxTransport(options, &source);
  if (!transport.ok()) return 1;
  std::printf("%s\n", (*transport)->address().c_str());
  std::fflush(stdout);
  for (;;) ::pause();
}
