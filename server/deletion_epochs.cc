// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/deletion_epochs.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <optional>

#include "common/errno_status.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "server/session/random_id.h"

namespace crumb::server {
namespace {

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
  const std::string fresh = path + ".new";
  std::ofstream file(fresh, std::ios::trunc);
  file << epochs.current << ' ' << epochs.previous << '\n';
  file.close();
  if (file && std::rename(fresh.c_str(), path.c_str()) == 0) return absl::OkStatus();
  LogWarning("{} cannot be written: after a crash, pages of device pools are not found again",
             path);
  ::unlink(fresh.c_str());
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return ErrnoStatus(errno, "removing " + path);
}

}  // namespace crumb::server
