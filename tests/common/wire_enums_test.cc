// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/wire_enums.h"

#include <cctype>
#include <string>
#include <string_view>

#include "common/page_format.h"
#include "crumb.h"
#include "crumb/v1/cache_service.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

// The numbers are written out: a value that changes here and in the protocol alike is found, too.
template <typename Enum, typename Proto>
constexpr bool Frozen(Enum ours, Proto proto, int number) {
  return static_cast<int>(ours) == number && static_cast<int>(proto) == number;
}

static_assert(Frozen(Tier::kUnknown, v1::TIER_UNSPECIFIED, 0));
static_assert(Frozen(Tier::kDevice, v1::TIER_DEVICE, 1));
static_assert(Frozen(Tier::kHost, v1::TIER_HOST, 2));
static_assert(Frozen(Tier::kSsd, v1::TIER_SSD, 3));
static_assert(Frozen(Tier::kRemote, v1::TIER_REMOTE, 4));

static_assert(Frozen(MissReason::kNone, v1::MISS_REASON_UNSPECIFIED, 0));
static_assert(Frozen(MissReason::kAbsent, v1::MISS_REASON_ABSENT, 1));
static_assert(Frozen(MissReason::kPending, v1::MISS_REASON_PENDING, 2));
static_assert(Frozen(MissReason::kDeadline, v1::MISS_REASON_DEADLINE, 3));
static_assert(Frozen(MissReason::kCorrupt, v1::MISS_REASON_CORRUPT, 4));
static_assert(Frozen(MissReason::kGeneration, v1::MISS_REASON_GENERATION, 5));
static_assert(Frozen(MissReason::kQuality, v1::MISS_REASON_QUALITY, 6));
static_assert(Frozen(MissReason::kNotCovered, v1::MISS_REASON_NOT_COVERED, 7));
static_assert(Frozen(MissReason::kBusy, v1::MISS_REASON_BUSY, 8));

static_assert(Frozen(CommitOutcome::kUnknown, v1::COMMIT_OUTCOME_UNSPECIFIED, 0));
static_assert(Frozen(CommitOutcome::kStored, v1::COMMIT_OUTCOME_STORED, 1));
static_assert(Frozen(CommitOutcome::kDeduplicated, v1::COMMIT_OUTCOME_DEDUPLICATED, 2));
static_assert(Frozen(CommitOutcome::kRefused, v1::COMMIT_OUTCOME_REFUSED, 3));
static_assert(Frozen(CommitOutcome::kNoRoom, v1::COMMIT_OUTCOME_NO_ROOM, 4));

static_assert(Frozen(KeyspaceState::kUnknown, v1::KEYSPACE_STATE_UNSPECIFIED, 0));
static_assert(Frozen(KeyspaceState::kActive, v1::KEYSPACE_STATE_ACTIVE, 1));
static_assert(Frozen(KeyspaceState::kBf16, v1::KEYSPACE_STATE_BF16, 2));

static_assert(Frozen(PageFormat::kBf16, v1::PAGE_FORMAT_BF16, 1));
static_assert(Frozen(PageFormat::kInt2, v1::PAGE_FORMAT_INT2, 2));

// The C interface.
static_assert(Frozen(Tier::kUnknown, CRUMB_TIER_UNKNOWN, 0));
static_assert(Frozen(Tier::kDevice, CRUMB_TIER_DEVICE, 1));
static_assert(Frozen(Tier::kHost, CRUMB_TIER_HOST, 2));
static_assert(Frozen(Tier::kSsd, CRUMB_TIER_SSD, 3));
static_assert(Frozen(Tier::kRemote, CRUMB_TIER_REMOTE, 4));
static_assert(Frozen(MissReason::kNone, CRUMB_MISS_NONE, 0));
static_assert(Frozen(MissReason::kAbsent, CRUMB_MISS_ABSENT, 1));
static_assert(Frozen(MissReason::kPending, CRUMB_MISS_PENDING, 2));
static_assert(Frozen(MissReason::kDeadline, CRUMB_MISS_DEADLINE, 3));
static_assert(Frozen(MissReason::kCorrupt, CRUMB_MISS_CORRUPT, 4));
static_assert(Frozen(MissReason::kGeneration, CRUMB_MISS_GENERATION, 5));
static_assert(Frozen(MissReason::kQuality, CRUMB_MISS_QUALITY, 6));
static_assert(Frozen(MissReason::kNotCovered, CRUMB_MISS_NOT_COVERED, 7));
static_assert(Frozen(MissReason::kBusy, CRUMB_MISS_BUSY, 8));
static_assert(Frozen(MissReason::kUnavailable, CRUMB_MISS_UNAVAILABLE, 64));
static_assert(Frozen(CommitOutcome::kStored, CRUMB_PUT_STORED, 1));
static_assert(Frozen(CommitOutcome::kDeduplicated, CRUMB_PUT_DEDUPLICATED, 2));
static_assert(Frozen(CommitOutcome::kRefused, CRUMB_PUT_REFUSED, 3));
static_assert(Frozen(CommitOutcome::kNoRoom, CRUMB_PUT_NO_ROOM, 4));

std::string LowerCase(std::string_view text) {
  std::string lower;
  for (const char c : text) lower += static_cast<char>(std::tolower(c));
  return lower;
}

// A value that the protocol gains is unknown here until it has a name.
TEST(WireEnums, NamesAreThoseOfTheProtocol) {
  const auto* tiers = v1::Tier_descriptor();
  for (int i = 1; i < tiers->value_count(); ++i) {
    const std::string name = LowerCase(tiers->value(i)->name());
    EXPECT_EQ("tier_" + std::string(TierName(static_cast<Tier>(tiers->value(i)->number()))), name);
  }
  const auto* reasons = v1::MissReason_descriptor();
  for (int i = 1; i < reasons->value_count(); ++i) {
    const auto reason = static_cast<MissReason>(reasons->value(i)->number());
    EXPECT_EQ("miss_reason_" + std::string(MissReasonName(reason)),
              LowerCase(reasons->value(i)->name()));
  }
}

TEST(WireEnums, EveryValueOfTheProtocolIsKnown) {
  EXPECT_EQ(v1::Tier_MAX, static_cast<int>(Tier::kRemote));
  EXPECT_EQ(v1::MissReason_MAX, static_cast<int>(MissReason::kBusy));
  EXPECT_EQ(v1::CommitOutcome_MAX, static_cast<int>(CommitOutcome::kNoRoom));
  EXPECT_EQ(v1::KeyspaceState_MAX, static_cast<int>(KeyspaceState::kBf16));
  EXPECT_EQ(v1::PageFormat_MAX, static_cast<int>(PageFormat::kInt2));
}

TEST(WireEnums, ValuesWithoutANameAreUnknown) {
  EXPECT_EQ(TierName(Tier::kUnknown), "unknown");
  EXPECT_EQ(TierName(static_cast<Tier>(99)), "unknown");
  EXPECT_EQ(MissReasonName(MissReason::kNone), "none");
  EXPECT_EQ(MissReasonName(MissReason::kUnavailable), "unavailable");
  EXPECT_EQ(MissReasonName(static_cast<MissReason>(99)), "unknown");
}

}  // namespace
}  // namespace crumb
