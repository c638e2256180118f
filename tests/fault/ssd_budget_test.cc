// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Twice the SSD tier's budget goes through it while another thread adds up all files in its folder.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <random>
#include <thread>

#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/known_pages.h"

namespace crumb::fault {
namespace {

constexpr uint64_t kBudget = uint64_t{192} << 20;
constexpr uint64_t kHost = uint64_t{32} << 20;

// Bytes that the folder's files take on disk; a file that vanishes meanwhile counts as nothing.
uint64_t FolderBytes(const std::string& path) {
  uint64_t bytes = 0;
  std::error_code error;
  for (auto entry = std::filesystem::recursive_directory_iterator(path, error);
       !error && entry != std::filesystem::recursive_directory_iterator(); entry.increment(error)) {
    struct stat file;
    if (::lstat(entry->path().c_str(), &file) == 0 && S_ISREG(file.st_mode)) {
      bytes += std::max<uint64_t>(static_cast<uint64_t>(file.st_blocks) * 512,
                                  static_cast<uint64_t>(file.st_size));
    }
  }
  return bytes;
}

int LoadSeconds() {
  const char* seconds = std::getenv("CRUMB_FAULT_SECONDS");
  return seconds == nullptr ? 15 : std::atoi(seconds);
}

TEST(SsdBudgetTest, HoldsAtEveryMoment) {
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(), {.host_bytes = kHost, .ssd_bytes = kBudget});
  ASSERT_TRUE(crumbd.Start());
  auto client = Connect(folder.path(), "load");
  ASSERT_TRUE(client.ok()) << client.status();
  auto pages = KnownPages::Open(**client);
  ASSERT_TRUE(pages.ok()) << pages.status();

  std::atomic<bool> stop{false};
  std::atomic<uint64_t> largest{0};
  std::atomic<int> samples{0};
  std::thread watcher([&] {
    while (!stop) {
      const uint64_t now = FolderBytes(crumbd.ssd_path());
      if (now > largest) largest = now;
      ++samples;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });

  const uint64_t range = 2 * kBudget / pages->fragment_bytes();
  std::mt19937_64 random(1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(LoadSeconds());
  uint64_t written = 0;
  uint64_t hits = 0;
  uint64_t misses = 0;
  for (uint64_t next = 0; std::chrono::steady_clock::now() < end; next = (next + 8) % range) {
    const auto outcomes = pages->Publish(**client, next, 8);
    ASSERT_TRUE(outcomes.ok()) << outcomes.status();
    written += outcomes->size();
    for (int i = 0; i < 4; ++i) {
      const auto right = pages->ReadBack(**client, random() % range, std::chrono::seconds(1));
      ASSERT_TRUE(right.ok()) << right.status();
      ++(*right ? hits : misses);
    }
  }
  stop = true;
  watcher.join();
  std::cout << written << " pages written, " << hits << " hits, " << misses << " misses, largest "
            << (largest >> 10) << " KiB of " << (kBudget >> 10) << " KiB in " << samples
            << " samples\n";
  EXPECT_GT(hits, 0u);
  EXPECT_GT(samples, 100);
  EXPECT_GT(largest, kBudget / 2) << "the budget was never near";
  EXPECT_LE(largest, kBudget);
  EXPECT_EQ(crumbd.Stop(), 0);
}

}  // namespace
}  // namespace crumb::fault
