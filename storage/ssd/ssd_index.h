// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "storage/ssd/index_format.h"

namespace rocksdb {
class DB;
class Logger;
class Status;
}  // namespace rocksdb

namespace crumb::storage {

// The SSD tier's durable map of small keys to small values, in RocksDB with tightly bounded files.
// Reads are thread-safe and may go on beside a write; writes are one at a time, which
// also keeps RocksDB from letting one thread write the batches of others.
class SsdIndex {
 public:
  // Opens or creates the index in folder `path`. Its log and tables in memory stay below
  // `buffer_bytes` each. kDataLoss: it is damaged; kResourceExhausted: the disk is full.
  static absl::StatusOr<std::unique_ptr<SsdIndex>> Open(const std::string& path,
                                                        uint64_t buffer_bytes);
  ~SsdIndex();

  // Makes all changes of a batch, and of those before, durable. Blocks. The caller sees to it that
  // no other write is under way.
  absl::Status Write(const IndexBatch& batch);

  // Visits all pairs of a kind in key order. kDataLoss: the index is damaged.
  absl::Status ForEach(IndexKind kind,
                       const std::function<void(std::string_view, std::string_view)>& visit) const;

 private:
  SsdIndex(std::string path, uint64_t buffer_bytes);

  absl::Status OpenDb();
  std::shared_ptr<rocksdb::DB> db() const;

  const std::string path_;
  const uint64_t buffer_bytes_;
  const std::unique_ptr<rocksdb::Logger> logger_;
  bool failed_ = false;  // the writer's: the last write did
  mutable Mutex mutex_;
  std::shared_ptr<rocksdb::DB> db_ ABSL_GUARDED_BY(mutex_);  // null after a failed reopening
};

}  // namespace crumb::storage
