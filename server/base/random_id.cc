// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/base/random_id.h"

#include <sys/random.h>

#include <cerrno>

#include "common/errno_status.h"

namespace crumb::server {

absl::StatusOr<RandomId> RandomId::Make() {
  RandomId id;
  // Requests of up to 256 bytes are never cut short once the generator is up.
  while (::getrandom(id.bytes.data(), id.bytes.size(), 0) !=
         static_cast<ssize_t>(id.bytes.size())) {
    if (errno != EINTR) return ErrnoStatus(errno, "getrandom");
  }
  return id;
}

absl::StatusOr<RandomId> RandomId::FromBytes(std::string_view bytes) {
  RandomId id;
  if (bytes.size() != id.bytes.size()) {
    return absl::InvalidArgumentError("an engine or session id has 16 bytes, got " +
                                      std::to_string(bytes.size()));
  }
  std::memcpy(id.bytes.data(), bytes.data(), bytes.size());
  return id;
}

bool RandomId::Matches(const RandomId& other) const {
  unsigned difference = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    difference |= static_cast<unsigned>(bytes[i]) ^ other.bytes[i];
  }
  return difference == 0;
}

}  // namespace crumb::server
