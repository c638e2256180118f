// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "fmt/format.h"

namespace crumb::tools {
namespace {

// Characters between the brackets of the bar.
constexpr int kWidth = 30;
// The shortest time between two drawings of the bar, and between two lines of a log.
constexpr Duration kTerminalPeriod = std::chrono::milliseconds(200);
constexpr Duration kLogPeriod = std::chrono::seconds(30);

// "1:02:03", "2:03".
std::string TimeText(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole >= 3600) {
    return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  }
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

}  // namespace

ProgressBar::Style ProgressBar::StyleFor(int fd) {
  return ::isatty(fd) == 1 ? Style::kTerminal : Style::kLog;
}

ProgressBar::ProgressBar(std::string label, std::ostream& out, Style style, const Clock& clock)
    : label_(std::move(label)),
      out_(out),
      style_(style),
      clock_(clock),
      begin_(clock.Now()),
      drawn_(style == Style::kTerminal ? begin_ - kTerminalPeriod : begin_) {}

void ProgressBar::Show(double done) {
  MutexLock lock(&mutex_);
  ShowLocked(done);
}

void ProgressBar::Add(double part) {
  MutexLock lock(&mutex_);
  ShowLocked(done_ + part);
}

void ProgressBar::ShowLocked(double done) {
  // Sums of parts end a rounding error below 1.
  done_ = done > 1.0 - 1e-9 ? 1.0 : std::max(done, 0.0);
  const bool end = done_ >= 1.0;
  const TimePoint now = clock_.Now();
  const Duration period = style_ == Style::kTerminal ? kTerminalPeriod : kLogPeriod;
  if (style_ == Style::kQuiet || ended_ || (!end && now - drawn_ < period)) return;
  drawn_ = now;
  ended_ = end;
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  std::string when;
  if (end) {
    when = TimeText(seconds);
  } else if (done_ > 0) {
    when = TimeText(seconds / done_ * (1 - done_)) + " left";
  }
  if (style_ == Style::kLog) {
    out_ << fmt::format("{}: {:.0f} %, {}\n", label_, 100 * done_, when) << std::flush;
    return;
  }
  const int filled = static_cast<int>(kWidth * done_);
  out_ << fmt::format("\r{} [{:#<{}}{:.<{}}] {:3.0f} % {:<14}", label_, "", filled, "",
                      kWidth - filled, 100 * done_, when);
  begun_ = true;
  if (end) out_ << "\n";
  out_.flush();
}

void ProgressBar::End() {
  MutexLock lock(&mutex_);
  if (begun_ && !ended_) out_ << std::endl;
  ended_ = true;
}

}  // namespace crumb::tools
