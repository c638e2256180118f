// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host/slab_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "common/fd_channel.h"
#include "common/mapping.h"
#include "gtest/gtest.h"

namespace crumb::storage {
namespace {

HostOptions Options(uint64_t bytes, uint64_t slab_bytes) {
  HostOptions options;
  options.bytes_max = ByteSize{bytes};
  options.slab_bytes = ByteSize{slab_bytes};
  return options;
}

// Returns the memory that the kernel has given a slab.
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
  // Slabs have one size, as announced; memory behind the total is not taken.
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
  const int file = (*memory)->file(0);
  EXPECT_EQ(::mmap(nullptr, slab.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0), MAP_FAILED);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::pwrite(file, "x", 1, 0), -1);
  EXPECT_NE(::ftruncate(file, 0), 0);
  // Readers' descriptors cannot write even without the seals, and no other user opens them again.
  EXPECT_EQ(::fcntl(slab.fd, F_GETFL) & O_ACCMODE, O_RDONLY);
  struct stat status {};
  ASSERT_EQ(::fstat(slab.fd, &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0400u);
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

constexpr uint64_t kSlab = uint64_t{1} << 20;

std::unique_ptr<SlabMemory> OpenMovable() {
  return SlabMemory::Open(Options(2 * kSlab, kSlab), UINT64_MAX, SlabMemory::Sharing::kByTenant)
      .value();
}

bool AlwaysThere(uint64_t) { return true; }

// Reads memory that may be gone: the kernel reports a fault to write() and does not signal it.
std::string ReadMapped(const void* address, size_t bytes) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const UniqueFd from(ends[0]), to(ends[1]);
  std::string read(bytes, 0);
  if (::write(to.get(), address, bytes) != static_cast<ssize_t>(bytes)) return "";
  EXPECT_EQ(::read(from.get(), read.data(), bytes), static_cast<ssize_t>(bytes));
  return read;
}

// A pipe that holds a page of a mapping, by reference.
class PipedPage {
 public:
  explicit PipedPage(void* page) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_NONBLOCK), 0);
    from_ = UniqueFd(ends[0]);
    to_ = UniqueFd(ends[1]);
    const iovec part = {page, kPage};
    EXPECT_EQ(::vmsplice(to_.get(), &part, 1, 0), static_cast<ssize_t>(kPage));
  }
  std::string Read() {
    std::string read(kPage, 0);
    EXPECT_EQ(::read(from_.get(), read.data(), kPage), static_cast<ssize_t>(kPage));
    return read;
  }
  static constexpr size_t kPage = 4096;

 private:
  UniqueFd from_;
  UniqueFd to_;
};

TEST(SlabMemory, DropsASlabOnlyWhenNothingOutsideHasAnyOfIt) {
  const auto memory = OpenMovable();
  UniqueFd reader = memory->OpenReader(0).value();
  EXPECT_EQ(memory->TryDrop(0), SlabMemory::Drop::kHeld);
  void* const mapped = ::mmap(nullptr, kSlab, PROT_READ, MAP_SHARED, reader.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  UniqueFd copy(::dup(reader.get()));
  reader.Reset();
  EXPECT_EQ(memory->TryDrop(0), SlabMemory::Drop::kHeld);  // the copy, and the mapping
  copy.Reset();
  EXPECT_EQ(memory->TryDrop(0), SlabMemory::Drop::kHeld);  // the mapping alone
  // A child has it as well, whatever the parent does.
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte;
    ::close(ends[1]);
    ::_exit(::read(ends[0], &byte, 1) == 0 ? 0 : 1);
  }
  PipedPage page(mapped);
  ASSERT_EQ(::munmap(mapped, kSlab), 0);
  EXPECT_EQ(memory->TryDrop(0), SlabMemory::Drop::kHeld);
  ::close(ends[1]);
  ::close(ends[0]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  // No descriptor and no mapping, only a reference to a page.
  EXPECT_EQ(memory->TryDrop(0), SlabMemory::Drop::kPinned);
  page.Read();
  EXPECT_EQ(memory->TryDrop(0), SlabMemory::Drop::kDropped);
  EXPECT_TRUE(memory->dropped(0));
}

TEST(SlabMemory, ADescriptorOnItsWayBetweenProcessesCounts) {
  const auto memory = OpenMovable();
  int sockets[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
  const UniqueFd from(sockets[0]);
  UniqueFd to(sockets[1]);
  {
    const UniqueFd sent = memory->OpenReader(1).value();
    const int fds[] = {sent.get()};
    ASSERT_TRUE(SendFdMessage(from.get(), "x", fds).ok());
  }
  EXPECT_EQ(memory->TryDrop(1), SlabMemory::Drop::kHeld);
  to.Reset();
  EXPECT_EQ(memory->TryDrop(1), SlabMemory::Drop::kDropped);
}

TEST(SlabMemory, AFileThatOnlyAPathKeepsIsEmpty) {
  const auto memory = OpenMovable();
  std::memset(memory->data(0), 'a', kSlab);
  UniqueFd path;
  {
    const UniqueFd reader = memory->OpenReader(0).value();
    const std::string link = "/proc/self/fd/" + std::to_string(reader.get());
    path = UniqueFd(::open(link.c_str(), O_PATH | O_CLOEXEC));
  }
  ASSERT_TRUE(path.valid());
  ASSERT_EQ(memory->TryDrop(0), SlabMemory::Drop::kDropped);
  ASSERT_TRUE(memory->Renew(0, AlwaysThere).ok());
  std::memset(memory->data(0), 'b', kSlab);
  const std::string link = "/proc/self/fd/" + std::to_string(path.get());
  const UniqueFd again(::open(link.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(again.valid());
  struct stat status {};
  ASSERT_EQ(::fstat(again.get(), &status), 0);
  EXPECT_EQ(status.st_size, 0);
  EXPECT_EQ(status.st_blocks, 0);  // nothing of the old file's memory is left
}

TEST(SlabMemory, ARevokedSlabKeepsNoMemoryAndSeesNothingOfTheNext) {
  const auto memory = OpenMovable();
  std::memset(memory->data(0), 'a', kSlab);
  const UniqueFd reader = memory->OpenReader(0).value();
  void* const mapped = ::mmap(nullptr, kSlab, PROT_READ, MAP_SHARED, reader.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  PipedPage page(mapped);
  EXPECT_EQ(ReadMapped(mapped, 64), std::string(64, 'a'));
  ASSERT_TRUE(memory->Revoke(0).ok());
  struct stat status {};
  ASSERT_EQ(::fstat(reader.get(), &status), 0);
  EXPECT_EQ(status.st_blocks, 0);
  ASSERT_TRUE(memory->Renew(0, AlwaysThere).ok());
  EXPECT_EQ(TakenBytes(*memory, 0), kSlab);
  EXPECT_TRUE(std::all_of(memory->data(0), memory->data(0) + kSlab,
                          [](std::byte byte) { return byte == std::byte{0}; }));
  std::memset(memory->data(0), 'b', kSlab);
  char byte = 0;
  EXPECT_EQ(::pread(reader.get(), &byte, 1, 0), 0);
  EXPECT_EQ(ReadMapped(mapped, 64), "");
  EXPECT_EQ(page.Read(), std::string(PipedPage::kPage, 'a'));
  EXPECT_EQ(::munmap(mapped, kSlab), 0);
  // The fresh file is as the first one was.
  const UniqueFd fresh = memory->OpenReader(0).value();
  EXPECT_EQ(::pread(fresh.get(), &byte, 1, kSlab - 1), 1);
  EXPECT_EQ(byte, 'b');
  EXPECT_EQ(::mmap(nullptr, kSlab, PROT_WRITE, MAP_SHARED, memory->file(0), 0), MAP_FAILED);
  EXPECT_EQ(memory->TryDrop(0), SlabMemory::Drop::kHeld);
}

TEST(SlabMemory, ASlabStaysDroppedWhileItsMemoryIsNotThere) {
  const auto memory = OpenMovable();
  ASSERT_EQ(memory->TryDrop(0), SlabMemory::Drop::kDropped);
  EXPECT_TRUE(absl::IsResourceExhausted(memory->Renew(0, [](uint64_t bytes) {
    EXPECT_EQ(bytes, kSlab);
    return false;
  })));
  EXPECT_TRUE(memory->dropped(0));
  EXPECT_TRUE(memory->Renew(0, AlwaysThere).ok());
  EXPECT_FALSE(memory->dropped(0));
  memory->data(0)[kSlab - 1] = std::byte{1};
}

// A process that opens a slab while the kernel checks whether any has it open makes the kernel
// send a signal, which must not end this process.
TEST(SlabMemory, OpeningASlabWhileItIsLeasedEndsNothing) {
  const UniqueFd file = CreateMemfd("leased", 4096).value();
  const UniqueFd lessee = OpenSlabReader(file.get()).value();
  ASSERT_TRUE(TakeSlabLease(lessee.get()).value());
  const std::string again = "/proc/self/fd/" + std::to_string(file.get());
  EXPECT_LT(::open(again.c_str(), O_RDONLY | O_NONBLOCK), 0);
  EXPECT_EQ(errno, EAGAIN);
}

}  // namespace
}  // namespace crumb::storage
