// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/page_table.h"

#include <utility>

namespace crumb::client {

std::shared_ptr<const Page> PageTable::Find(const PageKey& key) const {
  MutexLock lock(&state_->mutex);
  const auto found = state_->pages.find(key);
  return found == state_->pages.end() ? nullptr : found->second.lock();
}

std::shared_ptr<const Page> PageTable::Wrap(std::shared_ptr<const Page> page) {
  const Page* raw = page.get();
  return std::shared_ptr<const Page>(
      raw, [state = state_, owner = std::move(page)](const Page* dying) mutable {
        {
          MutexLock lock(&state->mutex);
          const auto found = state->pages.find(dying->key);
          // Another page of this key may have taken the place meanwhile.
          if (found != state->pages.end() && found->second.expired()) state->pages.erase(found);
        }
        owner.reset();
      });
}

void PageTable::Insert(const std::shared_ptr<const Page>& wrapped) {
  MutexLock lock(&state_->mutex);
  std::weak_ptr<const Page>& entry = state_->pages[wrapped->key];
  if (entry.expired()) entry = wrapped;
}

std::shared_ptr<const Page> PageTable::Share(std::shared_ptr<const Page> page) {
  std::shared_ptr<const Page> shared = Wrap(std::move(page));
  Insert(shared);
  return shared;
}

size_t PageTable::size() const {
  MutexLock lock(&state_->mutex);
  return state_->pages.size();
}

}  // namespace crumb::client
