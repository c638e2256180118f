// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/node_records.h"

#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>

#include "common/atomic_file.h"
#include "common/errno_status.h"
#include "common/hex.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "server/base/random_id.h"

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

absl::StatusOr<uint64_t> RandomEpoch() {
  while (true) {
    CRUMB_ASSIGN_OR_RETURN(const RandomId id, RandomId::Make());
    if (id.slot() != 0) return id.slot();
  }
}

// Two numbers in a line: the current epoch, and the one before.
std::optional<storage::DeletionEpochs> ReadEpochs(const std::string& path) {
  std::ifstream file(path);
  storage::DeletionEpochs epochs;
  if (!(file >> epochs.current >> epochs.previous)) return std::nullopt;
  if (epochs.current == 0 || epochs.previous == 0) return std::nullopt;
  return epochs;
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

absl::StatusOr<storage::DeletionEpochs> NextEpochs(const std::string& path, bool takes_over) {
  const std::optional<storage::DeletionEpochs> before = ReadEpochs(path);
  if (takes_over && before) return *before;
  storage::DeletionEpochs next;
  CRUMB_ASSIGN_OR_RETURN(next.current, RandomEpoch());
  if (before) {
    next.previous = before->current;
  } else {
    CRUMB_ASSIGN_OR_RETURN(next.previous, RandomEpoch());
  }
  return next;
}

absl::Status WriteEpochs(const std::string& path, const storage::DeletionEpochs& epochs) {
  absl::Status written = WriteAtomically(
      path, [&](std::ostream& file) { file << epochs.current << ' ' << epochs.previous << '\n'; });
  if (written.ok()) return written;
  LogWarning("after a crash, pages of device pools are not found again: {}",
             std::string(written.message()));
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return ErrnoStatus(errno, "removing " + path);
}

}  // namespace crumb::server
