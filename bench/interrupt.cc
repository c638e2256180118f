// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/interrupt.h"

#include <csignal>

namespace crumb::bench {
namespace {

volatile std::sig_atomic_t interrupted = 0;

void Note(int) { interrupted = 1; }

}  // namespace

void CatchInterrupts() {
  std::signal(SIGINT, Note);
  std::signal(SIGTERM, Note);
}

bool Interrupted() { return interrupted != 0; }

}  // namespace crumb::bench
