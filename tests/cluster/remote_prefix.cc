// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The program that namespaces_test.py --measure runs: prefixes of PAGES pages of about 1 MiB.
//   remote_prefix write SOCKET_FOLDER PREFIXES PAGES    publishes them; prints the last
//                                                       key of every run
//   remote_prefix read SOCKET_FOLDER PREFIX PAGES       leases that one once; prints its duration
//   remote_prefix ucx SERVER HERE IN_FLIGHT PAGES       fetches from a crumb-fragment-server, each
//                                                       page to memory of its own
//   remote_prefix cores A B                             prints how far apart the cores are
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "bench/measure.h"
#include "bench/store_planes.h"
#include "bench/ucx_plane.h"
#include "common/placement.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/core_distance.h"

namespace crumb::bench {
namespace {

constexpr size_t kFragmentBytes = 1 << 20;
constexpr size_t kPutPages = 8;
constexpr Duration kWait = std::chrono::seconds(20);

absl::Status Write(ShmPlane& plane, const FragmentSet& fragments, size_t prefixes, size_t pages) {
  for (size_t first = 0; first < prefixes * pages; first += kPutPages) {
    const absl::Status put = plane.Put(first, std::min(kPutPages, prefixes * pages - first));
    if (!put.ok()) return put;
  }
  for (size_t page = 0; page < prefixes * pages; ++page) {
    const size_t within = page % pages;
    const bool last = within % kRunPages == kRunPages - 1 || within == pages - 1;
    if (last) std::cout << fragments.Key(page).ToHex() << "\n";
  }
  return absl::OkStatus();
}

absl::Status Read(ShmPlane& plane, const FragmentSet& fragments, size_t prefix, size_t pages) {
  std::vector<PageKey> keys;
  for (size_t page = 0; page < pages; ++page) keys.push_back(fragments.Key(prefix * pages + page));
  const auto took = plane.Acquire(prefix * pages, keys, kWait);
  if (!took.ok()) return took.status();
  const auto bytes = static_cast<double>(pages * fragments.tiles_bytes());
  std::cout << nlohmann::json({{"gb_per_s", bytes / ToSeconds(*took) * 1e-9}}).dump() << std::endl;
  return absl::OkStatus();
}

absl::Status OfCrumbd(bool write, const std::string& folder, size_t number, size_t pages) {
  const auto client = ConnectTo(folder);
  if (!client.ok()) return client.status();
  FragmentSet fragments("remote-prefix", kFragmentBytes, size_t{64} << 20, pages);
  const absl::Status bound = BindKeyspace(**client, fragments);
  if (!bound.ok()) return bound;
  ShmPlane plane(**client, fragments);
  return write ? Write(plane, fragments, number, pages) : Read(plane, fragments, number, pages);
}

absl::Status OfUcx(const std::string& server, const std::string& here, size_t in_flight,
                   size_t pages) {
  TimedCallsOptions options;
  options.seconds = 0.5;
  options.bytes_per_call = kFragmentBytes;
  const auto timed =
      RunUcxFetches(options, server, kFragmentBytes, pages, in_flight, here, UcxRooms::kOnePerPage);
  if (!timed.ok()) return timed.status();
  std::cout << nlohmann::json({{"gb_per_s", timed->gb_per_s}}).dump() << std::endl;
  return absl::OkStatus();
}

absl::Status OfCores(int one, int other) {
  const auto distance = CoreDistanceNs(one, other);
  if (!distance.ok()) return distance.status();
  std::cout << nlohmann::json({{"ns", *distance}}).dump() << std::endl;
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "cores" && argc == 4) {
    const absl::Status status = OfCores(std::atoi(argv[2]), std::atoi(argv[3]));
    if (!status.ok()) std::cerr << status.ToString() << std::endl;
    return status.ok() ? 0 : 1;
  }
  if (argc != (what == "ucx" ? 6 : 5)) return 2;
  const size_t count = std::strtoull(argv[argc - 2], nullptr, 10);
  const size_t pages = std::strtoull(argv[argc - 1], nullptr, 10);
  const absl::Status status = what == "ucx" ? OfUcx(argv[2], argv[3], count, pages)
                                            : OfCrumbd(what == "write", argv[2], count, pages);
  if (!status.ok()) std::cerr << status.ToString() << std::endl;
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) { return crumb::bench::Main(argc, argv); }
