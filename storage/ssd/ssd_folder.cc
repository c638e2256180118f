// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/ssd/ssd_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

#include "common/crc32c.h"
#include "common/errno_status.h"
#include "common/little_endian.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "storage/slot_allocator.h"

namespace crumb::storage {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[] = "CRUMBSSD";
constexpr size_t kMagicBytes = 8;
// Version 2 knows encrypted folders; others are as they were.
constexpr uint16_t kVersion = 2;
constexpr uint16_t kPlainVersion = 1;
enum class FolderCipher : uint8_t { kNone = 0, kAes256Gcm = 1 };  // persisted: values are frozen
constexpr size_t kCipherOffset = 24;
constexpr size_t kKeyCheckOffset = 32;
constexpr size_t kFormatBytes = 64;
using FormatBytes = std::array<std::byte, kFormatBytes>;

constexpr uint64_t kExtentBytesMax = uint64_t{256} << 20;
constexpr uint64_t kExtentsWanted = 8;  // a small folder has as many at least
constexpr uint32_t kAlignmentMin = 512;
constexpr uint32_t kAlignmentMax = 4096;

const std::set<std::string> kOurEntries = {
    "FORMAT", "FORMAT.tmp", "LOCK", "index", "index.damaged", "extents", "probe.tmp", "lost+found"};

uint64_t ExtentBytesFor(uint64_t bytes_max) {
  return std::clamp(std::bit_floor(bytes_max / kExtentsWanted), SlotAllocator::kChunkBytesMin,
                    kExtentBytesMax);
}

uint64_t DiskBytes(const fs::path& path) {
  struct stat found;
  if (::lstat(path.c_str(), &found) != 0) return 0;
  return static_cast<uint64_t>(found.st_blocks) * 512;
}

uint64_t TreeBytes(const fs::path& path) {
  uint64_t total = DiskBytes(path);
  std::error_code error;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path, error)) {
    total += DiskBytes(entry.path());
  }
  return total;
}

absl::Status WriteAll(int fd, std::span<const std::byte> bytes, const std::string& path) {
  if (::pwrite(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return ErrnoStatus(errno, "writing " + path);
  }
  if (::fsync(fd) != 0) return ErrnoStatus(errno, "syncing " + path);
  return absl::OkStatus();
}

// Whether a block of `alignment` bytes, no better aligned than that, can be written directly.
bool CanWriteDirectly(int fd, uint32_t alignment) {
  alignas(2 * kAlignmentMax) static thread_local std::array<std::byte, 2 * kAlignmentMax> buffer{};
  std::byte* begin = buffer.data() + alignment % kAlignmentMax;
  return ::pwrite(fd, begin, alignment, alignment % kAlignmentMax) == alignment;
}

absl::Status CheckCipher(const std::string& path, const FormatBytes& bytes,
                         const std::optional<PageCipher::KeyCheck>& key_check) {
  const auto cipher = LoadLittle<uint8_t>(bytes.data() + kCipherOffset);
  if (cipher > static_cast<uint8_t>(FolderCipher::kAes256Gcm)) {
    return absl::FailedPreconditionError("SSD folder " + path + " has an unknown cipher");
  }
  const bool encrypted = cipher != static_cast<uint8_t>(FolderCipher::kNone);
  if (encrypted != key_check.has_value()) {
    return absl::FailedPreconditionError(
        encrypted ? "SSD folder " + path + " is encrypted: set ssd.key_file, or empty the folder"
                  : "SSD folder " + path +
                        " is not encrypted: empty it, or name another, to use ssd.key_file");
  }
  if (encrypted &&
      std::memcmp(bytes.data() + kKeyCheckOffset, key_check->data(), key_check->size()) != 0) {
    return absl::FailedPreconditionError("SSD folder " + path +
                                         " is encrypted with another key than ssd.key_file's");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SyncFolder(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid() || ::fsync(fd.get()) != 0) return ErrnoStatus(errno, "syncing folder " + path);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SsdFolder>> SsdFolder::Open(
    const SsdOptions& options, const std::optional<PageCipher::KeyCheck>& key_check) {
  std::error_code error;
  fs::create_directories(options.path, error);
  if (error) return ErrnoStatus(error.value(), "creating SSD folder " + options.path);
  std::unique_ptr<SsdFolder> folder(new SsdFolder(options.path));
  CRUMB_RETURN_IF_ERROR(folder->CheckEntries());
  bool found = false;
  CRUMB_RETURN_IF_ERROR(folder->ReadFormat(key_check, &found));
  CRUMB_RETURN_IF_ERROR(folder->Lock());
  folder->direct_io_ = options.direct_io;
  CRUMB_RETURN_IF_ERROR(folder->ProbeDirectIo());
  if (!found) {
    folder->extent_bytes_ = ExtentBytesFor(options.bytes_max.value);
    CRUMB_RETURN_IF_ERROR(folder->WriteFormat(key_check));
  }
  fs::create_directories(folder->extents_path(), error);
  if (error) return ErrnoStatus(error.value(), "creating " + folder->extents_path());
  CRUMB_RETURN_IF_ERROR(SyncFolder(folder->path_));
  return folder;
}

absl::Status SsdFolder::CheckEntries() const {
  std::error_code error;
  bool has_format = false;
  bool has_content = false;
  for (const fs::directory_entry& entry : fs::directory_iterator(path_, error)) {
    const std::string name = entry.path().filename();
    if (!kOurEntries.contains(name)) {
      return absl::FailedPreconditionError("SSD folder " + path_ + " holds '" + name +
                                           "', which is not Crumb's: name an empty folder");
    }
    has_format |= name == "FORMAT";
    has_content |= name == "index" || name == "extents";
  }
  if (error) return ErrnoStatus(error.value(), "listing SSD folder " + path_);
  if (has_content && !has_format) {
    return absl::FailedPreconditionError("SSD folder " + path_ +
                                         " has no FORMAT file: restore it or empty the folder");
  }
  return absl::OkStatus();
}

absl::Status SsdFolder::Lock() {
  const std::string name = path_ + "/LOCK";
  lock_.Reset(::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0640));
  if (!lock_.valid()) return ErrnoStatus(errno, "SSD folder is not writable: opening " + name);
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoStatus(errno, "locking " + name);
    return absl::FailedPreconditionError("SSD folder " + path_ +
                                         " is in use by another process: it holds " + name);
  }
  return absl::OkStatus();
}

absl::Status SsdFolder::ReadFormat(const std::optional<PageCipher::KeyCheck>& key_check,
                                   bool* found) {
  const std::string name = path_ + "/FORMAT";
  const UniqueFd fd(::open(name.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid() && errno == ENOENT) return absl::OkStatus();
  if (!fd.valid()) return ErrnoStatus(errno, "opening " + name);
  FormatBytes bytes;
  if (::pread(fd.get(), bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()) ||
      std::memcmp(bytes.data(), kMagic, kMagicBytes) != 0) {
    return absl::FailedPreconditionError(name + " is not Crumb's: name another folder");
  }
  if (LoadLittle<uint32_t>(bytes.data() + kFormatBytes - 4) !=
      Crc32c(std::span(bytes).first(kFormatBytes - 4))) {
    return absl::FailedPreconditionError(name + " is damaged: restore it or empty the folder");
  }
  if (const auto reader = LoadLittle<uint16_t>(bytes.data() + 10); reader > kVersion) {
    return absl::FailedPreconditionError(name + " needs a reader of version " +
                                         std::to_string(reader) + ", this one is " +
                                         std::to_string(kVersion));
  }
  alignment_ = LoadLittle<uint32_t>(bytes.data() + 12);
  extent_bytes_ = LoadLittle<uint64_t>(bytes.data() + 16);
  if (!std::has_single_bit(alignment_) || alignment_ < kAlignmentMin || extent_bytes_ == 0 ||
      extent_bytes_ % SlotAllocator::kChunkBytesMin != 0) {
    return absl::FailedPreconditionError(name + " holds impossible values");
  }
  *found = true;
  return CheckCipher(path_, bytes, key_check);
}

absl::Status SsdFolder::WriteFormat(const std::optional<PageCipher::KeyCheck>& key_check) const {
  FormatBytes bytes{};
  std::memcpy(bytes.data(), kMagic, kMagicBytes);
  const uint16_t version = key_check ? kVersion : kPlainVersion;
  StoreLittle(bytes.data() + 8, version);
  StoreLittle(bytes.data() + 10, version);
  StoreLittle(bytes.data() + 12, alignment_);
  StoreLittle(bytes.data() + 16, extent_bytes_);
  if (key_check) {
    StoreLittle(bytes.data() + kCipherOffset, static_cast<uint8_t>(FolderCipher::kAes256Gcm));
    std::memcpy(bytes.data() + kKeyCheckOffset, key_check->data(), key_check->size());
  }
  StoreLittle(bytes.data() + kFormatBytes - 4, Crc32c(std::span(bytes).first(kFormatBytes - 4)));
  const std::string name = path_ + "/FORMAT";
  const std::string draft = name + ".tmp";
  const UniqueFd fd(::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0640));
  if (!fd.valid()) return ErrnoStatus(errno, "SSD folder is not writable: creating " + draft);
  CRUMB_RETURN_IF_ERROR(WriteAll(fd.get(), bytes, draft));
  if (::rename(draft.c_str(), name.c_str()) != 0) return ErrnoStatus(errno, "creating " + name);
  return SyncFolder(path_);
}

absl::Status SsdFolder::ProbeDirectIo() {
  const std::string name = path_ + "/probe.tmp";
  const int flags = O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC;
  {
    const UniqueFd writable(::open(name.c_str(), flags, 0640));
    if (!writable.valid()) return ErrnoStatus(errno, "SSD folder is not writable: " + name);
  }
  uint32_t needed = kAlignmentMin;
  if (direct_io_) {
    const UniqueFd fd(::open(name.c_str(), flags | O_DIRECT, 0640));
    while (fd.valid() && needed <= kAlignmentMax && !CanWriteDirectly(fd.get(), needed))
      needed *= 2;
    direct_io_ = fd.valid() && needed <= kAlignmentMax;
    if (!direct_io_) {
      LogWarning("SSD tier: the file system of {} has no direct I/O; going through the page cache",
                 path_);
      needed = kAlignmentMin;
    }
  }
  ::unlink(name.c_str());
  if (alignment_ == 0) alignment_ = needed;
  if (alignment_ < needed) {
    return absl::FailedPreconditionError(
        "SSD folder " + path_ + " was made for blocks of " + std::to_string(alignment_) +
        " bytes, its disk now needs " + std::to_string(needed) + ": empty the folder");
  }
  return absl::OkStatus();
}

absl::Status SsdFolder::SetIndexAside(uint64_t keep_bytes_max) const {
  const std::string aside = path_ + "/index.damaged";
  std::error_code error;
  fs::remove_all(aside, error);
  if (TreeBytes(index_path()) > keep_bytes_max) {
    fs::remove_all(index_path(), error);
  } else {
    fs::rename(index_path(), aside, error);
  }
  if (error) return ErrnoStatus(error.value(), "setting the damaged index aside");
  return SyncFolder(path_);
}

uint64_t SsdFolder::BytesBesidesExtents() const {
  uint64_t total = DiskBytes(path_) + DiskBytes(extents_path());
  for (const char* name : {"FORMAT", "LOCK"}) total += DiskBytes(fs::path(path_) / name);
  return total + TreeBytes(index_path()) + TreeBytes(fs::path(path_) / "index.damaged");
}

}  // namespace crumb::storage
