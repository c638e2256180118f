// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ostream>
#include <string>

#include "common/clock.h"

namespace crumb::tools {

// One line on a terminal: what is done, how much of it, and how long the rest will take at the mean
// pace so far. Drawn again in place, a few times a second at most. Not thread-safe.
class ProgressBar {
 public:
  // Borrows both.
  ProgressBar(std::string label, std::ostream& out, const Clock& clock = Clock::Real());

  // `done` of the work, 0 to 1; 1 ends the line.
  void Show(double done);
  // Ends the line, if one was begun, where the work stopped: what is printed next has its own.
  void End();

 private:
  const std::string label_;
  std::ostream& out_;
  const Clock& clock_;
  const TimePoint begin_;
  TimePoint drawn_;
  bool begun_ = false;
  bool ended_ = false;
};

}  // namespace crumb::tools
