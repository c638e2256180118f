// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/config_visitor.h"

// YAML <-> option structs.
namespace crumb {

// Reads `text` into the fields that `visit` names; fields that are not in the text keep their
// value. kInvalidArgument: not YAML, an unknown or repeated key, a value of the wrong kind; the
// message starts with `source` and names line and key.
absl::Status ReadConfig(const std::string& source, const std::string& text,
                        const std::function<void(ConfigVisitor&)>& visit);

// The same from a file.
absl::Status ReadConfigFile(const std::string& path,
                            const std::function<void(ConfigVisitor&)>& visit);

// YAML with every field's present value, and its meaning as a comment when `comments`.
std::string PrintConfig(const std::function<void(ConfigVisitor&)>& visit, bool comments);

// Dotted names of every field, in order: `store.host.bytes_max`.
std::vector<std::string> ConfigKeys(const std::function<void(ConfigVisitor&)>& visit);

// "64GiB" -> bytes; a bare number is bytes. kInvalidArgument otherwise.
absl::StatusOr<ByteSize> ParseByteSize(const std::string& text);
std::string FormatByteSize(ByteSize size);

// "5ms" -> duration; a unit is required but for 0.
absl::StatusOr<Duration> ParseDuration(const std::string& text);
std::string FormatDuration(Duration duration);

}  // namespace crumb
