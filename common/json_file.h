// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

// Typed reads of JSON files. Every error is kInvalidArgument (kNotFound when
// the file is absent) and names the file and the field; `where` is that file's path.
namespace crumb {

// The whole file; kInvalidArgument when it is larger than `max_bytes`.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes);

// Parses `text`, whose top level must be an object, and which nests at most 128 deep.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& where);
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path);

// Whether `object` has a `key` whose value is not null.
bool HasField(const nlohmann::json& object, const std::string& key);

// The integer `key` within [min, max].
absl::StatusOr<int64_t> IntField(const nlohmann::json& object, const std::string& key, int64_t min,
                                 int64_t max, const std::string& where);
// The finite number `key`, which must be above zero.
absl::StatusOr<double> PositiveField(const nlohmann::json& object, const std::string& key,
                                     const std::string& where);
absl::StatusOr<std::string> StringField(const nlohmann::json& object, const std::string& key,
                                        const std::string& where);
// The boolean `key`, or `fallback` when it is absent or null.
absl::StatusOr<bool> BoolField(const nlohmann::json& object, const std::string& key, bool fallback,
                               const std::string& where);
// The object or array `key`.
absl::StatusOr<const nlohmann::json*> ObjectField(const nlohmann::json& object,
                                                  const std::string& key, const std::string& where);
absl::StatusOr<const nlohmann::json*> ArrayField(const nlohmann::json& object,
                                                 const std::string& key, const std::string& where);

}  // namespace crumb
