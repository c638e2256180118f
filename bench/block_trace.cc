// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/block_trace.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace crumb::bench {
namespace {

// Nesting of the JSON values that are skipped, at most.
constexpr size_t kDepthMax = 32;

// Scans the JSON of one line.
class LineScanner {
 public:
  explicit LineScanner(std::string_view line) : rest_(line) {}

  bool AtEnd() {
    SkipSpace();
    return rest_.empty();
  }

  bool Consume(char c) {
    SkipSpace();
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  absl::Status Expect(char c) {
    if (Consume(c)) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("expected '", std::string(1, c), "', found ", Found()));
  }

  // Reads a string without its quotes; escapes are not decoded.
  absl::StatusOr<std::string_view> String() {
    CRUMB_RETURN_IF_ERROR(Expect('"'));
    for (size_t i = 0; i < rest_.size(); ++i) {
      if (rest_[i] == '\\') {
        ++i;
      } else if (rest_[i] == '"') {
        const std::string_view text = rest_.substr(0, i);
        rest_.remove_prefix(i + 1);
        return text;
      }
    }
    return absl::InvalidArgumentError("a string does not end");
  }

  absl::StatusOr<uint64_t> Unsigned() {
    SkipSpace();
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    const size_t length = static_cast<size_t>(end - rest_.data());
    const bool goes_on = length < rest_.size() &&
                         std::string_view(".eE").find(rest_[length]) != std::string_view::npos;
    if (error != std::errc() || goes_on) {
      return absl::InvalidArgumentError(
          absl::StrCat("expected a non-negative integer, found ", Found()));
    }
    rest_.remove_prefix(length);
    return value;
  }

  absl::Status SkipValue(size_t depth = 0) {
    if (depth > kDepthMax) return absl::InvalidArgumentError("values are nested too deeply");
    SkipSpace();
    if (!rest_.empty() && rest_.front() == '"') return String().status();
    if (Consume('[')) return SkipMembers(']', depth);
    if (Consume('{')) return SkipMembers('}', depth);
    const size_t length = std::min(rest_.find_first_of(",]} \t\r\n"), rest_.size());
    if (length == 0)
      return absl::InvalidArgumentError(absl::StrCat("expected a value, found ", Found()));
    rest_.remove_prefix(length);
    return absl::OkStatus();
  }

 private:
  absl::Status SkipMembers(char close, size_t depth) {
    if (Consume(close)) return absl::OkStatus();
    do {
      if (close == '}') {
        CRUMB_RETURN_IF_ERROR(String().status());
        CRUMB_RETURN_IF_ERROR(Expect(':'));
      }
      CRUMB_RETURN_IF_ERROR(SkipValue(depth + 1));
    } while (Consume(','));
    return Expect(close);
  }

  void SkipSpace() {
    const size_t n = std::min(rest_.find_first_not_of(" \t\r\n"), rest_.size());
    rest_.remove_prefix(n);
  }

  std::string Found() const {
    if (rest_.empty()) return "the end of the line";
    return absl::StrCat("'", std::string(rest_.substr(0, 16)), "'");
  }

  std::string_view rest_;
};

absl::StatusOr<std::vector<uint64_t>> ParseIds(LineScanner& scanner) {
  std::vector<uint64_t> ids;
  CRUMB_RETURN_IF_ERROR(scanner.Expect('['));
  if (scanner.Consume(']')) return ids;
  do {
    CRUMB_ASSIGN_OR_RETURN(const uint64_t id, scanner.Unsigned());
    ids.push_back(id);
  } while (scanner.Consume(','));
  CRUMB_RETURN_IF_ERROR(scanner.Expect(']'));
  return ids;
}

}  // namespace

void BlockTrace::Add(std::span<const uint64_t> names, std::optional<uint64_t> time_ms) {
  for (const uint64_t name : names) {
    const auto [place, added] = dense_.try_emplace(name, static_cast<uint32_t>(dense_.size()));
    ids_.push_back(place->second);
  }
  ends_.push_back(ids_.size());
  const double next = seconds_.empty() ? 0 : seconds_.back() + kIntervalSeconds;
  seconds_.push_back(time_ms ? static_cast<double>(*time_ms) / 1000 : next);
}

std::span<const uint32_t> BlockTrace::request(size_t index) const {
  const size_t begin = index == 0 ? 0 : ends_[index - 1];
  return std::span(ids_).subspan(begin, ends_[index] - begin);
}

absl::StatusOr<std::vector<uint64_t>> ParseTraceLine(std::string_view line,
                                                     std::optional<uint64_t>* time_ms) {
  LineScanner scanner(line);
  std::optional<std::vector<uint64_t>> ids;
  CRUMB_RETURN_IF_ERROR(scanner.Expect('{'));
  if (!scanner.Consume('}')) {
    do {
      CRUMB_ASSIGN_OR_RETURN(const std::string_view key, scanner.String());
      CRUMB_RETURN_IF_ERROR(scanner.Expect(':'));
      if (key == "hash_ids") {
        if (ids) return absl::InvalidArgumentError("\"hash_ids\" appears twice");
        CRUMB_ASSIGN_OR_RETURN(ids, ParseIds(scanner));
      } else if (key == "timestamp" && time_ms != nullptr) {
        CRUMB_ASSIGN_OR_RETURN(*time_ms, scanner.Unsigned());
      } else {
        CRUMB_RETURN_IF_ERROR(scanner.SkipValue());
      }
    } while (scanner.Consume(','));
    CRUMB_RETURN_IF_ERROR(scanner.Expect('}'));
  }
  if (!scanner.AtEnd()) return absl::InvalidArgumentError("text follows the object");
  if (!ids) return absl::InvalidArgumentError("there is no \"hash_ids\"");
  return *std::move(ids);
}

absl::StatusOr<BlockTrace> ReadTrace(std::istream& in, std::string_view name) {
  BlockTrace trace;
  std::string line;
  for (size_t number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    std::optional<uint64_t> time_ms;
    absl::StatusOr<std::vector<uint64_t>> ids = ParseTraceLine(line, &time_ms);
    if (!ids.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(std::string(name), " line ", number, ": ", ids.status().message()));
    }
    trace.Add(*ids, time_ms);
  }
  if (in.bad()) return absl::UnavailableError(absl::StrCat("cannot read ", std::string(name)));
  if (trace.blocks() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(std::string(name), " has no blocks"));
  }
  return trace;
}

absl::StatusOr<BlockTrace> ReadTraceFile(const std::string& path) {
  std::ifstream in(path);
  if (!in) return absl::NotFoundError(absl::StrCat("cannot open trace ", path));
  return ReadTrace(in, path);
}

}  // namespace crumb::bench
