// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "crumb/client.h"

namespace crumb::fault {

// A client of the crumbd whose sockets lie in `socket_dir`, under a name for its log.
absl::StatusOr<std::unique_ptr<client::Client>> Connect(const std::string& socket_dir,
                                                        const std::string& name);

// Pages whose every byte follows from their number, so that a reader knows the bytes it must find.
class KnownPages {
 public:
  // Opens the keyspace on `client`, which is borrowed.
  static absl::StatusOr<KnownPages> Open(client::Client& client);

  PageKey Key(uint64_t number) const;
  // Tiles and header, as they lie in a slot.
  std::vector<std::byte> Fragment(uint64_t number) const;
  size_t tiles_bytes() const;
  size_t fragment_bytes() const;

  // Publishes pages [first, first + count) through staging memory. The outcomes of those that got
  // room; kResourceExhausted when none did.
  absl::StatusOr<std::vector<client::CommitOutcome>> Publish(client::Client& client, uint64_t first,
                                                             int count) const;

  // True: leased and every byte is right; false: a miss. kDataLoss: a wrong byte was served.
  absl::StatusOr<bool> ReadBack(client::Client& client, uint64_t number, Duration timeout) const;

  const client::KeyspaceInfo& keyspace() const { return keyspace_; }

 private:
  client::KeyspaceInfo keyspace_;
};

}  // namespace crumb::fault
