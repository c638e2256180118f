// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/json_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errno_status.h"
#include "common/status_macros.h"
#include "common/unique_fd.h"

namespace crumb {

namespace {

// Published tokenizer files reach some 35 MB; a larger JSON file is not one of a model.
constexpr int64_t kJsonBytesMax = int64_t{256} << 20;

// Bound on nested arrays and objects, several times that of published files. The JSON library
// prints values by recursion, so that a file of a million brackets would exhaust the stack.
constexpr int kJsonDepthMax = 128;

// Whether brackets outside of strings nest deeper than kJsonDepthMax.
bool NestsTooDeep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if ((c == '[' || c == '{') && ++depth > kJsonDepthMax) return true;
    if (c == ']' || c == '}') --depth;
  }
  return false;
}

absl::Status WrongType(const std::string& key, const char* wanted, const std::string& where) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": field \"", key, "\" must be ", wanted));
}

absl::StatusOr<const nlohmann::json*> Field(const nlohmann::json& object, const std::string& key,
                                            const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": field \"", key, "\" is missing"));
  }
  return &*it;
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "opening " + path);
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "reading " + path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  if (info.st_size > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", info.st_size, " bytes, at most ", max_bytes, " are read"));
  }
  std::string text(static_cast<size_t>(info.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(fd.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "reading " + path);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  text.resize(done);
  return text;
}

absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& where) {
  nlohmann::json value = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) return absl::InvalidArgumentError(where + ": not valid JSON");
  if (NestsTooDeep(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": arrays and objects nest deeper than ", kJsonDepthMax));
  }
  if (!value.is_object()) return absl::InvalidArgumentError(where + ": not a JSON object");
  return value;
}

absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path) {
  CRUMB_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kJsonBytesMax));
  return ParseJsonObject(text, path);
}

bool HasField(const nlohmann::json& object, const std::string& key) {
  const auto it = object.find(key);
  return it != object.end() && !it->is_null();
}

absl::StatusOr<int64_t> IntField(const nlohmann::json& object, const std::string& key, int64_t min,
                                 int64_t max, const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* field, Field(object, key, where));
  const bool too_big =
      field->is_number_unsigned() && field->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  if (!field->is_number_integer() || too_big || field->get<int64_t>() < min ||
      field->get<int64_t>() > max) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": field \"", key,
                                                   "\" must be an integer from ", min, " to ", max,
                                                   ", it is ", field->dump()));
  }
  return field->get<int64_t>();
}

absl::StatusOr<double> PositiveField(const nlohmann::json& object, const std::string& key,
                                     const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* field, Field(object, key, where));
  if (!field->is_number() || !std::isfinite(field->get<double>()) || field->get<double>() <= 0) {
    return WrongType(key, "a number above zero", where);
  }
  return field->get<double>();
}

absl::StatusOr<std::string> StringField(const nlohmann::json& object, const std::string& key,
                                        const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* field, Field(object, key, where));
  if (!field->is_string()) return WrongType(key, "a string", where);
  return field->get<std::string>();
}

absl::StatusOr<bool> BoolField(const nlohmann::json& object, const std::string& key, bool fallback,
                               const std::string& where) {
  if (!HasField(object, key)) return fallback;
  const nlohmann::json& field = object[key];
  if (!field.is_boolean()) return WrongType(key, "true or false", where);
  return field.get<bool>();
}

absl::StatusOr<const nlohmann::json*> ObjectField(const nlohmann::json& object,
                                                  const std::string& key,
                                                  const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* field, Field(object, key, where));
  if (!field->is_object()) return WrongType(key, "an object", where);
  return field;
}

absl::StatusOr<const nlohmann::json*> ArrayField(const nlohmann::json& object,
                                                 const std::string& key, const std::string& where) {
  CRUMB_ASSIGN_OR_RETURN(const nlohmann::json* field, Field(object, key, where));
  if (!field->is_array()) return WrongType(key, "an array", where);
  return field;
}

}  // namespace crumb
