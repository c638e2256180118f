// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/node_identity.h"

#include <fstream>
#include <functional>
#include <sstream>

#include "common/hex.h"
#include "common/status_macros.h"
#include "server/session/random_id.h"

namespace crumb::server {
namespace {

constexpr size_t kSecretBytesMin = 16;
constexpr size_t kSecretBytesMax = 4096;

// The record `name`, which `make` makes when it is not there.
absl::StatusOr<std::string> RecordOr(storage::TieredStore& store, const std::string& name,
                                     const std::function<absl::StatusOr<std::string>()>& make) {
  CRUMB_ASSIGN_OR_RETURN(const auto records, store.Records());
  for (const auto& [found, value] : records) {
    if (found == name) return value;
  }
  CRUMB_ASSIGN_OR_RETURN(const std::string value, make());
  CRUMB_RETURN_IF_ERROR(store.PutRecord(name, value));
  return value;
}

// RFC 4122, version 4.
absl::StatusOr<std::string> NewUuid() {
  CRUMB_ASSIGN_OR_RETURN(RandomId id, RandomId::Make());
  id.bytes[6] = static_cast<uint8_t>((id.bytes[6] & 0x0f) | 0x40);
  id.bytes[8] = static_cast<uint8_t>((id.bytes[8] & 0x3f) | 0x80);
  const std::string hex = HexEncode(id.bytes);
  return hex.substr(0, 8) + "-" + hex.substr(8, 4) + "-" + hex.substr(12, 4) + "-" +
         hex.substr(16, 4) + "-" + hex.substr(20);
}

absl::StatusOr<std::string> NewSecret() {
  CRUMB_ASSIGN_OR_RETURN(const RandomId first, RandomId::Make());
  CRUMB_ASSIGN_OR_RETURN(const RandomId second, RandomId::Make());
  return std::string(first.view()) + std::string(second.view());
}

}  // namespace

absl::StatusOr<std::string> NodeId(storage::TieredStore& store) {
  return RecordOr(store, "node-id", NewUuid);
}

absl::StatusOr<std::string> TenantSecret(storage::TieredStore& store,
                                         const std::string& secret_file) {
  if (secret_file.empty()) return RecordOr(store, "tenant-secret", NewSecret);
  std::ifstream file(secret_file, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  if (!file) return absl::NotFoundError("cluster.secret_file: cannot read " + secret_file);
  const std::string secret = content.str();
  if (secret.size() < kSecretBytesMin || secret.size() > kSecretBytesMax) {
    return absl::FailedPreconditionError("cluster.secret_file: " + secret_file + " has " +
                                         std::to_string(secret.size()) +
                                         " bytes, must have from 16 to 4096");
  }
  return secret;
}

}  // namespace crumb::server
