// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "client/rpc/connection_keeper.h"
#include "client/rpc/pool_link.h"

namespace crumb::client {

// RemotePools joins device pools over the keeper's connection: see PoolLink for the contract.
class RemotePools final : public PoolLink {
 public:
  explicit RemotePools(std::shared_ptr<ConnectionKeeper> keeper) : keeper_(std::move(keeper)) {}

  absl::StatusOr<JoinedPool> Join(const PoolJoin& request) override;
  absl::StatusOr<uint64_t> Reclaim(const DeviceUuid& device, uint64_t bytes) override;
  absl::Status Listen(const PoolName& pool, PoolListener* listener) override {
    return keeper_->Listen(pool, listener);
  }
  void StopListening(PoolListener* listener) override { keeper_->StopListening(listener); }

 private:
  const std::shared_ptr<ConnectionKeeper> keeper_;
};

}  // namespace crumb::client
