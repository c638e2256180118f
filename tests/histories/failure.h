// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "fmt/format.h"

namespace crumb::histories {

// Ends the history: reports the broken rule and the observation that breaks it, and ends the
// process. `rule` is a short name; the shrinker keeps a smaller history only if it breaks the same
// rule.
[[noreturn]] void FailWith(const std::string& rule, const std::string& what);

template <typename... Args>
[[noreturn]] void Fail(const std::string& rule, fmt::format_string<Args...> format,
                       Args&&... args) {
  FailWith(rule, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace crumb::histories
