// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "common/config_visitor.h"

namespace crumb::storage {

struct HostOptions {
  ByteSize bytes_max{uint64_t{1} << 30};   // all slabs together
  ByteSize slab_bytes{uint64_t{1} << 28};  // one memory file
  bool huge_pages = false;
  std::string policy = "default";
  // With slabs of tenants: how long a slab that was given up may stay mapped before it is revoked.
  Duration let_go_timeout = std::chrono::seconds(10);
  int64_t revoked_slabs_max = 4;         // limit for all tenants together, across takeovers
  int64_t revoked_slabs_per_tenant = 2;  // limit for one tenant

  void Visit(ConfigVisitor& visitor);
};

struct SsdOptions {
  std::string path;                       // empty: no SSD tier
  ByteSize bytes_max{uint64_t{8} << 30};  // all files in the folder together, at every moment
  int64_t fragments_max = 16'777'216;     // limit for all pages together
  std::string policy = "default";
  std::string admission = "all";  // "all" or "second_hit"
  int64_t io_threads = 8;
  int64_t write_queue_pages_max = 4096;
  int64_t read_queue_pages_max = 16384;
  bool direct_io = true;
  std::string key_file;  // AES-256 key for the pages; empty: not encrypted

  void Visit(ConfigVisitor& visitor);
};

struct DeviceOptions {
  std::string policy = "default";
  int64_t demotions_max = 256;  // slots of one pool being copied down at a time
  // Percentage of a pool's slots that are kept free: pages are copied to the host tier in advance.
  int64_t blank_percent_min = 2;

  void Visit(ConfigVisitor& visitor);
};

struct StoreOptions {
  DeviceOptions device;
  HostOptions host;
  SsdOptions ssd;
  Duration pending_for = std::chrono::seconds(10);
  int64_t pending_pages_max = 65536;
  // Fragments of one page, over all tiers. Writers of one model split a page by pipeline stages and
  // by groups of heads, so a page has as many as a replica has GPUs: 64 is eight hosts of eight.
  int64_t page_fragments_max = 64;

  void Visit(ConfigVisitor& visitor);
  // kInvalidArgument naming the first setting that is out of range.
  absl::Status Validate() const;
};

}  // namespace crumb::storage
