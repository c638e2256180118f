// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "gtest/gtest.h"
#include "storage/index/page_table.h"
#include "storage/policy/policy.h"
#include "storage/slot_allocator.h"
#include "tests/storage/sample_fragment.h"

namespace crumb::storage {

inline bool AnyPage(const Page&) { return true; }

// A page table over 8 MiB of slots.
class PageTableTest : public testing::Test {
 protected:
  static constexpr TimePoint kNow{};

  PageTableTest() { slots_.AddRegion(0, uint64_t{8} << 20); }

  absl::StatusOr<PageHandle> Insert(const SampleFragment& sample) {
    const FragmentMeta meta = MetaOf(sample);
    const auto slot = slots_.Allocate(meta.bytes, SlotAllocator::kNoOwner);
    auto page = table_.Insert(meta, *slot, Below::kAbsent, /*owed=*/true, kNow);
    if (!page.ok()) slots_.Free(*slot);
    return page;
  }

  SlotAllocator slots_{{.granule_bytes = 512, .page_bytes = 512}};
  PageTable table_{*MakePolicy("lru", 1000), slots_};
};

}  // namespace crumb::storage
