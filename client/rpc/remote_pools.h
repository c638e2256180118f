// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "client/rpc/pool_link.h"
#include "client/rpc/reconnector.h"

namespace crumb::client {

// RemotePools joins device pools over the reconnector's connection: see PoolLink for the contract.
//
// Calls with descriptors (join, handles) go over crumbd.fd.sock, one at a time; calls about slots
// are gRPC calls. A session is bound to the connection over which the pool was joined: after a
// reconnection DevicePool joins again.
class RemotePools final : public PoolLink {
 public:
  explicit RemotePools(std::shared_ptr<Reconnector> reconnector)
      : reconnector_(std::move(reconnector)) {}

  absl::StatusOr<JoinedPool> Join(const PoolJoin& request) override;
  absl::StatusOr<uint64_t> Reclaim(const DeviceUuid& device, uint64_t bytes) override;
  absl::Status Listen(const PoolName& pool, PoolListener* listener) override {
    return reconnector_->Listen(pool, listener);
  }
  void StopListening(PoolListener* listener) override { reconnector_->StopListening(listener); }

 private:
  const std::shared_ptr<Reconnector> reconnector_;
};

}  // namespace crumb::client
