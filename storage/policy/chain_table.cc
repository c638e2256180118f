// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/chain_table.h"

namespace crumb::storage {

ItemHandle ChainTable::Add(const ItemInfo& info, uint64_t access) {
  auto handle = static_cast<ItemHandle>(items_.size());
  if (free_.empty()) {
    items_.Append();
  } else {
    handle = free_.back();
    free_.pop_back();
  }
  items_[handle] = {
      .fingerprint = info.fingerprint, .last_access = access, .has_children = info.has_children};
  return handle;
}

}  // namespace crumb::storage
