// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/ssd/index_format.h"

namespace rocksdb {
class DB;
class Logger;
}  // namespace rocksdb

namespace crumb::storage {

// The SSD tier's durable map of small keys to small values, in RocksDB with tightly bounded files.
// First it is read, then written; not thread-safe: the owner makes one call at a time.
class SsdIndex {
 public:
  // Opens or creates the index in folder `path`. Its log and tables in memory stay below
  // `buffer_bytes` each. An index whose folder takes no bytes, as on a full disk, is opened for
  // reading, and each Write tries to open it for writing. kDataLoss: it is damaged;
  // kResourceExhausted: there is none, and no room for one.
  static absl::StatusOr<std::unique_ptr<SsdIndex>> Open(const std::string& path,
                                                        uint64_t buffer_bytes);
  ~SsdIndex();

  // Visits all pairs of a kind in key order, before StartWriting. kDataLoss: the index is damaged.
  absl::Status ForEach(IndexKind kind,
                       const std::function<void(std::string_view, std::string_view)>& visit) const;

  // Ends the reading: from now on RocksDB may rearrange its files in the background.
  absl::Status StartWriting();

  // Why the index is open for reading only; OK when it can be written.
  const absl::Status& writable() const { return writable_; }

  // Makes all changes of a batch, and of those before, durable. Blocks.
  absl::Status Write(const IndexBatch& batch);

 private:
  SsdIndex(std::string path, uint64_t buffer_bytes);

  absl::Status OpenForReading();
  absl::Status OpenForWriting();

  const std::string path_;
  const uint64_t buffer_bytes_;
  const std::unique_ptr<rocksdb::Logger> logger_;
  absl::Status writable_;  // otherwise the next Write opens the index again
  std::unique_ptr<rocksdb::DB> db_;
};

}  // namespace crumb::storage
