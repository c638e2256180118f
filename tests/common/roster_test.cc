// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/roster.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>

#include "common/status_macros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

// Returns the marks as another process sees them: through an open file of its own.
absl::StatusOr<std::vector<uint64_t>> ReadRoster(int roster) {
  CRUMB_ASSIGN_OR_RETURN(const UniqueFd file, AdoptRoster(roster));
  return ReadOwnRoster(file.get());
}

using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

TEST(RosterTest, MarksAreThereUntilTheyGo) {
  const UniqueFd roster = CreateRoster().value();
  EXPECT_THAT(ReadRoster(roster.get()).value(), IsEmpty());
  std::optional<RosterMark> one = RosterMark::Take(roster.get()).value();
  const RosterMark two = RosterMark::Take(one->roster()).value();
  EXPECT_THAT(ReadRoster(roster.get()).value(), UnorderedElementsAre(one->byte(), two.byte()));
  one.reset();
  EXPECT_THAT(ReadRoster(roster.get()).value(), ElementsAre(two.byte()));
}

TEST(SlotMarksTest, MarksOutliveTheMappingAndStandInTheFile) {
  const UniqueFd roster = CreateRoster().value();
  {
    SlotMarks marks = SlotMarks::Map(roster.get()).value();
    for (const uint64_t slot : {uint64_t{0}, uint64_t{9}, kRosterSlotsMax - 1}) marks.Set(slot);
    marks.Set(10);
    marks.Clear(10);
    EXPECT_EQ(marks.epoch(), 0u);
    marks.SetEpoch(UINT64_MAX - 1);
  }
  const SlotMarks marks = SlotMarks::Map(AdoptRoster(roster.get()).value().get()).value();
  for (const uint64_t slot : {uint64_t{0}, uint64_t{9}, kRosterSlotsMax - 1}) {
    EXPECT_TRUE(marks.Has(slot)) << slot;
  }
  for (const uint64_t slot : {uint64_t{1}, uint64_t{8}, uint64_t{10}}) {
    EXPECT_FALSE(marks.Has(slot)) << slot;
  }
  EXPECT_EQ(marks.epoch(), UINT64_MAX - 1);
  EXPECT_TRUE(marks.Has(kRosterSlotsMax)) << "there is no bit that says otherwise";
}

// Reading a mapped file that has become shorter, or huge pages that have run out, ends a process.
TEST(SlotMarksTest, FilesThatAreNotSafeToMapAreRefused) {
  constexpr size_t kBytes = kRosterSlotsMax / 8 + sizeof(uint64_t);
  const UniqueFd unsealed = CreateMemfd("no-roster", kBytes).value();
  EXPECT_TRUE(absl::IsDataLoss(SlotMarks::Map(unsealed.get()).status()));
  const UniqueFd is_short = CreateMemfd("no-roster", kBytes - 1).value();
  ASSERT_EQ(::fcntl(is_short.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_TRUE(absl::IsDataLoss(SlotMarks::Map(is_short.get()).status()));
  const UniqueFd huge(::memfd_create("no-roster", MFD_HUGETLB | MFD_ALLOW_SEALING | MFD_CLOEXEC));
  ASSERT_TRUE(huge.valid());
  ASSERT_EQ(::ftruncate(huge.get(), off_t{1} << 30), 0);
  ASSERT_EQ(::fcntl(huge.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_TRUE(absl::IsDataLoss(SlotMarks::Map(huge.get()).status()));
  const UniqueFd read_only = CreateMemfd("no-roster", kBytes).value();
  ASSERT_EQ(::fcntl(read_only.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_WRITE), 0);
  EXPECT_FALSE(SlotMarks::Map(read_only.get()).ok());
}

// However the kernel orders them.
TEST(RosterTest, AllMarksAreFound) {
  const UniqueFd roster = CreateRoster().value();
  std::vector<RosterMark> marks;
  std::vector<uint64_t> bytes;
  for (int i = 0; i < 100; ++i) {
    marks.push_back(RosterMark::Take(roster.get()).value());
    bytes.push_back(marks.back().byte());
  }
  EXPECT_THAT(ReadRoster(roster.get()).value(), testing::UnorderedElementsAreArray(bytes));
  for (int i = 0; i < 50; ++i) {
    marks.erase(marks.begin());
    bytes.erase(bytes.begin());
  }
  EXPECT_THAT(ReadRoster(roster.get()).value(), testing::UnorderedElementsAreArray(bytes));
}

TEST(RosterTest, AMarkOutlivesTheDescriptorItWasTakenThrough) {
  UniqueFd roster = CreateRoster().value();
  const UniqueFd other(::fcntl(roster.get(), F_DUPFD_CLOEXEC, 0));
  const RosterMark mark = RosterMark::Take(roster.get()).value();
  roster.Reset();
  EXPECT_THAT(ReadRoster(other.get()).value(), ElementsAre(mark.byte()));
}

TEST(RosterTest, AKilledProcessIsNotThere) {
  const UniqueFd roster = CreateRoster().value();
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto mark = RosterMark::Take(roster.get());
    const char byte = mark.ok() ? 'y' : 'n';
    if (::write(ready[1], &byte, 1) != 1) ::_exit(1);
    while (true) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(byte, 'y');
  EXPECT_EQ(ReadRoster(roster.get())->size(), 1u);
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_THAT(ReadRoster(roster.get()).value(), IsEmpty());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(RosterTest, AMarkIsSeenThroughItsOwnFile) {
  const UniqueFd roster = CreateRoster().value();
  const RosterMark mark = RosterMark::Take(roster.get()).value();
  EXPECT_THAT(ReadRoster(mark.roster()).value(), ElementsAre(mark.byte()));
}

TEST(RosterTest, AnAdoptedRosterKeepsNobodysMark) {
  std::optional<RosterMark> mark = RosterMark::Take(CreateRoster()->get()).value();
  const UniqueFd adopted = AdoptRoster(mark->roster()).value();
  EXPECT_THAT(ReadRoster(adopted.get()).value(), ElementsAre(mark->byte()));
  mark.reset();
  EXPECT_THAT(ReadRoster(adopted.get()).value(), IsEmpty());
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_TRUE(absl::IsDataLoss(AdoptRoster(null.get()).status()));
}

TEST(RosterTest, RefusesOtherFiles) {
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_TRUE(absl::IsDataLoss(ReadRoster(null.get()).status()));
  EXPECT_FALSE(RosterMark::Take(-1).ok());
  const UniqueFd whole = CreateRoster().value();
  const UniqueFd again(
      ::open(("/proc/self/fd/" + std::to_string(whole.get())).c_str(), O_RDWR | O_CLOEXEC));
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  ASSERT_EQ(::fcntl(again.get(), F_OFD_SETLK, &lock), 0);
  EXPECT_TRUE(absl::IsDataLoss(ReadRoster(whole.get()).status()));
}

}  // namespace
}  // namespace crumb
