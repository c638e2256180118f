// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/ssd_index.h"

#include <cstdarg>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "common/logging.h"
#include "rocksdb/db.h"
#include "rocksdb/env.h"
#include "rocksdb/filter_policy.h"
#include "rocksdb/options.h"
#include "rocksdb/table.h"
#include "rocksdb/write_batch.h"

namespace crumb::storage {
namespace {

absl::Status FromRocksdb(const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = "SSD index: " + status.ToString();
  const bool file_missing =
      status.IsIOError() && status.subcode() == rocksdb::Status::kPathNotFound;
  if (status.IsCorruption() || file_missing) return absl::DataLossError(text);
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(text);
  if (status.IsIOError()) return absl::UnavailableError(text);
  if (status.IsInvalidArgument()) return absl::DataLossError(text);
  return absl::InternalError(text);
}

// RocksDB's own warnings go where ours go, instead of into files of its own.
class IndexLogger final : public rocksdb::Logger {
 public:
  IndexLogger() : rocksdb::Logger(rocksdb::InfoLogLevel::WARN_LEVEL) {}
  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list arguments) override {
    char text[512];
    std::vsnprintf(text, sizeof(text), format, arguments);
    LogWarning("SSD index: {}", text);
  }
};

rocksdb::Options BoundedOptions(uint64_t buffer_bytes, rocksdb::Logger* logger) {
  rocksdb::Options options;
  options.create_if_missing = true;
  // Two tables in memory, the log that goes with them, and small tables on disk: nothing that
  // grows by itself.
  options.write_buffer_size = buffer_bytes;
  options.max_write_buffer_number = 2;
  options.max_total_wal_size = buffer_bytes;
  options.target_file_size_base = buffer_bytes;
  options.max_bytes_for_level_base = 4 * buffer_bytes;
  options.level_compaction_dynamic_level_bytes = true;
  options.level0_file_num_compaction_trigger = 2;
  options.max_compaction_bytes = 4 * buffer_bytes;
  options.max_background_jobs = 2;
  options.max_manifest_file_size = buffer_bytes / 4;
  options.allow_fallocate = false;  // room in advance would count against the budget
  options.keep_log_file_num = 1;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  options.max_open_files = 64;
  options.disable_auto_compactions = true;        // StartWriting enables them
  options.compression = rocksdb::kNoCompression;  // keys are digests
  options.info_log = std::shared_ptr<rocksdb::Logger>(std::shared_ptr<void>(), logger);
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(buffer_bytes);
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

rocksdb::Slice ToSlice(const std::string& text) { return {text.data(), text.size()}; }
std::string_view ToView(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

}  // namespace

SsdIndex::SsdIndex(std::string path, uint64_t buffer_bytes)
    : path_(std::move(path)),
      buffer_bytes_(buffer_bytes),
      logger_(std::make_unique<IndexLogger>()) {}

SsdIndex::~SsdIndex() = default;

absl::StatusOr<std::unique_ptr<SsdIndex>> SsdIndex::Open(const std::string& path,
                                                         uint64_t buffer_bytes) {
  std::unique_ptr<SsdIndex> index(new SsdIndex(path, buffer_bytes));
  // RocksDB would complain of a folder that is not there before it makes it.
  std::error_code error;
  std::filesystem::create_directories(path, error);
  const absl::Status opened = index->OpenForWriting();
  if (opened.ok()) return index;
  if (absl::IsDataLoss(opened) || !index->OpenForReading().ok()) return opened;
  index->writable_ = opened;
  return index;
}

absl::Status SsdIndex::OpenForWriting() {
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status =
      rocksdb::DB::Open(BoundedOptions(buffer_bytes_, logger_.get()), path_, &db);
  db_.reset(db);
  return FromRocksdb(status);
}

// Writes nothing: the log that the process before left is read into memory.
absl::Status SsdIndex::OpenForReading() {
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status =
      rocksdb::DB::OpenForReadOnly(BoundedOptions(buffer_bytes_, logger_.get()), path_, &db);
  db_.reset(db);
  return FromRocksdb(status);
}

absl::Status SsdIndex::StartWriting() {
  if (!writable_.ok()) return absl::OkStatus();
  return FromRocksdb(db_->EnableAutoCompaction({db_->DefaultColumnFamily()}));
}

absl::Status SsdIndex::Write(const IndexBatch& batch) {
  if (batch.changes.empty()) return absl::OkStatus();
  if (!writable_.ok()) {
    // A log that once failed to take bytes never takes any again; only a new one does.
    db_.reset();
    writable_ = OpenForWriting();
    if (writable_.ok()) writable_ = StartWriting();
    if (!writable_.ok()) return writable_;
  }
  rocksdb::WriteBatch changes;
  for (const auto& [key, value] : batch.changes) {
    if (value) {
      changes.Put(ToSlice(key), ToSlice(*value));
    } else {
      changes.Delete(ToSlice(key));
    }
  }
  rocksdb::WriteOptions options;
  options.sync = true;
  writable_ = FromRocksdb(db_->Write(options, &changes));
  return writable_;
}

absl::Status SsdIndex::ForEach(
    IndexKind kind, const std::function<void(std::string_view, std::string_view)>& visit) const {
  rocksdb::ReadOptions options;
  options.fill_cache = false;
  const std::unique_ptr<rocksdb::Iterator> at(db_->NewIterator(options));
  const std::string prefix(1, static_cast<char>(kind));
  for (at->Seek(prefix); at->Valid() && at->key().starts_with(prefix); at->Next()) {
    visit(ToView(at->key()), ToView(at->value()));
  }
  return FromRocksdb(at->status());
}

}  // namespace crumb::storage
