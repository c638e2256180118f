// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/roster.h"
#include "gmock/gmock.h"
#include "server/calls/device_calls.h"
#include "server/calls/lease_calls.h"
#include "server/calls/staging_calls.h"
#include "server/device/device_pools.h"
#include "tests/common/fake_clock.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {

inline constexpr uint64_t kHandleBytes = 1 << 20;
inline constexpr int64_t kSlotsMax = 4096;  // half of the smallest slots in a handle
inline constexpr auto kInvalid = static_cast<uint32_t>(absl::StatusCode::kInvalidArgument);
inline constexpr auto kExhausted = static_cast<uint32_t>(absl::StatusCode::kResourceExhausted);

// Calls about device pools, over the pools and a tier of their own; the other tiers are the
// fixture's.
class DeviceCallsTest : public CallFixture {
 protected:
  DeviceCallsTest()
      : tier_({.device = {},
               .is_below =
                   [this](const storage::FragmentMeta&) {
                     if (auto now = std::exchange(while_evicting_, nullptr)) now();
                     return false;
                   }},
              Clock::Real(), {}),
        pools_(Sizes(), &tier_, clock_, metrics_),
        device_(16, 'd') {
    sessions_.SetMemory(&pools_);
    context_.pools = &pools_;
  }

  static PoolOptions Sizes() {
    PoolOptions options;
    options.pools_max = 4;
    options.handles_max = 8;
    options.slots_max = kSlotsMax;
    options.keep_for = std::chrono::hours(1);
    return options;
  }

  std::shared_ptr<Session> OpenSessionOf(const std::string& tenant) {
    SessionTable::OpenRequest request;
    request.process_name = tenant;
    request.tenant = tenant;
    return sessions_.Open(request).value();
  }

  uint64_t Rejected(Rejection reason) const {
    return metrics_.rejected[static_cast<size_t>(reason)].value();
  }

  static std::vector<UniqueFd> OneFd() {
    std::vector<UniqueFd> fds;
    fds.push_back(CreateRoster().value());  // any memory file
    return fds;
  }

  v1::PoolRequest JoinRequest() const {
    v1::PoolRequest request;
    request.mutable_join()->set_device(device_);
    request.mutable_join()->set_slot_bytes(slot_bytes());
    request.mutable_join()->set_handle_bytes(kHandleBytes);
    return request;
  }
  uint64_t slot_bytes() const { return (tiles_bytes() + 127) / 128 * 128; }

  // Takes part in the pool with a handle; returns its id.
  std::string Join(const std::shared_ptr<Session>& session, bool offer = true) {
    const PoolReply joined = pools_.Handle(session, JoinRequest(), {});
    EXPECT_EQ(joined.response.code(), 0u) << joined.response.error();
    if (offer && joined.response.handles_size() == 0) {
      v1::PoolRequest request;
      request.mutable_offer()->set_pool(joined.response.pool());
      EXPECT_EQ(pools_.Handle(session, request, OneFd()).response.code(), 0u);
    }
    return joined.response.pool();
  }

  std::vector<uint64_t> Reserve(const Session& session, const std::string& pool, uint32_t count,
                                uint64_t number = 0) {
    v1::ReserveRequest request;
    request.set_pool(pool);
    request.set_count(count);
    request.set_request(number);
    v1::ReserveResponse response;
    const absl::Status status = server::Reserve(context_, session, request, &response);
    EXPECT_TRUE(status.ok()) << status;
    return {response.slots().begin(), response.slots().end()};
  }

  std::string Header(int page) const {
    const std::vector<std::byte> fragment = Fragment(Key(page));
    return {reinterpret_cast<const char*>(fragment.data()) + tiles_bytes(),
            fragment.size() - tiles_bytes()};
  }

  absl::Status Commit(const std::shared_ptr<Session>& session, const std::string& pool,
                      uint64_t slot, const std::string& header, v1::CommitResponse* response) {
    v1::CommitRequest request;
    request.set_keyspace(std::string(keyspace_->id.view()));
    request.set_pool(pool);
    request.add_slots(slot);
    request.add_headers(header);
    Completion completion;
    server::Commit(context_, *session, request, response, completion.done());
    EXPECT_EQ(completion.times, 1);
    return completion.status;
  }

  absl::Status Release(Session& session, const std::string& pool,
                       const std::vector<uint64_t>& slots) {
    v1::ReleaseRequest request;
    request.set_pool(pool);
    request.mutable_slots()->Assign(slots.begin(), slots.end());
    v1::ReleaseResponse response;
    return server::Release(context_, session, request, &response);
  }

  // Puts a page without holder into every slot of the pool.
  void FillPool(const std::shared_ptr<Session>& session, const std::string& pool) {
    const auto total = static_cast<uint32_t>(kHandleBytes / slot_bytes());
    for (uint32_t page = 0; page < total; ++page) {
      const auto slots = Reserve(*session, pool, 1);
      ASSERT_THAT(slots, testing::SizeIs(1));
      v1::CommitResponse response;
      ASSERT_TRUE(Commit(session, pool, slots[0], Header(static_cast<int>(page)), &response).ok());
      ASSERT_TRUE(Release(*session, pool, slots).ok());
    }
  }

  uint32_t Code(const std::shared_ptr<Session>& session, const v1::PoolRequest& request,
                std::vector<UniqueFd> fds = {}) {
    return pools_.Handle(session, request, std::move(fds)).response.code();
  }

  // Called once, by the next Reserve that has to evict, between its two looks at the session.
  std::function<void()> while_evicting_;
  FakeClock clock_;  // the clock of the pools
  storage::DeviceTier tier_;
  DevicePools pools_;
  const std::string device_;
};

}  // namespace crumb::server
