// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Processes of two tenants on one crumbd with tenants.shared_memory own: which memory of
// crumbd each can read, and that memory goes from one to the other while both live. A process is
// this program again, with a role as its argument.

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <unordered_set>

#include "gtest/gtest.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"
#include "tests/fault/known_pages.h"
#include "tests/fault/tenants.h"

extern char** environ;

namespace crumb::fault {
namespace {

using std::chrono::seconds;

constexpr uint64_t kSlabBytes = uint64_t{1} << 20;
constexpr uint64_t kHostBytes = 7 * kSlabBytes;  // 8 would leave one for later tenants
constexpr uint64_t kFirstOfFirst = 1;            // page 0 has words that are 0
constexpr int kPagesOfFirst = 220;               // twice as many as fit into host memory
constexpr uint64_t kFirstOfSecond = 1'000'000;
constexpr int kPagesOfSecond = 20;

std::unique_ptr<client::Client> ConnectAs(const std::string& tenant, const std::string& dir) {
  client::ClientOptions options;
  options.socket_dir = dir;
  options.process_name = tenant;
  options.token = TokenOf(tenant);
  options.staging_bytes = 4 << 20;
  return client::Client::Open(options).value();
}

// The first word of each 128 bytes of the pages [first, first + count): no other tenant's memory
// holds one of them.
std::unordered_set<uint64_t> WordsOf(const KnownPages& pages, uint64_t first, int count) {
  std::unordered_set<uint64_t> words;
  for (int i = 0; i < count; ++i) {
    const auto fragment = pages.Fragment(first + i);
    for (size_t at = 0; at + 128 <= pages.tiles_bytes(); at += 128) {
      uint64_t word;
      std::memcpy(&word, fragment.data() + at, sizeof(word));
      words.insert(word);
    }
  }
  return words;
}

struct Scan {
  uint64_t bytes = 0;  // bytes of mapped slabs
  uint64_t words = 0;  // found words of those looked for
};

// Reads every slab that this process maps, as the kernel lists them.
Scan ScanSlabs(const std::unordered_set<uint64_t>& words) {
  Scan scan;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:crumb-slab") == std::string::npos) continue;
    char* rest = nullptr;
    const auto begin = std::strtoull(line.c_str(), &rest, 16);
    const auto end = std::strtoull(rest + 1, nullptr, 16);
    scan.bytes += end - begin;
    for (uint64_t at = begin; at < end; at += 128) {
      uint64_t word;
      std::memcpy(&word, reinterpret_cast<const void*>(at), sizeof(word));
      scan.words += words.contains(word) ? 1 : 0;
    }
  }
  return scan;
}

// Publishes pages and reads them back, which maps them. How many there are.
int PublishAndRead(const KnownPages& pages, client::Client& client, uint64_t first, int count) {
  int read = 0;
  for (int i = 0; i < count; ++i) pages.Publish(client, first + i, 1).IgnoreError();
  for (int i = 0; i < count; ++i) {
    const auto back = pages.ReadBack(client, first + i, seconds(10));
    if (!back.ok() && absl::IsDataLoss(back.status())) return -1;
    read += back.ok() && *back ? 1 : 0;
  }
  return read;
}

// Fills all host memory, maps it, says so, and lives until `done` is there; then reads again.
int RunFirst(const std::string& dir) {
  const auto client = ConnectAs("first", dir);
  const KnownPages pages = KnownPages::Open(*client).value();
  const int before = PublishAndRead(pages, *client, kFirstOfFirst, kPagesOfFirst);
  const Scan own = ScanSlabs(WordsOf(pages, kFirstOfFirst, kPagesOfFirst));
  std::cerr << "first: " << before << " pages, maps " << own.bytes << " bytes, " << own.words
            << " words of its own\n";
  if (before <= 0 || own.bytes != kHostBytes || own.words == 0) return 2;
  std::ofstream(dir + "/filled").flush();
  if (!Eventually([&] { return std::filesystem::exists(dir + "/done"); })) return 3;
  const Scan others = ScanSlabs(WordsOf(pages, kFirstOfSecond, kPagesOfSecond));
  std::cerr << "first, later: maps " << others.bytes << " bytes, " << others.words
            << " words of the second\n";
  if (others.words != 0 || others.bytes >= kHostBytes) return 4;
  return PublishAndRead(pages, *client, kFirstOfFirst, kPagesOfFirst) > 0 ? 0 : 5;
}

int RunSecond(const std::string& dir) {
  const auto client = ConnectAs("second", dir);
  const KnownPages pages = KnownPages::Open(*client).value();
  int read = 0;
  const bool got_room = Eventually([&] {
    read = PublishAndRead(pages, *client, kFirstOfSecond, kPagesOfSecond);
    return read < 0 || read == kPagesOfSecond;
  });
  const Scan own = ScanSlabs(WordsOf(pages, kFirstOfSecond, kPagesOfSecond));
  const Scan others = ScanSlabs(WordsOf(pages, kFirstOfFirst, kPagesOfFirst));
  std::cerr << "second: " << read << " pages, maps " << own.bytes << " bytes, " << own.words
            << " words of its own, " << others.words << " of the first\n";
  if (!got_room || read != kPagesOfSecond) return 2;
  if (own.bytes == 0 || own.words == 0) return 3;
  return others.words == 0 ? 0 : 4;
}

class Child {
 public:
  Child(const char* role, const std::string& dir) {
    const char* arguments[] = {"/proc/self/exe", role, dir.c_str(), nullptr};
    if (::posix_spawn(&pid_, arguments[0], nullptr, nullptr, const_cast<char**>(arguments),
                      environ) != 0) {
      pid_ = -1;
    }
  }
  ~Child() {
    if (pid_ > 0) ::kill(pid_, SIGKILL);
    Wait();
  }
  bool lives() {
    if (pid_ > 0 && ::waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = -1;
    return pid_ > 0;
  }
  // The exit code.
  int Wait() {
    if (pid_ > 0) ::waitpid(pid_, &status_, 0);
    pid_ = -1;
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128;
  }

 private:
  pid_t pid_ = -1;
  int status_ = 0;
};

TEST(TenantMemoryTest, MemoryMovesBetweenLivingProcessesAndShowsNothing) {
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(),
                       {.host_bytes = kHostBytes,
                        .slab_bytes = kSlabBytes,
                        .more = TenantsWithOwnSlabs(folder.path(), {"first", "second"})});
  ASSERT_TRUE(crumbd.Start());
  Child first("first", folder.path());
  ASSERT_TRUE(Eventually(
      [&] { return !first.lives() || std::filesystem::exists(folder.path() + "/filled"); }));
  ASSERT_TRUE(first.lives()) << "ended with " << first.Wait();
  EXPECT_EQ(Child("second", folder.path()).Wait(), 0);
  EXPECT_TRUE(first.lives());
  std::ofstream(folder.path() + "/done").flush();
  EXPECT_EQ(first.Wait(), 0);
  EXPECT_EQ(crumbd.Stop(), 0);
}

}  // namespace
}  // namespace crumb::fault

int main(int argc, char** argv) {
  if (argc == 3 && argv[1] == std::string("first")) return crumb::fault::RunFirst(argv[2]);
  if (argc == 3 && argv[1] == std::string("second")) return crumb::fault::RunSecond(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
