// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "common/clock.h"
#include "storage/index/held_bytes.h"
#include "storage/index/page_entries.h"

namespace crumb::storage {

// Counts the bytes of pages that tenants keep from being evicted from host memory: pages with
// holds, which leases and reads take by PageTable::Hold, and pinned pages. A PageTable owns it; the
// host tier sets tenants and pins through PageTable::held(). Other tiers set Page::pinned_until
// alone and bound nothing.
//
// All slots of a page that has holds or a pin count towards the held bytes of its keyspace's
// tenant, each page once, and a removed page until its last hold ends. If a pinned page has more
// bytes in the tier below than here, the difference counts too, because the pin keeps them there.
// Nothing is counted, and nothing refused, before SetBound is called.
//
// A pin may outlive its page here: the page may be in the tier below alone, or come back. It ends
// by Unpin, by ForgetBelow when neither tier has the page, or by ExpirePins, which callers call
// often enough that the bytes of expired pins do not refuse others.
//
// Every call costs O(log pins) for each page that it is given or returns. Not thread-safe: the
// tier's lock covers it.
class HeldPages {
 public:
  // `pages` must outlive this.
  explicit HeldPages(PageEntries& pages) : pages_(pages) {}

  // Limits each tenant to part_max_percent of those of the `total` bytes that other tenants do not
  // hold. REQUIRES: no page was inserted yet.
  void SetBound(uint64_t total, int64_t part_max_percent) {
    held_.SetBound(total, part_max_percent);
  }
  uint64_t bytes() const { return held_.used(); }
  // The bytes that the keyspace keeps count for this tenant.
  void SetTenant(const KeyspaceId& keyspace, const std::string& tenant);
  // The keyspace has ended: forgets its state if it has no pages, pins, generation or partition.
  void ForgetTenant(const KeyspaceId& keyspace);

  // Whether the tenant may keep the fragment, if its page is held. PageTable::Insert does not check
  // this.
  bool MayInsert(const FragmentMeta& meta, const Slot& slot, Below below) const;

  // Pins a page that is here, or in the tier below, where it has below_bytes, until then. Returns
  // false, and does not, if the tenant would keep more than its part.
  bool Pin(const KeyspaceId& keyspace, const PageKey& key, uint64_t below_bytes, TimePoint until);
  void Unpin(const KeyspaceId& keyspace, const PageKey& key);
  // The tier below has the page no more.
  void ForgetBelow(const KeyspaceId& keyspace, const PageKey& key);
  // Subtracts up to `count` expired pins from the held bytes of their tenants. Returns how many.
  size_t ExpirePins(TimePoint now, size_t count);

 private:
  friend class PageTable;

  using PageName = std::pair<KeyspaceId, PageKey>;
  struct HeldPin {
    TimePoint until;
    uint64_t bytes = 0;  // the page's bytes in the tier below minus those in this one
    PageSpace* space = nullptr;
  };
  using Pins = std::map<PageName, HeldPin>;

  static bool IsHeld(const Page& page) { return page.holds > 0 || page.pinned; }

  // Counts a hold. Returns false, and does not, if it is `bounded` and the tenant would keep more
  // than its part.
  bool Hold(Page& page, bool bounded) {
    if (!IsHeld(page) && held_.bounded()) {
      if (bounded && !held_.Fits(page.space->held, page.slots_bytes)) return false;
      held_.Add(page.space->held, page.slots_bytes);
    }
    ++page.holds;
    return true;
  }
  void Unhold(Page& page) {
    --page.holds;
    if (!IsHeld(page)) held_.Give(page.space->held, page.slots_bytes);
  }
  // Counts a fragment that was added to the page in `slot`.
  void NoteInserted(Page& page, const FragmentMeta& meta, const Slot& slot, Below below);
  // Counts a fragment that was moved to a slot of another size.
  void NoteMoved(Page& page, const Slot& from, const Slot& to);
  // The pinned page leaves: its pin is one of the tier below, or ends.
  void LeavePin(Page& page);

  // Whether a fragment that is new makes a pinned page grow in the tier below, where its pin is.
  bool GrowsBelow(const FragmentMeta& meta, const Page* page, Below below) const;
  void ErasePin(Pins::iterator pin);
  void ForgetPin(Page& page);

  PageEntries& pages_;
  HeldBytes held_;
  Pins pins_;
  std::set<std::pair<TimePoint, PageName>> pin_ends_;
};

}  // namespace crumb::storage
