// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Workers that may open few descriptors, beside a crumbd of many slabs. A worker is this program
// again, with its limits as arguments.
#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <string>

#include "client/rpc/connection.h"
#include "gtest/gtest.h"
#include "tests/common/temporary_folder.h"
#include "tests/fault/crumbd_process.h"

extern char** environ;

namespace crumb::fault {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kSlabs = 600;

enum Outcome { kMapped = 0, kMappedAndRaised = 10, kRefused = 11, kWrong = 12 };

// Uses descriptors up until `free` are left below the soft limit, and connects.
int RunWorker(const std::string& dir, rlim_t soft, rlim_t hard, int free) {
  const rlimit limit = {soft, hard};
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return kWrong;
  int last = -1;
  for (int fd = ::open("/dev/null", O_RDONLY); fd >= 0; fd = ::open("/dev/null", O_RDONLY))
    last = fd;
  for (int i = 0; i < free; ++i) ::close(last - i);
  client::ClientOptions options;
  options.socket_dir = dir;
  options.process_name = "worker";
  options.staging_bytes = kMiB;
  options.connect_timeout = std::chrono::seconds(60);
  const auto connection = client::Connection::Open(options);
  rlimit now{};
  ::getrlimit(RLIMIT_NOFILE, &now);
  if (!connection.ok()) {
    std::cerr << connection.status() << "\n";
    const std::string message(connection.status().message());
    const bool says = message.find("RLIMIT_NOFILE") != std::string::npos &&
                      message.find("LimitNOFILE=") != std::string::npos;
    return absl::IsResourceExhausted(connection.status()) && says ? kRefused : kWrong;
  }
  for (uint32_t slab = 0; slab < kSlabs; ++slab) {
    if (!(*connection)->SlabBytes(slab, kMiB - 1).ok()) return kWrong;
  }
  return now.rlim_cur == soft ? kMapped : kMappedAndRaised;
}

int Worker(const std::string& dir, int soft, int hard, int free) {
  const std::string texts[] = {std::to_string(soft), std::to_string(hard), std::to_string(free)};
  const char* arguments[] = {"/proc/self/exe", dir.c_str(),      texts[0].c_str(),
                             texts[1].c_str(), texts[2].c_str(), nullptr};
  pid_t pid = -1;
  int status = 0;
  if (::posix_spawn(&pid, arguments[0], nullptr, nullptr, const_cast<char**>(arguments), environ) !=
          0 ||
      ::waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) {
    return kWrong;
  }
  return WEXITSTATUS(status);
}

TEST(DescriptorLimitTest, AWorkerMapsMoreSlabsThanItMayOpenDescriptors) {
  TemporaryFolder folder;
  CrumbdProcess crumbd(folder.path(),
                       {.host_bytes = kSlabs * kMiB, .slab_bytes = kMiB, .ssd_bytes = 0});
  ASSERT_TRUE(crumbd.Start());
  EXPECT_EQ(Worker(folder.path(), 128, 128, 64), kMapped);
  // Too few are left: the soft limit is raised, within the hard one.
  EXPECT_EQ(Worker(folder.path(), 128, 1024, 8), kMappedAndRaised);
  EXPECT_EQ(Worker(folder.path(), 128, 128, 4), kRefused);
  EXPECT_EQ(crumbd.Stop(), 0);
}

}  // namespace
}  // namespace crumb::fault

int main(int argc, char** argv) {
  if (argc == 5) {
    return crumb::fault::RunWorker(argv[1], std::stoul(argv[2]), std::stoul(argv[3]),
                                   std::stoi(argv[4]));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
