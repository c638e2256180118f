// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/descriptor_check.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

#include "common/errno_status.h"
#include "fmt/format.h"

namespace crumb::server {
namespace {

// RocksDB keeps 64 files open; gRPC's threads, listeners, the admin port's connections and peers
// take the rest.
constexpr uint64_t kFixed = 512;
constexpr uint64_t kPerSlab = 2;  // one to write, one for readers
// Extents of large folders have 256 MiB; a small folder has at most 16
// (docs/formats/ssd-folder.md).
constexpr uint64_t kExtentBytesMin = uint64_t{256} << 20;
constexpr uint64_t kExtentsMin = 16;
constexpr uint64_t kPerSession = 5;  // three sockets, pidfd, staging memory

uint64_t Pieces(uint64_t bytes, uint64_t piece) {
  return piece == 0 ? 0 : (bytes + piece - 1) / piece;
}

}  // namespace

DescriptorNeeds DescriptorNeedsOf(const Options& options) {
  const storage::HostOptions& host = options.store.host;
  DescriptorNeeds needs;
  needs.fixed = kFixed;
  // A process that takes over has the slabs of the one before beside its own.
  needs.slabs = 2 * kPerSlab * Pieces(host.bytes_max.value, host.slab_bytes.value);
  if (!options.store.ssd.path.empty()) {
    needs.extents =
        std::max(kExtentsMin, Pieces(options.store.ssd.bytes_max.value, kExtentBytesMin));
  }
  needs.sessions = kPerSession * static_cast<uint64_t>(options.sessions.sessions_max);
  needs.connections = static_cast<uint64_t>(options.limits.connections_max);
  const uint64_t handles = static_cast<uint64_t>(options.device_pools.pools_max) *
                           static_cast<uint64_t>(options.device_pools.handles_max);
  const auto budget = static_cast<uint64_t>(options.device_pools.descriptors_max);
  // With descriptors_max 0, device pools take at most half of the limit, so the limit must be twice
  // the need of everything else.
  needs.pool_handles =
      std::min(handles, budget > 0 ? budget : needs.certain() + needs.sessions + needs.connections);
  return needs;
}

absl::StatusOr<std::vector<std::string>> CheckDescriptors(const DescriptorNeeds& needs) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return ErrnoStatus(errno, "getrlimit");
  if (limit.rlim_cur < needs.all() && limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return ErrnoStatus(errno, "setrlimit");
  }
  const uint64_t allowed = limit.rlim_cur;
  if (allowed < needs.certain()) {
    return absl::ResourceExhaustedError(fmt::format(
        "crumbd needs {} file descriptors for slabs, {} for extents and {} besides, and may open "
        "{}: raise the hard limit (LimitNOFILE= in systemd, ulimit -Hn), or raise "
        "store.host.slab_bytes",
        needs.slabs, needs.extents, needs.fixed, allowed));
  }
  std::vector<std::string> lines = {fmt::format(
      "descriptors: slabs and files take up to {}, sessions up to {}, connections up to "
      "{}, {} are reserved for device pools; crumbd may open {}",
      needs.certain(), needs.sessions, needs.connections, needs.pool_handles, allowed)};
  if (allowed < needs.all()) {
    lines.push_back(
        fmt::format("descriptors: {} are missing when sessions.sessions_max processes, "
                    "limits.connections_max connections and full device pools come together: "
                    "raise the hard limit (LimitNOFILE= in systemd, ulimit -Hn), or lower "
                    "limits.connections_max and device_pools.descriptors_max",
                    needs.all() - allowed));
  }
  return lines;
}

}  // namespace crumb::server
