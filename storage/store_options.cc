// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store_options.h"

#include "storage/policy/policy.h"

namespace crumb::storage {
namespace {

constexpr uint64_t kHostBytesMin = uint64_t{1} << 20;
constexpr uint64_t kSsdBytesMin = uint64_t{16} << 20;

absl::Status Refuse(const std::string& text) { return absl::InvalidArgumentError(text); }

}  // namespace

void HostOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("bytes_max", bytes_max, "host memory for pages, taken at start");
  visitor.Field("slab_bytes", slab_bytes, "size of one memory file that workers map");
  visitor.Field("huge_pages", huge_pages, "take 2 MiB pages when the system has reserved them");
  visitor.Field("policy", policy, "order of eviction: default, lru, fifo, s3fifo");
  visitor.Field("let_go_timeout", let_go_timeout,
                "with tenants.shared_memory own: how long processes may keep a slab that they were "
                "requested to unmap before its memory is taken from them");
  visitor.Field(
      "revoked_slabs_max", revoked_slabs_max,
      "slabs taken from processes that kept them, by crumbd and those that take over from "
      "it: pinned pages of each may hold up to slab_bytes beside bytes_max");
  visitor.Field("revoked_slabs_per_tenant", revoked_slabs_per_tenant,
                "how many of these may be one tenant's; its further slabs stay out of use until "
                "its processes let them go");
}

void SsdOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("path", path, "folder of the SSD tier; empty: none");
  visitor.Field("bytes_max", bytes_max, "all files in the folder together, at every moment");
  visitor.Field(
      "fragments_max", fragments_max,
      "fragments on SSD, one a page or more: the index takes some 560 bytes of memory for "
      "each; beyond it pages leave as they do when bytes_max is reached");
  visitor.Field("policy", policy, "order of eviction: default, lru, fifo, s3fifo");
  visitor.Field("admission", admission,
                "pages to write: all, or those read again in host memory (second_hit)");
  visitor.Field("io_threads", io_threads,
                "reads under way at a time; with tenants those of one tenant, and one more runs");
  visitor.Field("write_queue_pages_max", write_queue_pages_max,
                "pages that wait to be written; more are dropped and counted");
  visitor.Field("read_queue_pages_max", read_queue_pages_max,
                "pages that wait to be read; more are misses");
  visitor.Field("direct_io", direct_io, "bypass the page cache where the file system can");
  visitor.Field("key_file", key_file,
                "file with a key that page bytes are encrypted with (AES-256-GCM): 32 bytes or 64 "
                "hexadecimal digits; empty: not encrypted");
}

void DeviceOptions::Visit(ConfigVisitor& visitor) {
  visitor.Field("policy", policy, "order of eviction: default, lru, fifo, s3fifo");
  visitor.Field("demotions_max", demotions_max,
                "slots of one device pool that workers copy down at a time; beyond that, pages "
                "whose slots are needed are dropped");
  visitor.Field("blank_percent_min", blank_percent_min,
                "share of a device pool's slots kept free by copying pages down ahead of need");
}

void StoreOptions::Visit(ConfigVisitor& visitor) {
  visitor.Section("device", [&] { device.Visit(visitor); });
  visitor.Section("host", [&] { host.Visit(visitor); });
  visitor.Section("ssd", [&] { ssd.Visit(visitor); });
  visitor.Field("pending_for", pending_for, "how long a page counts as being committed");
  visitor.Field("pending_pages_max", pending_pages_max,
                "pages that count so at a time; beyond it the tenant with most of them loses its "
                "oldest");
  visitor.Field("page_fragments_max", page_fragments_max,
                "fragments that one page may have: pipeline stages times groups of heads");
}

absl::Status StoreOptions::Validate() const {
  if (host.bytes_max.value < kHostBytesMin || host.slab_bytes.value < kHostBytesMin) {
    return Refuse("host.bytes_max and host.slab_bytes must be 1 MiB or more");
  }
  if (host.let_go_timeout < Duration::zero() || host.revoked_slabs_max < 0 ||
      host.revoked_slabs_per_tenant < 0) {
    return Refuse(
        "host.let_go_timeout, host.revoked_slabs_max and host.revoked_slabs_per_tenant must not be "
        "negative");
  }
  if (auto policy = MakePolicy(host.policy, 1); !policy.ok()) return policy.status();
  if (auto policy = MakePolicy(device.policy, 1); !policy.ok()) return policy.status();
  // A worker remembers no more of one pool.
  if (device.demotions_max < 0 || device.demotions_max > 4096) {
    return Refuse("device.demotions_max must be from 0 to 4096");
  }
  if (device.blank_percent_min < 0 || device.blank_percent_min > 50) {
    return Refuse("device.blank_percent_min must be from 0 to 50");
  }
  if (pending_pages_max < 0 || pending_for < Duration::zero()) {
    return Refuse("pending_pages_max and pending_for must not be negative");
  }
  if (page_fragments_max < 1 || page_fragments_max > 4096) {
    return Refuse("page_fragments_max must be from 1 to 4096");
  }
  if (ssd.path.empty()) return absl::OkStatus();
  if (auto policy = MakePolicy(ssd.policy, 1); !policy.ok()) return policy.status();
  if (ssd.bytes_max.value < kSsdBytesMin) return Refuse("ssd.bytes_max must be 16 MiB or more");
  if (ssd.fragments_max < 1) return Refuse("ssd.fragments_max must be 1 or more");
  if (ssd.admission != "all" && ssd.admission != "second_hit") {
    return Refuse("unknown ssd.admission '" + ssd.admission + "'; known are all, second_hit");
  }
  if (ssd.io_threads < 1 || ssd.io_threads > 256) {
    return Refuse("ssd.io_threads must be between 1 and 256");
  }
  if (ssd.write_queue_pages_max < 1 || ssd.read_queue_pages_max < 1) {
    return Refuse("ssd.write_queue_pages_max and ssd.read_queue_pages_max must be 1 or more");
  }
  return absl::OkStatus();
}

}  // namespace crumb::storage
