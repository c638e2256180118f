// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "client/worker/keyspace_binding.h"
#include "client/worker/page.h"
#include "common/page_key.h"
#include "crumb/acquire.h"
#include "crumb/sequence.h"

namespace crumb::client {

// What Worker::Begin found for a prompt.
struct SequenceStart {
  std::shared_ptr<const KeyspaceBinding> keyspace;
  std::shared_ptr<const std::vector<int32_t>> prompt;
  std::vector<PageKey> prompt_keys;                // of all its full pages
  PageKeyChain chain;                              // behind prompt_keys
  std::vector<std::shared_ptr<const Page>> pages;  // leading pages that hit
  std::shared_ptr<const Lease> lease;              // kept for the sequences that follow; or null
  uint64_t lease_id = 0;
  SequenceStats stats;
};

}  // namespace crumb::client
