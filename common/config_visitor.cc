// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/config_visitor.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <span>
#include <string_view>

namespace crumb {
namespace {

struct Unit {
  const char* name;
  int64_t factor;
};

constexpr Unit kByteUnits[] = {{"TiB", int64_t{1} << 40},
                               {"GiB", int64_t{1} << 30},
                               {"MiB", int64_t{1} << 20},
                               {"KiB", int64_t{1} << 10},
                               {"B", 1}};
constexpr Unit kTimeUnits[] = {
    {"h", 3'600'000'000'000}, {"m", 60'000'000'000}, {"s", 1'000'000'000},
    {"ms", 1'000'000},        {"us", 1'000},         {"ns", 1}};

// Splits "12ms" into number and unit. An empty unit counts as `bare` (0: only for the number 0).
bool ParseWithUnit(std::string_view text, std::span<const Unit> units, int64_t bare,
                   int64_t& value) {
  const size_t digits = text.find_first_not_of("0123456789");
  const std::string_view number = text.substr(0, digits);
  const std::string_view unit = digits == std::string_view::npos ? "" : text.substr(digits);
  int64_t amount = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), amount);
  if (error != std::errc() || end != number.data() + number.size()) return false;
  int64_t factor = amount == 0 && bare == 0 ? 1 : bare;
  if (!unit.empty()) {
    factor = 0;
    for (const Unit& candidate : units) {
      if (unit == candidate.name) factor = candidate.factor;
    }
  }
  return factor != 0 && !__builtin_mul_overflow(amount, factor, &value);
}

std::string FormatWithUnit(int64_t value, std::span<const Unit> units) {
  if (value == 0) return "0";
  for (const Unit& unit : units) {
    if (value % unit.factor == 0) return fmt::format("{}{}", value / unit.factor, unit.name);
  }
  return std::to_string(value);
}

template <typename T>
constexpr T kNoLimit = std::numeric_limits<T>::max();
template <>
constexpr Duration kNoLimit<Duration> = Duration::max();

// Keeps the first complaint.
class ValueChecker : public ConfigVisitor {
 public:
  explicit ValueChecker(const std::string& section) : path_(section) {
    if (!path_.empty()) path_ += ".";
  }

  void Field(const char*, std::string&, const char*) override {}
  void Field(const char*, bool&, const char*) override {}
  void Field(const char*, int64_t&, const char*) override {}
  void Field(const char*, double&, const char*) override {}
  void Field(const char*, ByteSize&, const char*) override {}
  void Field(const char*, Duration&, const char*) override {}
  void Field(const char*, std::vector<std::string>&, const char*) override {}

  void Section(const char* name, const std::function<void()>& fields) override {
    const std::string outer = path_;
    path_ += std::string(name) + ".";
    fields();
    path_ = outer;
  }

  const absl::Status& status() const { return status_; }

 private:
  void Check(const char* name, int64_t value, const CountBounds& accepted) override {
    CheckRange(name, value, accepted.least, accepted.most,
               [](int64_t count) { return std::to_string(count); });
  }
  void Check(const char* name, ByteSize value, const ByteBounds& accepted) override {
    CheckRange(name, value.value, accepted.least, accepted.most,
               [](uint64_t bytes) { return FormatByteSize(ByteSize{bytes}); });
  }
  void Check(const char* name, Duration value, const DurationBounds& accepted) override {
    if (accepted.least == kPositive.least && value < accepted.least) {
      return Refuse(name, FormatDuration(value), "more than 0");
    }
    CheckRange(name, value, accepted.least, accepted.most, FormatDuration);
  }
  void Check(const char* name, const std::string& value, const Choices& accepted) override {
    if (std::find(accepted.begin(), accepted.end(), value) != accepted.end()) return;
    Refuse(name, fmt::format("'{}'", value), fmt::format("one of {}", fmt::join(accepted, ", ")));
  }

  template <typename T, typename Format>
  void CheckRange(const char* name, T value, T least, T most, const Format& format) {
    if (least <= value && value <= most) return;
    Refuse(name, format(value),
           most == kNoLimit<T> ? "at least " + format(least)
                               : fmt::format("from {} to {}", format(least), format(most)));
  }
  void Refuse(const char* name, const std::string& value, const std::string& accepted) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        fmt::format("{}{} is {}, must be {}", path_, name, value, accepted));
  }

  std::string path_;
  absl::Status status_;
};

}  // namespace

absl::Status CheckValues(const std::string& section,
                         const std::function<void(ConfigVisitor&)>& visit) {
  ValueChecker checker(section);
  visit(checker);
  return checker.status();
}

absl::StatusOr<ByteSize> ParseByteSize(const std::string& text) {
  int64_t value = 0;
  if (!ParseWithUnit(text, kByteUnits, 1, value)) {
    return absl::InvalidArgumentError("'" + text + "' is no number of bytes such as 64GiB");
  }
  return ByteSize{static_cast<uint64_t>(value)};
}

std::string FormatByteSize(ByteSize size) {
  if (size.value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return std::to_string(size.value);
  }
  const auto value = static_cast<int64_t>(size.value);
  return value % 1024 == 0 ? FormatWithUnit(value, kByteUnits) : std::to_string(value);
}

absl::StatusOr<Duration> ParseDuration(const std::string& text) {
  int64_t nanoseconds = 0;
  if (!ParseWithUnit(text, kTimeUnits, 0, nanoseconds)) {
    return absl::InvalidArgumentError("'" + text + "' is no duration such as 5ms");
  }
  return std::chrono::duration_cast<Duration>(std::chrono::nanoseconds(nanoseconds));
}

std::string FormatDuration(Duration duration) {
  return FormatWithUnit(std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count(),
                        kTimeUnits);
}

}  // namespace crumb
