// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "tests/histories/history.h"
#include "tests/histories/world.h"

namespace crumb::histories {

struct Broken {
  std::string rule;
  std::string what;
};

struct Outcome {
  std::optional<Broken> broken;
  World::Counts counts;  // valid if the history broke no rule
};

// Runs a history in a process of its own, so that a crash or a hang is an outcome as others are,
// and so that every run begins with the same memory.
Outcome RunHistory(const History& history, const std::string& tenants_file, bool trace);

// A history that breaks the same rule with fewer steps: takes out parts that are not needed, from
// halves down to single steps, until none can go or `runs_max` histories were run. A candidate is
// run with a few orders of fibers, because without a step the old order means something else.
History Shrink(const History& history, const Broken& broken, const std::string& tenants_file,
               int runs_max);

}  // namespace crumb::histories
