// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/config_visitor.h"

// YAML <-> option structs.
namespace crumb {

// Reads `text` into the fields that `visit` names; fields that are not in the text keep their
// value. kInvalidArgument: not YAML, an unknown or repeated key, a value of the wrong kind; the
// message starts with `source` and names line and key.
absl::Status ReadConfig(const std::string& source, const std::string& text,
                        const std::function<void(ConfigVisitor&)>& visit);

// Reads the file at `path` as ReadConfig does. kNotFound: the file cannot be read.
absl::Status ReadConfigFile(const std::string& path,
                            const std::function<void(ConfigVisitor&)>& visit);

// YAML with every field's present value, and its meaning as a comment when `comments`.
std::string PrintConfig(const std::function<void(ConfigVisitor&)>& visit, bool comments);

// Dotted names of every field, in order: `store.host.bytes_max`.
std::vector<std::string> ConfigKeys(const std::function<void(ConfigVisitor&)>& visit);

}  // namespace crumb
