// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/page_scrubber.h"

#include <algorithm>
#include <utility>

#include "client/gpu/prefix_loader.h"
#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

constexpr size_t kRoundPagesMax = 16;
// Number of rounds over which the pages of a second are spread.
constexpr int kRoundsPerSecond = 4;
// Time between rounds while there is no page to check.
constexpr Duration kIdle = std::chrono::seconds(1);
// Number of offered pages that wait to be checked.
constexpr size_t kOfferedMax = 1024;
// Number of damaged pages that crumbd does not know of yet.
constexpr size_t kUntoldMax = 64;
constexpr Duration kCallTimeout = std::chrono::seconds(2);

// Returns whether the page has arrived. Pages in flight are checked when they arrive.
bool Arrived(const DevicePage& page) {
  if (page.load == nullptr) return true;
  if (!page.load->done()) return false;
  const int damaged = page.load->Settle();
  return damaged < 0 || static_cast<int>(page.position) < damaged;
}

}  // namespace

PageScrubber::PageScrubber(const Parts& parts, int pages_per_second)
    : parts_(parts),
      // Half of a round's pages are offered ones, the other half belongs to the lap.
      round_pages_(std::clamp<size_t>(static_cast<size_t>(pages_per_second / kRoundsPerSecond), 2,
                                      kRoundPagesMax)),
      interval_(std::chrono::duration_cast<Duration>(
          std::chrono::duration<double>(static_cast<double>(round_pages_) / pages_per_second))) {}

absl::StatusOr<std::unique_ptr<PageScrubber>> PageScrubber::Create(const Parts& parts,
                                                                   int pages_per_second) {
  std::unique_ptr<PageScrubber> scrubber(new PageScrubber(parts, pages_per_second));
  CRUMB_ASSIGN_OR_RETURN(scrubber->check_,
                         PageCheck::Create(parts.device, parts.geometry, scrubber->round_pages_));
  scrubber->thread_ = Thread("crumb-scrub", [raw = scrubber.get()] { raw->Run(); });
  return scrubber;
}

PageScrubber::~PageScrubber() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
}

void PageScrubber::Offer(std::span<const std::shared_ptr<const Page>> pages, uint32_t every) {
  if (every == 0 || pages.empty()) return;
  size_t dropped = 0;
  {
    MutexLock lock(&mutex_);
    for (size_t i = turn_.fetch_add(1) % every; i < pages.size(); i += every) {
      if (offered_.size() < kOfferedMax) {
        offered_.push_back(pages[i]);
      } else {
        ++dropped;
      }
    }
    if (idle_) changed_.NotifyAll();  // otherwise the thread wakes by itself soon
  }
  if (dropped > 0) parts_.tally.scrubs_dropped.Add(dropped);
}

bool PageScrubber::Wait() {
  MutexLock lock(&mutex_);
  while (!stopping_ && Clock::Real().Now() < due_ && !(idle_ && !offered_.empty())) {
    changed_.WaitUntil(&mutex_, due_);
  }
  return !stopping_;
}

void PageScrubber::Run() {
  while (Wait()) {
    ReportDamage();
    const bool idle = Round() == 0;
    due_ = Clock::Real().Now() + (idle ? kIdle : interval_);
    MutexLock lock(&mutex_);
    idle_ = idle;
  }
}

std::shared_ptr<const Page> PageScrubber::NextOfLap() {
  while (!lap_.empty()) {
    const PageKey key = lap_.back();
    lap_.pop_back();
    if (auto page = parts_.table.Find(key)) return page;
  }
  return nullptr;
}

PageScrubber::Pages PageScrubber::Choose() {
  Pages pages;
  {
    MutexLock lock(&mutex_);
    while (!offered_.empty() && pages.size() < round_pages_ / 2) {
      pages.push_back(std::move(offered_.front()));
      offered_.pop_front();
    }
  }
  if (lap_.empty()) lap_ = parts_.table.Keys();
  while (pages.size() < round_pages_) {
    auto page = NextOfLap();
    if (page == nullptr) break;
    pages.push_back(std::move(page));
  }
  return pages;
}

// Collects the expected checksums: those of pages made or loaded here are known, those of other
// workers' pages are crumbd's.
std::vector<PageScrubber::Item> PageScrubber::Gather(const Pages& pages) const {
  std::vector<Item> items;
  Pages unknown;
  for (const std::weak_ptr<const Page>& one : pages) {
    const std::shared_ptr<const Page> held = one.lock();
    if (held == nullptr) continue;
    const DevicePage& page = OnDevice(*held);
    if (page.damaged.is_set() || !Arrived(page)) continue;
    if (page.has_sums.is_set()) {
      items.push_back({one, page.tile_sums});
    } else if (page.slot->shared != nullptr) {
      unknown.push_back(one);
    }
  }
  AddFromCrumbd(unknown, &items);
  return items;
}

// Holds no page during the request, because other processes may wait for its slot. A page that is
// held afterwards was held all the time.
void PageScrubber::AddFromCrumbd(const Pages& pages, std::vector<Item>* items) const {
  if (pages.empty() || parts_.pools == nullptr) return;
  std::vector<WorkerPools::PoolPage> places;
  Pages requested;
  for (const std::weak_ptr<const Page>& one : pages) {
    const std::shared_ptr<const Page> page = one.lock();
    if (page == nullptr) continue;
    places.push_back(WorkerPools::PoolPageOf(*page));
    requested.push_back(one);
  }
  auto sums = parts_.pools->SumsOf(places, kCallTimeout);
  if (!sums.ok()) return;  // there is no crumbd; try later
  for (size_t i = 0; i < requested.size(); ++i) {
    if (!(*sums)[i].empty()) items->push_back({requested[i], std::move((*sums)[i])});
  }
}

size_t PageScrubber::Round() {
  const Pages chosen = Choose();
  const std::vector<Item> items = Gather(chosen);
  std::vector<std::shared_ptr<const Page>> pages;
  std::vector<std::span<const uint32_t>> sums;
  for (const Item& item : items) {
    if (auto page = item.page.lock()) {
      pages.push_back(std::move(page));
      sums.push_back(item.sums);
    }
  }
  if (pages.empty()) return chosen.size();
  const absl::StatusOr<std::vector<bool>> damaged = check_->FindDamaged(pages, sums);
  if (!damaged.ok()) {
    LogWarning("pages were not scrubbed: {}", damaged.status().ToString());
    return 0;
  }
  parts_.tally.pages_scrubbed.Add(pages.size());
  if (parts_.client != nullptr) parts_.client->Count({.scrubbed_pages = pages.size()});
  for (size_t i = 0; i < pages.size(); ++i) {
    if ((*damaged)[i]) Withdraw(pages[i]);
  }
  return chosen.size();
}

// Makes the page unfindable for new sequences, then reports it to crumbd. In this order, a page
// that crumbd grants before it knows of the damage enters the table and is checked in a lap.
void PageScrubber::Withdraw(const std::shared_ptr<const Page>& page) {
  parts_.table.Remove(*page);
  OnDevice(*page).damaged.Set();
  damages_.fetch_add(1, std::memory_order_release);
  parts_.tally.verify_failures.Add();
  LogError("page {} of a sequence is damaged in device memory and will not be used any more",
           page->position);
  if (OnDevice(*page).slot->shared == nullptr) {
    if (parts_.client != nullptr) parts_.client->Count({.verify_failures = 1});
    return;
  }
  if (unreported_.size() < kUntoldMax) unreported_.push_back(page);
  ReportDamage();
}

void PageScrubber::ReportDamage() {
  while (!unreported_.empty()) {
    const WorkerPools::PoolPage place = WorkerPools::PoolPageOf(*unreported_.front());
    const absl::Status withdrawn = parts_.pools->Withdraw(place, kCallTimeout);
    if (absl::IsUnavailable(withdrawn) || absl::IsDeadlineExceeded(withdrawn)) return;  // try later
    if (!withdrawn.ok())
      LogWarning("a damaged page may stay in its pool: {}", withdrawn.ToString());
    unreported_.pop_front();
  }
}

}  // namespace crumb::client
