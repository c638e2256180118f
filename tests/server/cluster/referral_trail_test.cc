// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/referral_trail.h"

#include "gtest/gtest.h"

namespace crumb::server {
namespace {

// A home's response to a request for the runs 4 and 9, of 6 and 2 pages.
class ReferralTrailTest : public testing::Test {
 protected:
  ReferralTrailTest() {
    home_.runs = {4, 9};
    response_.add_hit_pages(0);
    response_.add_hit_pages(0);
  }

  void Refer(uint32_t run, uint32_t pages, const std::vector<std::string>& nodes) {
    v1::PeerReferral* const referral = response_.add_referrals();
    referral->set_run(run);
    referral->set_pages(pages);
    for (const std::string& node : nodes) referral->add_nodes(node);
  }

  std::vector<ReferralTrail> Trails() const { return TrailsOf(home_, response_, {6, 2}); }

  HomeRequest home_;
  v1::PeerAcquireResponse response_;
};

TEST_F(ReferralTrailTest, AReferralNamesTheRunOfTheOperation) {
  Refer(1, 2, {"a", "b"});
  const std::vector<ReferralTrail> trails = Trails();
  ASSERT_EQ(trails.size(), 1);
  EXPECT_EQ(trails[0].run, 9);
  EXPECT_EQ(trails[0].pages, 2);
  EXPECT_EQ(trails[0].nodes, (std::vector<std::string>{"a", "b"}));
}

TEST_F(ReferralTrailTest, ReferralsForOtherRunsOrPagesAreLeftOut) {
  Refer(2, 1, {"a"});           // no such run
  Refer(UINT32_MAX, 1, {"a"});  // no such run
  Refer(1, 3, {"a"});           // more pages than requested
  Refer(1, 0, {"a"});
  EXPECT_TRUE(Trails().empty());
}

TEST_F(ReferralTrailTest, ARunWithHitsOrWithAReferralIsNotReferredAgain) {
  response_.set_hit_pages(0, 1);
  Refer(0, 6, {"a"});
  Refer(1, 2, {"b"});
  Refer(1, 1, {"c"});
  const std::vector<ReferralTrail> trails = Trails();
  ASSERT_EQ(trails.size(), 1);
  EXPECT_EQ(trails[0].nodes, std::vector<std::string>{"b"});
}

TEST_F(ReferralTrailTest, AHomeCannotSendACallerToMoreNodesThanTheBound) {
  Refer(0, 6, std::vector<std::string>(100, "a"));
  EXPECT_EQ(Trails().at(0).nodes.size(), HolderDirectory::kReferralNodesMax);
}

TEST(ReferralTrailShortfallsTest, NameTheRunTheNodeAndItsPages) {
  ReferralTrail trail;
  trail.lacking = {{"a", 2}, {"b", 0}};
  v1::PeerAcquireRequest message;
  AddShortfalls(trail, 3, &message);
  ASSERT_EQ(message.not_at_size(), 2);
  EXPECT_EQ(message.not_at(0).run(), 3);
  EXPECT_EQ(message.not_at(0).node(), "a");
  EXPECT_EQ(message.not_at(0).pages(), 2);
  EXPECT_EQ(message.not_at(1).pages(), 0);
}

TEST(HomeRequestsTest, AResponseHasTheSizesThatTheRequestImplies) {
  v1::PeerAcquireRequest request;
  request.add_runs(std::string(2 * sizeof(PageKey), 'k'));
  v1::PeerAcquireResponse response;
  EXPECT_FALSE(Fits(request, response));  // no count for the run
  response.add_hit_pages(2);
  response.add_tile_bytes(64);
  response.add_tile_bytes(64);
  EXPECT_FALSE(Fits(request, response));  // pages without a session
  response.set_session(std::string(sizeof(transport::SessionToken), 's'));
  EXPECT_TRUE(Fits(request, response));
  response.add_tile_bytes(64);
  EXPECT_FALSE(Fits(request, response));  // three sizes for two pages
  response.set_hit_pages(0, 3);
  EXPECT_FALSE(Fits(request, response));  // more pages than the run has
}

}  // namespace
}  // namespace crumb::server
