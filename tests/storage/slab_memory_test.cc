// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/slab_memory.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "common/fd_channel.h"
#include "gtest/gtest.h"

namespace crumb::storage {
namespace {

HostOptions Options(uint64_t bytes, uint64_t slab_bytes) {
  HostOptions options;
  options.bytes_max = ByteSize{bytes};
  options.slab_bytes = ByteSize{slab_bytes};
  return options;
}

// What the kernel has given a slab.
uint64_t TakenBytes(const SlabMemory& memory, size_t slab) {
  struct stat status {};
  EXPECT_EQ(::fstat(memory.slabs()[slab].fd, &status), 0);
  return static_cast<uint64_t>(status.st_blocks) * 512;
}

TEST(SlabMemory, IsThereInFullFromTheStart) {
  const auto memory = SlabMemory::Open(Options((5 << 20) + 77, 2 << 20));
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_EQ((*memory)->size(), 3u);
  EXPECT_EQ((*memory)->total_bytes(), uint64_t{5} << 20);
  EXPECT_EQ((*memory)->missing_bytes(), 0u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(TakenBytes(**memory, i), (*memory)->bytes(i));
  // Of one size, as they are announced; what is behind the total is not taken.
  EXPECT_EQ((*memory)->bytes(2), uint64_t{1} << 20);
  for (const Slab& slab : (*memory)->slabs()) {
    EXPECT_EQ(slab.bytes, uint64_t{2} << 20);
    struct stat status;
    ASSERT_EQ(::fstat(slab.fd, &status), 0);
    EXPECT_EQ(static_cast<uint64_t>(status.st_size), slab.bytes);
  }
}

TEST(SlabMemory, GrowsToItsTotalAfterItIsSealed) {
  const auto memory = SlabMemory::Open(Options(5 << 20, 2 << 20), (1 << 20) + 99);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ((*memory)->missing_bytes(), uint64_t{4} << 20);
  EXPECT_EQ(TakenBytes(**memory, 0), uint64_t{1} << 20);
  EXPECT_EQ(TakenBytes(**memory, 1), 0u);
  const size_t expected[] = {0, 1, 2};
  for (const size_t slab : expected) {
    const auto grown = (*memory)->Grow(7 << 20);
    ASSERT_TRUE(grown.ok()) << grown.status();
    EXPECT_EQ(*grown, slab);
    EXPECT_EQ(TakenBytes(**memory, slab), (*memory)->bytes(slab));
    (*memory)->data(slab)[(*memory)->bytes(slab) - 1] = std::byte{7};
  }
  EXPECT_EQ((*memory)->missing_bytes(), 0u);
  EXPECT_TRUE(absl::IsOutOfRange((*memory)->Grow(1 << 20).status()));
  const auto later = SlabMemory::Open(Options(2 << 20, 2 << 20), 0);
  ASSERT_TRUE(later.ok()) << later.status();
  EXPECT_EQ((*later)->missing_bytes(), uint64_t{2} << 20);
}

TEST(SlabMemory, OthersCanOnlyRead) {
  const auto memory = SlabMemory::Open(Options(1 << 20, 1 << 20));
  ASSERT_TRUE(memory.ok()) << memory.status();
  const Slab slab = (*memory)->slabs()[0];
  EXPECT_EQ(::mmap(nullptr, slab.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, slab.fd, 0),
            MAP_FAILED);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::pwrite(slab.fd, "x", 1, 0), -1);
  EXPECT_NE(::ftruncate(slab.fd, 0), 0);
  void* view = ::mmap(nullptr, slab.bytes, PROT_READ, MAP_SHARED, slab.fd, 0);
  ASSERT_NE(view, MAP_FAILED);
  EXPECT_NE(::mprotect(view, slab.bytes, PROT_READ | PROT_WRITE), 0);
  (*memory)->data(0)[123] = std::byte{42};
  EXPECT_EQ(static_cast<const std::byte*>(view)[123], std::byte{42});
  ::munmap(view, slab.bytes);
}

TEST(SlabMemory, HugePagesAreAWish) {
  HostOptions options = Options(2 << 20, 2 << 20);
  options.huge_pages = true;
  const auto memory = SlabMemory::Open(options);
  ASSERT_TRUE(memory.ok()) << memory.status();
  (*memory)->data(0)[0] = std::byte{1};
}

TEST(SlabMemory, RefusesWhatCannotBe) {
  EXPECT_TRUE(absl::IsInvalidArgument(SlabMemory::Open(Options(1000, 1 << 20)).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(SlabMemory::Open(Options(1 << 20, 1000)).status()));
}

TEST(SlabMemory, KnowsWhetherAnybodyReadsASlab) {
  const auto memory = SlabMemory::Open(Options(2 << 20, 1 << 20)).value();
  const auto has_readers = [&](size_t slab) { return memory->HasReaders(slab).value(); };
  EXPECT_FALSE(has_readers(0));
  UniqueFd reader = memory->OpenReader(0).value();
  EXPECT_TRUE(has_readers(0));
  EXPECT_FALSE(has_readers(1));
  void* const mapped = ::mmap(nullptr, 1 << 20, PROT_READ, MAP_SHARED, reader.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_EQ(::mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, reader.get(), 0),
            MAP_FAILED);
  UniqueFd copy(::dup(reader.get()));
  reader.Reset();
  EXPECT_TRUE(has_readers(0));  // the copy, and the mapping
  copy.Reset();
  EXPECT_TRUE(has_readers(0));  // the mapping alone
  // A child has it as well, whatever the parent does.
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte;
    ::close(ends[1]);
    ::_exit(::read(ends[0], &byte, 1) == 0 ? 0 : 1);
  }
  ASSERT_EQ(::munmap(mapped, 1 << 20), 0);
  EXPECT_TRUE(has_readers(0));
  ::close(ends[1]);
  ::close(ends[0]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_FALSE(has_readers(0));
  // On its way between processes.
  int sockets[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  const UniqueFd from(sockets[0]);
  UniqueFd to(sockets[1]);
  {
    const UniqueFd sent = memory->OpenReader(0).value();
    const int fds[] = {sent.get()};
    ASSERT_TRUE(SendFdMessage(from.get(), "x", fds).ok());
  }
  EXPECT_TRUE(has_readers(0));
  to.Reset();
  EXPECT_FALSE(has_readers(0));
}

}  // namespace
}  // namespace crumb::storage
