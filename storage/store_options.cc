// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store_options.h"

#include "common/status_macros.h"
#include "storage/policy/policy.h"

namespace crumb::storage {
namespace {

constexpr uint64_t kHostBytesMin = uint64_t{1} << 20;
constexpr uint64_t kSsdBytesMin = uint64_t{16} << 20;
// A worker remembers no more demotions of one pool.
constexpr int64_t kDemotionsMax = 4096;

}  // namespace

void HostOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("bytes_max", bytes_max, {.least = kHostBytesMin},
                "host memory for pages, taken at start");
  visitor.Field("slab_bytes", slab_bytes, {.least = kHostBytesMin},
                "size of one memory file that workers map");
  visitor.Field("huge_pages", huge_pages, "take 2 MiB pages when the system has reserved them");
  visitor.Field("policy", policy, "order of eviction: default, lru, fifo, s3fifo");
  visitor.Field("let_go_timeout", let_go_timeout, DurationBounds{},
                "how long processes may keep a slab that they were requested to unmap "
                "(tenants.shared_memory own) before its memory is taken from them");
  visitor.Field(
      "revoked_slabs_max", revoked_slabs_max, CountBounds{},
      "slabs taken from processes that kept them, by crumbd and those that take over from "
      "it: pinned pages of each may hold up to slab_bytes beside bytes_max");
  visitor.Field("revoked_slabs_per_tenant", revoked_slabs_per_tenant, CountBounds{},
                "how many of these may be one tenant's; its further slabs stay out of use until "
                "its processes let them go");
}

void SsdOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("path", path, "folder of the SSD tier; empty: none");
  visitor.Field("bytes_max", bytes_max, {.least = kSsdBytesMin},
                "all files in the folder together, at every moment");
  visitor.Field(
      "fragments_max", fragments_max, {.least = 1},
      "fragments on SSD, one a page or more: the index takes some 560 bytes of memory for "
      "each; beyond it pages leave as they do when bytes_max is reached");
  visitor.Field("policy", policy, "order of eviction: default, lru, fifo, s3fifo");
  visitor.Field("admission", admission, {"all", "second_hit"},
                "pages to write: all, or those read again in host memory (second_hit)");
  visitor.Field("io_threads", io_threads, {.least = 1, .most = 256},
                "reads under way at a time; with tenants those of one tenant, and one more runs");
  visitor.Field("write_queue_pages_max", write_queue_pages_max, {.least = 1},
                "pages that wait to be written; more are dropped and counted");
  visitor.Field("read_queue_pages_max", read_queue_pages_max, {.least = 1},
                "pages that wait to be read; more are misses");
  visitor.Field("direct_io", direct_io, "bypass the page cache where the file system can");
  visitor.Field("key_file", key_file,
                "file with a key that page bytes are encrypted with (AES-256-GCM): 32 bytes or 64 "
                "hexadecimal digits; empty: not encrypted");
}

void DeviceOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("policy", policy, "order of eviction: default, lru, fifo, s3fifo");
  visitor.Field("demotions_max", demotions_max, {.most = kDemotionsMax},
                "slots of one device pool that workers copy down at a time; beyond that, pages "
                "whose slots are needed are dropped");
  visitor.Field(
      "blank_percent_min", blank_percent_min, {.most = 50},
      "percentage of a device pool's slots kept free by copying pages down ahead of need");
}

void StoreOptions::Visit(ConfigVisitor& visitor) {
  visitor.Section("device", [&] { device.Visit(visitor); });
  visitor.Section("host", [&] { host.Visit(visitor); });
  visitor.Section("ssd", [&] { ssd.Visit(visitor); });
  visitor.Field("pending_for", pending_for, DurationBounds{},
                "how long a page counts as being committed");
  visitor.Field("pending_pages_max", pending_pages_max, CountBounds{},
                "pages that count so at a time; beyond it the tenant with most of them loses its "
                "oldest");
  visitor.Field("page_fragments_max", page_fragments_max, {.least = 1, .most = 4096},
                "fragments that one page may have: pipeline stages times groups of heads");
}

absl::Status StoreOptions::Validate() const {
  StoreOptions checked = *this;
  if (ssd.path.empty()) checked.ssd = SsdOptions{};  // its values mean nothing then
  CRUMB_RETURN_IF_ERROR(CheckValues("store", checked));
  for (const std::string* policy :
       {&checked.host.policy, &checked.device.policy, &checked.ssd.policy}) {
    CRUMB_RETURN_IF_ERROR(MakePolicy(*policy, 1).status());
  }
  return absl::OkStatus();
}

}  // namespace crumb::storage
