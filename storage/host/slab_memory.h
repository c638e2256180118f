// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/mapping.h"
#include "common/mutex.h"
#include "common/unique_fd.h"
#include "storage/store_options.h"
#include "storage/tiered_store.h"

namespace crumb::storage {

// Opens a slab's file again for reading. The result is an open file description of its own, so that
// the kernel counts its holders apart from this process's, and it can never write.
absl::StatusOr<UniqueFd> OpenSlabReader(int fd);

// Takes a write lease on the file of `reader`, which must be a description of OpenSlabReader. The
// kernel grants it only when no other open description of the file exists, so no other descriptor
// and no mapping; an O_PATH descriptor does not count, but cannot be opened again while the lease
// is held. Returns false when it is refused. kUnimplemented: the kernel has no leases for such
// files (/proc/sys/fs/leases-enable). `DropSlabLease` or closing `reader` ends the lease.
absl::StatusOr<bool> TakeSlabLease(int reader);
void DropSlabLease(int reader);

// Replaces mapped memory by inaccessible addresses, which stay reserved, and returns its file's
// pages to the kernel as far as nothing outside pins them: the file is cut to length 0 where its
// seals allow that.
absl::Status EmptySlab(const Mapping& mapping, int fd);

// The host tier's memory: memory files ("slabs") of one size, mapped writable here and sealed, so
// that every other process can only read. The usable part of a slab is allocated in full: at Open
// as far as wanted, the rest by Grow.
//
// With Sharing::kByTenant a slab moves between tenants, and each move takes a fresh file, so that
// descriptors, mappings and pinned pages of the old one never see another tenant's bytes:
//
//   there --TryDrop, Revoke--> dropped --Renew--> there
//
// The old file's memory is given back to the kernel, not merely closed, because a closed file lives
// on while any process keeps a descriptor. This requires files that may shrink, which only this
// process's user can do: the files have mode 0400.
//
// Addresses and descriptor numbers of a slab stay the same over its moves, so data() and slabs()
// need no lock. Thread-safe; TryDrop, Revoke and Renew of one slab are called by one thread at a
// time, Grow by one thread at a time, and a slab that is dropped must not be read or written.
class SlabMemory {
 public:
  enum class Sharing { kFixed, kByTenant };

  // Slabs of options.slab_bytes for options.bytes_max, rounded down to whole MiB, of which
  // `first_bytes` are allocated now. A slab gets huge pages in full, or a line is logged and it has
  // normal ones. kInvalidArgument: less than 1 MiB; kResourceExhausted: the memory is not there;
  // kUnimplemented: kByTenant, and the kernel cannot say who has a file open.
  static absl::StatusOr<std::unique_ptr<SlabMemory>> Open(const HostOptions& options,
                                                          uint64_t first_bytes = UINT64_MAX,
                                                          Sharing sharing = Sharing::kFixed);

  size_t size() const { return slabs_.size(); }
  uint64_t slab_bytes() const { return slab_bytes_; }    // size of each file
  uint64_t total_bytes() const { return total_bytes_; }  // once all is taken
  Sharing sharing() const { return sharing_; }
  std::byte* data(size_t slab) const { return slabs_[slab].mapping.data(); }
  // Read-only descriptors, which stay this object's. Only with kFixed may other processes be given
  // them: with kByTenant each reader needs its own from OpenReader.
  std::vector<Slab> slabs() const;
  // The slab's writable descriptor, for the process that takes this one over.
  int file(size_t slab) const { return slabs_[slab].file.get(); }
  // A read-only descriptor of a slab that is not dropped.
  absl::StatusOr<UniqueFd> OpenReader(size_t slab) const;

  enum class Drop {
    kDropped,  // its memory is free: the kernel showed that nothing outside has any of it
    kHeld,     // a descriptor or mapping is left somewhere
    kPinned,   // pages are referred to without a descriptor: in a pipe, by a device, by a ring
  };
  // Gives the slab's file up if nothing outside this process has any of it. REQUIRES: no page of
  // the slab is in use; after another result than kDropped it may be tried again, or revoked, but
  // the slab must not be used. Blocks up to 200 ms when pages are pinned.
  Drop TryDrop(size_t slab);
  // Gives the slab's file up, in use or not: mappings elsewhere fault at the next access,
  // descriptors read nothing. Only pages that are pinned outside keep their memory, with the bytes
  // they had.
  absl::Status Revoke(size_t slab);
  bool dropped(size_t slab) const;
  // Makes a new, zeroed file for a dropped slab and allocates the same memory. Before normal pages
  // are allocated, `may_take` is called. kResourceExhausted: it returned false, or the system has
  // no such memory; the slab stays dropped.
  absl::Status Renew(size_t slab, const std::function<bool(uint64_t bytes)>& may_take);

  // Bytes from the start of a slab that are allocated (in a dropped one: will be), and bytes still
  // missing in all.
  uint64_t bytes(size_t slab) const;
  uint64_t missing_bytes() const;

  // Takes up to `bytes`, whole MiB, of the first slab that is not there in full, and returns its
  // number. kResourceExhausted: the memory is not there, or the slab is being renewed: try again;
  // kOutOfRange: nothing is missing.
  absl::StatusOr<size_t> Grow(uint64_t bytes);

 private:
  struct Memory {
    UniqueFd file;
    UniqueFd reader;
    Mapping mapping;
  };
  struct State {
    enum class Phase : uint8_t { kThere, kGrowing, kChanging, kDropped };
    Phase phase = Phase::kThere;
    uint64_t taken_bytes = 0;
    uint64_t wanted_bytes = 0;  // bytes of the file that are to be allocated
  };
  struct File {
    UniqueFd fd;
    bool huge = false;  // the file has huge pages, all of which are allocated
  };

  absl::StatusOr<File> MakeFile(size_t slab, bool may_be_huge) const;
  absl::Status Seal(int fd) const;
  absl::Status AddSlab(uint64_t wanted_bytes);
  // Maps a fresh file of `taken` allocated bytes where the slab was and makes it the slab's.
  absl::Status PutFile(size_t slab, uint64_t taken,
                       const std::function<bool(uint64_t bytes)>& may_take);
  // Puts descriptors of an empty file in place of a dropped slab's.
  absl::Status Detach(size_t slab);
  void SetPhase(size_t slab, State::Phase phase);

  uint64_t slab_bytes_ = 0;
  uint64_t total_bytes_ = 0;
  bool huge_pages_ = false;
  Sharing sharing_ = Sharing::kFixed;
  UniqueFd nothing_;  // an empty file, for dropped slabs
  std::vector<Memory> slabs_;
  mutable Mutex mutex_;
  std::vector<State> states_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::storage
