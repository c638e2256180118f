// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/progress_bar.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "fmt/format.h"

namespace crumb::tools {
namespace {

constexpr int kWidth = 30;
constexpr Duration kRedraw = std::chrono::milliseconds(200);

// "1:02:03", "2:03".
std::string TimeText(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole >= 3600) {
    return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  }
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

}  // namespace

ProgressBar::ProgressBar(std::string label, std::ostream& out, const Clock& clock)
    : label_(std::move(label)),
      out_(out),
      clock_(clock),
      begin_(clock.Now()),
      drawn_(begin_ - kRedraw) {}

void ProgressBar::Show(double done) {
  done = std::clamp(done, 0.0, 1.0);
  const bool end = done >= 1.0;
  const TimePoint now = clock_.Now();
  if (ended_ || (!end && now - drawn_ < kRedraw)) return;
  drawn_ = now;
  ended_ = end;
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  const int filled = static_cast<int>(kWidth * done);
  std::string when = "";
  if (end) {
    when = TimeText(seconds);
  } else if (done > 0) {
    when = TimeText(seconds / done * (1 - done)) + " left";
  }
  out_ << fmt::format("\r{} [{:#<{}}{:.<{}}] {:3.0f} % {:<14}", label_, "", filled, "",
                      kWidth - filled, 100 * done, when);
  begun_ = true;
  if (end) out_ << "\n";
  out_.flush();
}

void ProgressBar::End() {
  if (begun_ && !ended_) out_ << std::endl;
  ended_ = true;
}

}  // namespace crumb::tools
