// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <vector>

#include "common/status_macros.h"
#include "fmt/format.h"
#include "yaml-cpp/yaml.h"

namespace crumb {
namespace {

// Letters to add, drop, change or swap with their neighbour to make `b` of `a`.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> steps(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      size_t& here = steps[i][j];
      if (i == 0 || j == 0) {
        here = i + j;
        continue;
      }
      const size_t change = a[i - 1] == b[j - 1] ? 0 : 1;
      here = std::min({steps[i - 1][j] + 1, steps[i][j - 1] + 1, steps[i - 1][j - 1] + change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        here = std::min(here, steps[i - 2][j - 2] + 1);
      }
    }
  }
  return steps.back().back();
}

// The known key most like `key`, or an empty string when none is close.
std::string NearestKey(const std::set<std::string>& known, const std::string& key) {
  constexpr size_t kStepsMax = 2;
  constexpr size_t kLengthMax = 64;  // longer words are no typos
  std::string nearest;
  size_t fewest = kStepsMax + 1;
  for (const std::string& candidate : known) {
    if (key.size() > kLengthMax) break;
    const size_t steps = EditDistance(key, candidate);
    if (steps < fewest && steps * 2 < candidate.size()) {
      fewest = steps;
      nearest = candidate;
    }
  }
  return nearest;
}

// Sets `value` to the number in `text`, which must have no other characters.
template <typename T>
bool ParseNumber(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// A scalar that a YAML reader takes for this very text.
std::string Quoted(const std::string& text) {
  const bool plain = !text.empty() && text != "null" && text != "Null" && text != "NULL" &&
                     text.front() != '-' &&
                     text.find_first_not_of(
                         "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                         "0123456789_./-") == std::string::npos;
  if (plain) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      quoted += fmt::format("\\x{:02x}", byte);
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

// Takes values from a parsed document; keeps the first error.
class Reader : public ConfigVisitor {
 public:
  Reader(const std::string& source, const YAML::Node& root) : source_(source), node_(root) {}

  absl::Status Read(const std::function<void(ConfigVisitor&)>& visit) {
    ReadMapping([&] { visit(*this); });
    return status_;
  }

  void Field(const char* name, std::string& value, const char*) override {
    if (const auto text = Scalar(name, "a string")) value = *text;
  }
  void Field(const char* name, bool& value, const char*) override {
    const auto text = Scalar(name, "true or false");
    if (!text) return;
    if (*text != "true" && *text != "false") return Wrong(name, "true or false", *text);
    value = *text == "true";
  }
  void Field(const char* name, int64_t& value, const char*) override {
    const auto text = Scalar(name, "a whole number");
    if (text && !ParseNumber(*text, value)) Wrong(name, "a whole number", *text);
  }
  void Field(const char* name, double& value, const char*) override {
    const auto text = Scalar(name, "a number");
    if (!text) return;
    double number = 0;
    if (!ParseNumber(*text, number) || !std::isfinite(number)) {
      return Wrong(name, "a number", *text);
    }
    value = number;
  }
  void Field(const char* name, ByteSize& value, const char*) override {
    Parsed(name, "bytes such as 64GiB, 512MiB, 64KiB", value, ParseByteSize);
  }
  void Field(const char* name, Duration& value, const char*) override {
    Parsed(name, "a duration such as 250us, 5ms, 2s, 10m, 1h", value, ParseDuration);
  }
  void Field(const char* name, std::vector<std::string>& value, const char*) override {
    const YAML::Node found = Find(name);
    if (!found.IsDefined()) return;
    if (!found.IsSequence()) return Fail(found, name, "must be a list of strings");
    std::vector<std::string> texts;
    for (const YAML::Node& element : found) {
      if (!element.IsScalar()) return Fail(element, name, "must hold strings only");
      texts.push_back(element.Scalar());
    }
    value = std::move(texts);
  }

  void Section(const char* name, const std::function<void()>& fields) override {
    const YAML::Node found = Find(name);
    if (!found.IsDefined() || found.IsNull()) return;
    const YAML::Node outer = node_;
    const std::string outer_path = path_;
    const std::set<std::string> outer_known = std::move(known_);
    node_.reset(found);
    path_ += std::string(name) + ".";
    ReadMapping(fields);
    node_.reset(outer);
    path_ = outer_path;
    known_ = outer_known;
  }

 private:
  void ReadMapping(const std::function<void()>& fields) {
    known_.clear();
    if (node_.IsNull()) return;
    if (!node_.IsMap()) {
      const std::string name = path_.empty() ? "" : path_.substr(0, path_.size() - 1);
      return FailAt(node_,
                    name.empty() ? "the file must be a mapping" : name + " must be a mapping");
    }
    std::set<std::string> present;
    for (const auto& entry : node_) {
      if (!entry.first.IsScalar()) return FailAt(entry.first, "keys must be plain words");
      if (!present.insert(entry.first.Scalar()).second) {
        return FailAt(entry.first, "key " + path_ + entry.first.Scalar() + " is repeated");
      }
    }
    fields();
    for (const auto& entry : node_) {
      if (!known_.contains(entry.first.Scalar())) {
        const std::string near = NearestKey(known_, entry.first.Scalar());
        return FailAt(entry.first, "unknown key " + path_ + entry.first.Scalar() +
                                       (near.empty() ? "" : "; did you mean " + near + "?"));
      }
    }
  }

  YAML::Node Find(const char* name) {
    known_.insert(name);
    for (const auto& entry : node_) {
      if (entry.first.Scalar() == name) return entry.second;
    }
    return YAML::Node(YAML::NodeType::Undefined);
  }

  std::optional<std::string> Scalar(const char* name, const char* wanted) {
    const YAML::Node found = Find(name);
    if (!found.IsDefined()) return std::nullopt;
    if (!found.IsScalar()) {
      Fail(found, name, std::string("must be ") + wanted);
      return std::nullopt;
    }
    return found.Scalar();
  }

  template <typename T>
  void Parsed(const char* name, const char* wanted, T& value,
              absl::StatusOr<T> (*parse)(const std::string&)) {
    const auto text = Scalar(name, wanted);
    if (!text) return;
    const absl::StatusOr<T> parsed = parse(*text);
    if (!parsed.ok()) return Wrong(name, wanted, *text);
    value = *parsed;
  }

  void Wrong(const char* name, const std::string& wanted, const std::string& text) {
    Fail(Find(name), name, "must be " + wanted + ", not '" + text + "'");
  }
  void Fail(const YAML::Node& where, const char* name, const std::string& what) {
    FailAt(where, path_ + name + " " + what);
  }
  void FailAt(const YAML::Node& where, const std::string& what) {
    if (!status_.ok()) return;
    status_ =
        absl::InvalidArgumentError(fmt::format("{}:{}: {}", source_, where.Mark().line + 1, what));
  }

  const std::string source_;
  YAML::Node node_;  // the mapping being read
  std::string path_;
  std::set<std::string> known_;  // names looked up in this mapping
  absl::Status status_;
};

class Printer : public ConfigVisitor {
 public:
  explicit Printer(bool comments) : comments_(comments) {}

  void Field(const char* name, std::string& value, const char* meaning) override {
    Line(name, Quoted(value), meaning);
  }
  void Field(const char* name, bool& value, const char* meaning) override {
    Line(name, value ? "true" : "false", meaning);
  }
  void Field(const char* name, int64_t& value, const char* meaning) override {
    Line(name, std::to_string(value), meaning);
  }
  void Field(const char* name, double& value, const char* meaning) override {
    Line(name, fmt::format("{}", value), meaning);
  }
  void Field(const char* name, ByteSize& value, const char* meaning) override {
    Line(name, FormatByteSize(value), meaning);
  }
  void Field(const char* name, Duration& value, const char* meaning) override {
    Line(name, FormatDuration(value), meaning);
  }
  void Field(const char* name, std::vector<std::string>& value, const char* meaning) override {
    std::string list;
    for (const std::string& element : value) list += (list.empty() ? "" : ", ") + Quoted(element);
    Line(name, "[" + list + "]", meaning);
  }
  void Section(const char* name, const std::function<void()>& fields) override {
    text_ += fmt::format("{:{}}{}:\n", "", indent_, name);
    indent_ += 2;
    fields();
    indent_ -= 2;
  }

  std::string Take() { return std::move(text_); }

 private:
  void Line(const char* name, const std::string& value, const char* meaning) {
    if (comments_) text_ += fmt::format("{:{}}# {}\n", "", indent_, meaning);
    text_ += fmt::format("{:{}}{}: {}\n", "", indent_, name, value);
  }

  const bool comments_;
  int indent_ = 0;
  std::string text_;
};

class KeyLister : public ConfigVisitor {
 public:
  void Field(const char* name, std::string&, const char*) override { Add(name); }
  void Field(const char* name, bool&, const char*) override { Add(name); }
  void Field(const char* name, int64_t&, const char*) override { Add(name); }
  void Field(const char* name, double&, const char*) override { Add(name); }
  void Field(const char* name, ByteSize&, const char*) override { Add(name); }
  void Field(const char* name, Duration&, const char*) override { Add(name); }
  void Field(const char* name, std::vector<std::string>&, const char*) override { Add(name); }
  void Section(const char* name, const std::function<void()>& fields) override {
    const std::string outer = prefix_;
    prefix_ += std::string(name) + ".";
    fields();
    prefix_ = outer;
  }

  std::vector<std::string> Take() { return std::move(keys_); }

 private:
  void Add(const char* name) { keys_.push_back(prefix_ + name); }

  std::string prefix_;
  std::vector<std::string> keys_;
};

}  // namespace

absl::Status ReadConfig(const std::string& source, const std::string& text,
                        const std::function<void(ConfigVisitor&)>& visit) {
  try {  // the one way in which yaml-cpp reports
    return Reader(source, YAML::Load(text)).Read(visit);
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(
        fmt::format("{}:{}: not YAML: {}", source, error.mark.line + 1, error.msg));
  }
}

absl::Status ReadConfigFile(const std::string& path,
                            const std::function<void(ConfigVisitor&)>& visit) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return absl::NotFoundError("cannot read configuration file " + path);
  return ReadConfig(path, text.str(), visit);
}

std::string PrintConfig(const std::function<void(ConfigVisitor&)>& visit, bool comments) {
  Printer printer(comments);
  visit(printer);
  return printer.Take();
}

std::vector<std::string> ConfigKeys(const std::function<void(ConfigVisitor&)>& visit) {
  KeyLister lister;
  visit(lister);
  return lister.Take();
}

}  // namespace crumb
