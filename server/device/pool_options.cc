// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/device/pool_options.h"

#include <string>

namespace crumb::server {

void PoolOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("pools_max", pools_max,
                "Device pools at once: one for each device, tenant and slot size. 0: none.");
  visitor.Field("handles_max", handles_max,
                "Pieces of device memory in one pool; each takes a descriptor.");
  visitor.Field(
      "slots_max", slots_max,
      "Slots of all pools together, up to each one's last handle; each takes about 30 bytes "
      "of crumbd's memory, and about 600 more while a page is in it.");
  visitor.Field("descriptors_max", descriptors_max,
                "Descriptors of all pools together: one for each handle and one for each pool. 0: "
                "half of the limit of open files (RLIMIT_NOFILE) at start.");
  visitor.Field("tenant_percent", tenant_percent,
                "Part of pools_max, slots_max and descriptors_max that one tenant may take.");
  visitor.Field("named_max", named_max, "Pools that one Acquire may name, and looks into.");
  visitor.Field("keep_for", keep_for,
                "How long a pool and its pages are kept that no process takes part in. A starting "
                "worker of the same tenant that needs the memory ends it at once.");
  visitor.Field("keep_from_others", keep_from_others,
                "How long such a pool is kept when another tenant needs its memory, or its part "
                "of pools_max, slots_max and descriptors_max.");
}

absl::Status PoolOptions::Validate() const {
  if (pools_max < 0 || pools_max > 65'536) {
    return absl::InvalidArgumentError("device_pools.pools_max is " + std::to_string(pools_max) +
                                      ", must be from 0 to 65536");
  }
  if (handles_max < 1 || handles_max > 1'000'000) {
    return absl::InvalidArgumentError("device_pools.handles_max is " + std::to_string(handles_max) +
                                      ", must be from 1 to 1000000");
  }
  if (slots_max < 1 || slots_max > 1'000'000'000) {
    return absl::InvalidArgumentError("device_pools.slots_max is " + std::to_string(slots_max) +
                                      ", must be from 1 to 1000000000");
  }
  if (descriptors_max < 0 || descriptors_max > 100'000'000) {
    return absl::InvalidArgumentError("device_pools.descriptors_max is " +
                                      std::to_string(descriptors_max) +
                                      ", must be from 0 to 100000000");
  }
  if (tenant_percent < 1 || tenant_percent > 100) {
    return absl::InvalidArgumentError("device_pools.tenant_percent is " +
                                      std::to_string(tenant_percent) + ", must be from 1 to 100");
  }
  if (named_max < 1 || named_max > 256) {
    return absl::InvalidArgumentError("device_pools.named_max is " + std::to_string(named_max) +
                                      ", must be from 1 to 256");
  }
  if (keep_for < Duration::zero()) {
    return absl::InvalidArgumentError("device_pools.keep_for must not be negative");
  }
  if (keep_from_others < Duration::zero()) {
    return absl::InvalidArgumentError("device_pools.keep_from_others must not be negative");
  }
  return absl::OkStatus();
}

}  // namespace crumb::server
