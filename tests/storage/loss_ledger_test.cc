// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/loss_ledger.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb::storage {
namespace {

constexpr uint64_t kBase = 1'000'000;
const FlushScope kAll = std::nullopt;

KeyspaceId Space(uint8_t number) {
  KeyspaceId id;
  id.bytes[0] = number;
  return id;
}

class LossLedgerTest : public testing::Test {
 protected:
  LossLedgerTest() {
    ledger_.SetOwner(Space(1), "one");
    ledger_.SetOwner(Space(2), "two");
  }
  void Lose(uint8_t keyspace, int pages) {
    for (int i = 0; i < pages; ++i) ledger_.Add(Space(keyspace));
  }

  LossLedger ledger_{kBase};
};

TEST_F(LossLedgerTest, AMarkSeparatesWhatWasLostBeforeFromWhatIsLostAfter) {
  Lose(1, 3);
  const uint64_t mark = ledger_.Mark("one");
  EXPECT_EQ(ledger_.ReportSince("one", mark).pages, 0u);
  Lose(1, 2);
  for (int time = 0; time < 2; ++time) {  // a report takes nothing away from callers with marks
    const LossLedger::Report report = ledger_.ReportSince("one", mark);
    EXPECT_EQ(report.pages, 2u);
    EXPECT_EQ(report.mark, mark + 2);
    EXPECT_FALSE(report.foreign_mark);
  }
  EXPECT_EQ(ledger_.ReportSince("one", LossLedger::kNothingCommitted).pages, 0u);
}

TEST_F(LossLedgerTest, ATenantLearnsOfItsOwnLossesOnly) {
  const uint64_t one = ledger_.Mark("one"), two = ledger_.Mark("two"), all = ledger_.Mark(kAll);
  Lose(1, 3);
  Lose(2, 4);
  EXPECT_EQ(ledger_.ReportSince("one", one).pages, 3u);
  EXPECT_EQ(ledger_.ReportSince("two", two).pages, 4u);
  EXPECT_EQ(ledger_.ReportSince("none", kBase).pages, 0u);
  EXPECT_EQ(ledger_.ReportSince(kAll, all).pages, 7u);
  EXPECT_EQ(ledger_.total(), 7u);
}

TEST_F(LossLedgerTest, WithoutAMarkEachLossIsReportedOnceInItsScope) {
  Lose(1, 3);
  EXPECT_EQ(ledger_.ReportSince("two", std::nullopt).pages, 0u);
  EXPECT_EQ(ledger_.ReportSince("one", std::nullopt).pages, 3u);
  EXPECT_EQ(ledger_.ReportSince("one", std::nullopt).pages, 0u);
  EXPECT_EQ(ledger_.ReportSince(kAll, std::nullopt).pages, 3u) << "another scope's report";
  Lose(1, 1);
  EXPECT_EQ(ledger_.ReportSince("one", std::nullopt).pages, 1u);
}

TEST_F(LossLedgerTest, AKeyspacesLossesBecomeItsTenantsWhenThatIsKnown) {
  const uint64_t mark = ledger_.Mark("three");
  Lose(3, 2);
  EXPECT_EQ(ledger_.OwnerOf(Space(3)), std::nullopt);
  EXPECT_EQ(ledger_.ReportSince("three", mark).pages, 0u);
  ledger_.SetOwner(Space(3), "three");
  EXPECT_EQ(ledger_.ReportSince("three", mark).pages, 2u);
  ledger_.SetOwner(Space(3), "three");
  EXPECT_EQ(ledger_.ReportSince("three", mark).pages, 2u) << "counted once";
  ledger_.ForgetOwner(Space(3));
  EXPECT_EQ(ledger_.ReportSince("three", mark).pages, 2u) << "they stay the tenant's";
  EXPECT_EQ(ledger_.OwnerOf(Space(3)), std::nullopt);
}

TEST_F(LossLedgerTest, KeyspacesAreFoundByTheirOwner) {
  ledger_.SetOwner(Space(4), "one");
  EXPECT_THAT(ledger_.KeyspacesOf("one"), testing::UnorderedElementsAre(Space(1), Space(4)));
  ledger_.SetOwner(Space(4), "two");
  EXPECT_THAT(ledger_.KeyspacesOf("one"), testing::ElementsAre(Space(1)));
  EXPECT_EQ(ledger_.OwnerOf(Space(4)), "two");
}

TEST_F(LossLedgerTest, AMarkOfAnotherSuccessionReportsAllLosses) {
  Lose(1, 3);
  for (const uint64_t mark : {uint64_t{0}, kBase - 1, kBase + 4}) {
    const LossLedger::Report report = ledger_.ReportSince("one", mark);
    EXPECT_TRUE(report.foreign_mark) << mark;
    EXPECT_EQ(report.pages, 3u) << mark;
  }
  for (const uint64_t mark : {kBase, kBase + 3}) {
    EXPECT_FALSE(ledger_.ReportSince("one", mark).foreign_mark) << mark;
  }
}

TEST_F(LossLedgerTest, MarksAndLossesGoOnInASuccessor) {
  Lose(1, 3);
  Lose(3, 1);
  EXPECT_EQ(ledger_.ReportSince("one", std::nullopt).pages, 3u);
  const uint64_t mark = ledger_.Mark("one");
  Lose(1, 2);
  LossLedger successor(kBase + 1'000);
  successor.Restore(ledger_.state());
  successor.SetOwner(Space(1), "one");
  successor.SetOwner(Space(3), "three");
  EXPECT_EQ(successor.state().mark_base, kBase);
  successor.Add(Space(1));
  EXPECT_EQ(successor.ReportSince("one", mark).pages, 3u);
  EXPECT_FALSE(successor.ReportSince("one", mark).foreign_mark);
  EXPECT_EQ(successor.ReportSince("one", std::nullopt).pages, 3u) << "3 were reported before";
  EXPECT_EQ(successor.ReportSince("three", kBase).pages, 1u);
}

}  // namespace
}  // namespace crumb::storage
