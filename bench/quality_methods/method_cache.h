// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "models/kv_cache.h"

namespace crumb::bench {

// The keys and values of one sequence as one method keeps them. Not thread-safe.
class MethodCache : public models::KvCache {
 public:
  // Another sequence that continues from here. Between passes only.
  virtual absl::StatusOr<std::unique_ptr<MethodCache>> Fork() const = 0;
};

}  // namespace crumb::bench
