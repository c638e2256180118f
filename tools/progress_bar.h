// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ostream>
#include <string>

#include "common/clock.h"
#include "common/mutex.h"

namespace crumb::tools {

// Shows how much of a long piece of work is done, and how long the rest will take at the mean pace
// so far. Thread-safe.
class ProgressBar {
 public:
  enum class Style {
    kTerminal,  // one line with a bar, which is drawn again in place every 0.2 s at most
    kLog,       // a line of text every 30 s at most, for files and pipes
    kQuiet,     // nothing
  };
  // kTerminal if the file descriptor is a terminal, otherwise kLog.
  static Style StyleFor(int fd);

  // `out` and `clock` must outlive the bar.
  ProgressBar(std::string label, std::ostream& out, Style style = Style::kTerminal,
              const Clock& clock = Clock::Real());

  // Sets the part of the work that is done, 0 to 1. 1 ends the line, and later calls draw
  // nothing.
  void Show(double done);
  // Adds a part of the work to the part that is done; for work that several threads share.
  void Add(double part);
  // Ends a line that was begun, if the work stopped before its end, so that later output does not
  // continue it.
  void End();

 private:
  // Draws the bar or writes a line if the style's period has passed since the last one, or if
  // `done` is 1.
  void ShowLocked(double done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string label_;
  std::ostream& out_;
  const Style style_;
  const Clock& clock_;
  const TimePoint begin_;
  Mutex mutex_;
  double done_ ABSL_GUARDED_BY(mutex_) = 0;
  TimePoint drawn_ ABSL_GUARDED_BY(mutex_);
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace crumb::tools
