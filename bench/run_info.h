// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "nlohmann/json.hpp"

namespace crumb::bench {

// What a result needs beside its numbers: machine (CPU, cores, memory, kernel), the commit this
// program was built from, the command, the time.
nlohmann::json RunInfo(int argc, const char* const* argv);

}  // namespace crumb::bench
