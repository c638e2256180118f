// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/device/pool_options.h"

namespace crumb::server {

void PoolOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("pools_max", pools_max, {.most = 65'536},
                "Device pools at once: one for each device, tenant and slot size. 0: none.");
  visitor.Field("handles_max", handles_max, {.least = 1, .most = 1'000'000},
                "Pieces of device memory in one pool; each takes a descriptor.");
  visitor.Field(
      "slots_max", slots_max, {.least = 1, .most = 1'000'000'000},
      "Slots of all pools together, up to each one's last handle; each takes about 30 bytes "
      "of crumbd's memory, and about 600 more while a page is in it.");
  visitor.Field("descriptors_max", descriptors_max, {.most = 100'000'000},
                "Descriptors of all pools together: one for each handle and one for each pool. 0: "
                "half of the limit of open files (RLIMIT_NOFILE) at start.");
  visitor.Field("tenant_percent", tenant_percent, {.least = 1, .most = 100},
                "Part of pools_max, slots_max and descriptors_max that one tenant may take.");
  visitor.Field("named_max", named_max, {.least = 1, .most = 256},
                "Pools that one Acquire may name, and looks into.");
  visitor.Field("keep_for", keep_for, DurationBounds{},
                "How long a pool and its pages are kept that no process takes part in. A starting "
                "worker of the same tenant that needs the memory ends it at once.");
  visitor.Field("keep_from_others", keep_from_others, DurationBounds{},
                "How long such a pool is kept when another tenant needs its memory, or its part "
                "of pools_max, slots_max and descriptors_max.");
}

absl::Status PoolOptions::Validate() const { return CheckValues("device_pools", *this); }

}  // namespace crumb::server
