// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "storage/fragment_tier.h"

namespace crumb::histories {

// A fake disk: its content outlives the node that wrote it. It keeps whole fragments, has room
// for a number of them, evicts the page that was used least recently, and has faults. Calls sleep
// in virtual time in the middle of their work, so a node can die there, and other fibers run.
class Disk {
 public:
  struct Faults {
    bool full = false;         // every write fails
    bool write_fails = false;  // each write fails with a chance of one half
    bool read_fails = false;   // each read fails with a chance of one half
    bool records_fail = false;
    int64_t latency_us = 20;  // maximum of a read or write
  };
  using PageName = std::pair<KeyspaceId, PageKey>;

  explicit Disk(size_t fragments_max) : fragments_max_(fragments_max) {}

  Faults faults;

  // The tier of a node that starts with this disk. The tier of the node before must not be used
  // any more.
  std::unique_ptr<storage::FragmentTier> Open(storage::FragmentTierEvents events);

  // Whether fragments of this generation or a newer one cover `range` of the page.
  bool Covers(const PageName& page, uint64_t generation, const TileRange& range) const;
  // Whether the page has fragments of several sizes.
  bool HasSeveralSizes(const PageName& page) const;
  // Whether any fragment of the page was ever written.
  bool WasWritten(const PageName& page) const { return written_.contains(page); }
  // How often the disk itself gave the page up, for room or because it was damaged.
  uint64_t losses(const PageName& page) const;
  // Damages a fragment of the n-th page, if there is one: its next read finds that.
  void Damage(uint64_t n);
  size_t fragments() const;
  uint64_t losses() const { return all_losses_; }

 private:
  friend class DiskTier;
  struct Stored {
    storage::FragmentMeta meta;
    std::vector<std::byte> bytes;
  };
  struct Page {
    std::vector<Stored> fragments;
    uint64_t used = 0;
    TimePoint pinned_until;
  };

  void Lose(const PageName& page) {
    ++losses_[page];
    ++all_losses_;
  }

  const size_t fragments_max_;
  std::map<PageName, Page> pages_;
  std::map<KeyspaceId, uint64_t> generations_;
  std::map<std::string, std::string> records_;
  std::set<PageName> written_;
  std::map<PageName, uint64_t> losses_;
  uint64_t all_losses_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace crumb::histories
