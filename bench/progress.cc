// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/progress.h"

#include <unistd.h>

#include <iostream>
#include <utility>

#include "fmt/format.h"

namespace crumb::bench {
namespace {

constexpr std::chrono::milliseconds kTerminalPeriod(200);
constexpr std::chrono::seconds kLogPeriod(30);

}  // namespace

Progress::Progress(std::string what, int total, bool quiet)
    : what_(std::move(what)),
      total_(total),
      quiet_(quiet),
      terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (!quiet_ && terminal_) std::cerr << "\r\033[K" << std::flush;
}

void Progress::Add() {
  MutexLock lock(&mutex_);
  ++done_;
  const Clock::time_point now = Clock::now();
  if (quiet_ || (now - said_ < (terminal_ ? kTerminalPeriod : kLogPeriod) && done_ < total_)) {
    return;
  }
  said_ = now;
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  const double left = seconds / done_ * (total_ - done_);
  std::cerr << fmt::format("{}{}: {} of {}, {:.0f} s left{}", terminal_ ? "\r\033[K" : "", what_,
                           done_, total_, left, terminal_ ? "" : "\n")
            << std::flush;
}

}  // namespace crumb::bench
