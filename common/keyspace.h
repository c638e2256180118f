// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/page_key.h"

namespace crumb {

// Everything two pages must share to be interchangeable, as name=value pairs:
// docs/formats/keyspace.md lists the names. Copyable.
class KeyspaceDescription {
 public:
  // kInvalidArgument: an empty name, a '=' or line break in a name, a line break in a value, or a
  // name that is set already.
  absl::Status Set(const std::string& name, const std::string& value);

  // One `name=value` line per pair, sorted by name, each ended by a line feed.
  std::string Canonical() const;

  // SHA-256 of Canonical().
  KeyspaceId Id() const;

  const std::map<std::string, std::string>& fields() const { return fields_; }

 private:
  std::map<std::string, std::string> fields_;
};

}  // namespace crumb
