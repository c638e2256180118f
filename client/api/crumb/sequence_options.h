// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <vector>

#include "common/clock.h"
#include "common/sha256.h"

namespace crumb::client {

// Which pages of a sequence other workers may use.
enum class Publish { kAll, kPrompt, kNone };

struct SequenceOptions {
  // Digest of whatever else page i depends on: a cache salt (page 0), images behind placeholder
  // tokens. Pages beyond the end depend on tokens only.
  std::vector<Digest> extra;
  Publish publish = Publish::kAll;
  // How long Begin may wait for cached pages; what is not there by then is computed. Absent:
  // WorkerOptions::begin_deadline; zero: only what this worker and host memory hold.
  std::optional<Duration> deadline;
  // Leading prompt tokens that the cache may supply; absent: all that it has. Rounded down to
  // pages.
  std::optional<int> cached_tokens_max;
};

}  // namespace crumb::client
