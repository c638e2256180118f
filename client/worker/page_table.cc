// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/page_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "common/placement.h"

namespace crumb::client {

void PageTable::State::Forget(const PageKey& key) {
  const auto found = pages.find(key);
  if (found != pages.end() && found->second.page.expired()) pages.erase(found);
}

void PageTable::State::Insert(const std::shared_ptr<const Page>& wrapped) {
  Entry& entry = pages[wrapped->key];
  if (entry.page.expired() || entry.generation < wrapped->generation) {
    entry = {wrapped, wrapped->generation};
  }
}

// A block of pages that become findable, and unfindable, together.
struct PageTable::Run {
  explicit Run(std::shared_ptr<State> of) : state(std::move(of)) {}
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run() {
    MutexLock lock(&state->mutex);
    for (const auto& page : pages) state->Forget(page->key);
  }

  const std::shared_ptr<State> state;
  std::vector<std::shared_ptr<const Page>> pages;
};

std::shared_ptr<const Page> PageTable::Find(const PageKey& key) const {
  MutexLock lock(&state_->mutex);
  const auto found = state_->pages.find(key);
  return found == state_->pages.end() ? nullptr : found->second.page.lock();
}

std::shared_ptr<const Page> PageTable::Find(const PageKey& key, uint64_t generation) const {
  MutexLock lock(&state_->mutex);
  const auto found = state_->pages.find(key);
  if (found == state_->pages.end() || found->second.generation != generation) return nullptr;
  return found->second.page.lock();
}

std::shared_ptr<const Page> PageTable::Wrap(std::shared_ptr<const Page> page) {
  const Page* raw = page.get();
  return std::shared_ptr<const Page>(
      raw, [state = state_, owner = std::move(page)](const Page* dying) mutable {
        {
          MutexLock lock(&state->mutex);
          state->Forget(dying->key);
        }
        owner.reset();
      });
}

void PageTable::Insert(const std::shared_ptr<const Page>& wrapped) {
  MutexLock lock(&state_->mutex);
  state_->Insert(wrapped);
}

std::shared_ptr<const Page> PageTable::Share(std::shared_ptr<const Page> page) {
  std::shared_ptr<const Page> shared = Wrap(std::move(page));
  Insert(shared);
  return shared;
}

std::vector<std::shared_ptr<const Page>> PageTable::ShareAll(
    std::vector<std::shared_ptr<Page>> pages) {
  std::vector<std::shared_ptr<const Page>> shared;
  shared.reserve(pages.size());
  for (auto next = pages.begin(); next != pages.end();) {
    const auto end = next + std::min<std::ptrdiff_t>(pages.end() - next, kRunPages);
    const auto run = std::make_shared<Run>(state_);
    run->pages.assign(std::move_iterator(next), std::move_iterator(end));
    next = end;
    MutexLock lock(&state_->mutex);
    for (const auto& page : run->pages) {
      state_->Insert(shared.emplace_back(run, page.get()));
    }
  }
  return shared;
}

void PageTable::Remove(const Page& page) {
  std::shared_ptr<const Page> there;  // destroyed after the lock
  MutexLock lock(&state_->mutex);
  const auto found = state_->pages.find(page.key);
  if (found == state_->pages.end()) return;
  there = found->second.page.lock();
  if (there.get() == &page) state_->pages.erase(found);
}

std::vector<PageKey> PageTable::Keys() const {
  std::vector<PageKey> keys;
  MutexLock lock(&state_->mutex);
  keys.reserve(state_->pages.size());
  for (const auto& [key, page] : state_->pages) keys.push_back(key);
  return keys;
}

size_t PageTable::size() const {
  MutexLock lock(&state_->mutex);
  return state_->pages.size();
}

}  // namespace crumb::client
