// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/policy.h"

#include <array>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace crumb::storage {
namespace {

struct KnownPolicy {
  const char* name;
  std::unique_ptr<EvictionPolicy> (*make)(size_t capacity_items);
};

constexpr std::array kKnownPolicies = {
    KnownPolicy{"default", MakeDefaultPolicy},
    KnownPolicy{"lru", [](size_t) { return MakeLruPolicy(); }},
    KnownPolicy{"s3fifo", MakeS3FifoPolicy},
    KnownPolicy{"fifo", [](size_t) { return MakeFifoPolicy(); }},
};

}  // namespace

absl::StatusOr<std::unique_ptr<EvictionPolicy>> MakePolicy(std::string_view name,
                                                           size_t capacity_items) {
  for (const KnownPolicy& known : kKnownPolicies) {
    if (name == known.name) return known.make(capacity_items);
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown eviction policy '", std::string(name),
                                                 "'; known are ",
                                                 absl::StrJoin(PolicyNames(), ", ")));
}

std::vector<std::string> PolicyNames() {
  std::vector<std::string> names;
  for (const KnownPolicy& known : kKnownPolicies) names.emplace_back(known.name);
  return names;
}

}  // namespace crumb::storage
