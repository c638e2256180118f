// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/clock.h"

namespace crumb {

// A number of bytes; written as 1073741824, 1GiB, 512MiB, 64KiB in configuration.
struct ByteSize {
  uint64_t value = 0;
  friend constexpr auto operator<=>(const ByteSize&, const ByteSize&) = default;
};

// Walks the fields of nested option structs: one walk reads a file, another prints one, a third
// checks the documentation. An Options struct offers `void Visit(ConfigVisitor& visitor)` which
// names each field once, with what it means.
class ConfigVisitor {
 public:
  virtual ~ConfigVisitor() = default;

  virtual void Field(const char* name, std::string& value, const char* meaning) = 0;
  virtual void Field(const char* name, bool& value, const char* meaning) = 0;
  virtual void Field(const char* name, int64_t& value, const char* meaning) = 0;
  virtual void Field(const char* name, double& value, const char* meaning) = 0;
  virtual void Field(const char* name, ByteSize& value, const char* meaning) = 0;
  // Written with a unit: 250us, 5ms, 2s, 10m, 1h.
  virtual void Field(const char* name, Duration& value, const char* meaning) = 0;
  virtual void Field(const char* name, std::vector<std::string>& value, const char* meaning) = 0;

  // A nested mapping; `fields` visits what is inside.
  virtual void Section(const char* name, const std::function<void()>& fields) = 0;
};

}  // namespace crumb
