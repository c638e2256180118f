// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"

namespace crumb {

// A number of bytes; written as 1073741824, 1GiB, 512MiB, 64KiB in configuration.
struct ByteSize {
  uint64_t value = 0;
  friend constexpr auto operator<=>(const ByteSize&, const ByteSize&) = default;
};

// The values that a setting accepts, from `least` to `most`, both included.
struct CountBounds {
  int64_t least = 0;
  int64_t most = INT64_MAX;
};
struct ByteBounds {  // in bytes
  uint64_t least = 0;
  uint64_t most = UINT64_MAX;
};
struct DurationBounds {
  Duration least = Duration::zero();
  Duration most = Duration::max();
};
inline constexpr DurationBounds kPositive{.least = Duration(1)};
// The words that a setting accepts.
using Choices = std::initializer_list<const char*>;

// Walks the fields of nested option structs: one walk reads a file, another prints one, others
// check the values or the documentation. An Options struct offers `void Visit(ConfigVisitor&)`, the
// only place that names its fields, their meanings and the values that they accept.
class ConfigVisitor {
 public:
  virtual ~ConfigVisitor() = default;

  virtual void Field(const char* name, std::string& value, const char* meaning) = 0;
  virtual void Field(const char* name, bool& value, const char* meaning) = 0;
  virtual void Field(const char* name, int64_t& value, const char* meaning) = 0;
  virtual void Field(const char* name, double& value, const char* meaning) = 0;
  virtual void Field(const char* name, ByteSize& value, const char* meaning) = 0;
  // The text of a duration has a unit: 250us, 5ms, 2s, 10m, 1h.
  virtual void Field(const char* name, Duration& value, const char* meaning) = 0;
  virtual void Field(const char* name, std::vector<std::string>& value, const char* meaning) = 0;

  // Fields that accept only some values.
  void Field(const char* name, int64_t& value, CountBounds accepted, const char* meaning) {
    Field(name, value, meaning);
    Check(name, value, accepted);
  }
  void Field(const char* name, ByteSize& value, ByteBounds accepted, const char* meaning) {
    Field(name, value, meaning);
    Check(name, value, accepted);
  }
  void Field(const char* name, Duration& value, DurationBounds accepted, const char* meaning) {
    Field(name, value, meaning);
    Check(name, value, accepted);
  }
  void Field(const char* name, std::string& value, Choices accepted, const char* meaning) {
    Field(name, value, meaning);
    Check(name, value, accepted);
  }

  // A nested mapping; `fields` visits its fields.
  virtual void Section(const char* name, const std::function<void()>& fields) = 0;

 protected:
  virtual void Check(const char*, int64_t, const CountBounds&) {}
  virtual void Check(const char*, ByteSize, const ByteBounds&) {}
  virtual void Check(const char*, Duration, const DurationBounds&) {}
  virtual void Check(const char*, const std::string&, const Choices&) {}
};

// Returns kInvalidArgument, naming the setting, its value and the accepted ones, for the first
// field of a walk that has a value which it does not accept. `section` is the dotted name of the
// fields' mapping, or empty.
absl::Status CheckValues(const std::string& section,
                         const std::function<void(ConfigVisitor&)>& visit);

// Checks a walk over the fields of `options`.
template <typename Options>
requires requires(Options& options, ConfigVisitor& visitor) { options.Visit(visitor); }
absl::Status CheckValues(const std::string& section, Options options) {
  return CheckValues(section, [&](ConfigVisitor& visitor) { options.Visit(visitor); });
}

// "64GiB" -> bytes; a bare number is bytes. kInvalidArgument otherwise.
absl::StatusOr<ByteSize> ParseByteSize(const std::string& text);
std::string FormatByteSize(ByteSize size);

// "5ms" -> duration; a unit is required but for 0.
absl::StatusOr<Duration> ParseDuration(const std::string& text);
std::string FormatDuration(Duration duration);

}  // namespace crumb
