// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/keyspace.h"

namespace crumb {

absl::Status KeyspaceDescription::Set(const std::string& name, const std::string& value) {
  if (name.empty() || name.find_first_of("=\n\r") != std::string::npos) {
    return absl::InvalidArgumentError("keyspace field name '" + name +
                                      "' is empty or holds '=' or a line break");
  }
  if (value.find_first_of("\n\r") != std::string::npos) {
    return absl::InvalidArgumentError("value of keyspace field '" + name + "' holds a line break");
  }
  if (!fields_.emplace(name, value).second) {
    return absl::InvalidArgumentError("keyspace field '" + name + "' is set twice");
  }
  return absl::OkStatus();
}

std::string KeyspaceDescription::Canonical() const {
  std::string text;
  for (const auto& [name, value] : fields_) text += name + "=" + value + "\n";
  return text;
}

KeyspaceId KeyspaceDescription::Id() const { return KeyspaceId{Sha256(Canonical())}; }

}  // namespace crumb
