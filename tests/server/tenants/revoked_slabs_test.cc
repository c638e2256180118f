// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A tenant that keeps more slabs than may be revoked: another one goes on being served.
#include <chrono>
#include <deque>
#include <thread>
#include <vector>

#include "tests/server/latency.h"
#include "tests/server/tenants/tenant_slabs_fixture.h"

namespace crumb::server {
namespace {

// Tenant a keeps all it can of more slabs than may be revoked. The slabs that are left for b are
// enough: those that a keeps count as a's.
class RevokedSlabsTest : public ServerTenantSlabsTest {
 protected:
  static constexpr int kManySlabs = 16;
  static constexpr int kRevokedMax = 2, kRevokedPerTenant = 1;

  RevokedSlabsTest() {
    a_.reset();
    b_.reset();
    daemon_.reset();
    options_.store.host.bytes_max = ByteSize{kManySlabs * kSlabBytes};
    options_.store.host.let_go_timeout = std::chrono::milliseconds(50);
    options_.store.host.revoked_slabs_max = kRevokedMax;
    options_.store.host.revoked_slabs_per_tenant = kRevokedPerTenant;
    daemon_ = Daemon::Start(options_).value();
    a_ = Open("token of a");
    b_ = Open("token of b");
    EXPECT_EQ(Store(*b_, 0, kOfB), v1::COMMIT_OUTCOME_STORED);
  }

  // a stores pages, reads them, and keeps a reference to each slab that it got.
  void KeepAll() {
    a_->KeepDescriptors();
    const int pages = static_cast<int>(kManySlabs * kSlabBytes / a_->fragment_bytes());
    for (int page = 0; page < pages; ++page) Store(*a_, page, kOfA);
    ReadAll(*a_, pages, kOfA);
    for (const UniqueFd& fd : a_->KeepDescriptors()) kept_.emplace_back(fd.get());
  }
  double P99OfB() {
    std::vector<double> seconds;
    for (int i = 0; i < 500; ++i) {
      seconds.push_back(SecondsOf([&] {
        v1::AcquireResponse response;
        EXPECT_TRUE(b_->Acquire(TestClient::Keys(0, 1), &response).ok());
        if (response.lease() != 0) {
          EXPECT_TRUE(b_->Release(response.lease()).ok());
        }
      }));
    }
    return P99(seconds);
  }

  std::deque<KeptSlab> kept_;
};

TEST_F(RevokedSlabsTest, WhoKeepsSlabsTakesNoneFromTheOtherTenant) {
  const double alone = P99OfB();
  KeepAll();
  EXPECT_GE(kept_.size(), static_cast<size_t>(kManySlabs / 2));
  int refused = 0;
  // So many pages fill b's slabs several times, for longer than slabs are waited for.
  for (int page = 0; page < 1'000; ++page) {
    if (Store(*b_, page, kOfB) != v1::COMMIT_OUTCOME_STORED) ++refused;
    if (page % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_LE(refused, 1) << "page 0 is there already";
  double attacked = P99OfB();
  for (int i = 0; i < 3 && attacked > 3 * alone + 0.02; ++i) attacked = P99OfB();
  EXPECT_LE(attacked, 3 * alone + 0.02) << "p99 in seconds; alone " << alone;
  EXPECT_EQ(Series("crumb_slabs_revoked_total"), kRevokedPerTenant) << "the tenant's part";
  EXPECT_GE(Series("crumb_slabs{state=\"gone\"}"), 1) << "further ones stay out of use";
  EXPECT_FALSE(b_->Slabs().empty() && ReadAll(*b_, 1'000, kOfB) == 0);
  for (KeptSlab& slab : kept_) EXPECT_FALSE(slab.ShowsB());
}

}  // namespace
}  // namespace crumb::server
