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

// SequenceStart is the state with which a sequence begins: its prompt, keys and cached prefix.
//
// SequenceStarter fills it in, and CpuSequence or GpuSequence takes its members over. Its pages are
// the hit, the first page first, and may be fewer than crumbd has.
struct SequenceStart {
  std::shared_ptr<const KeyspaceBinding> keyspace;
  std::shared_ptr<const std::vector<int32_t>> prompt;
  std::vector<PageKey> prompt_keys;                // keys of all full pages of the prompt
  PageKeyChain chain;                              // chain behind prompt_keys
  std::vector<std::shared_ptr<const Page>> pages;  // the cached prefix
  std::shared_ptr<const Lease> lease;              // kept for the ranks that follow, or null
  uint64_t lease_id = 0;
  SequenceStats stats;
};

}  // namespace crumb::client
