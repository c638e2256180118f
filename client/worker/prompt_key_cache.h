// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/mutex.h"
#include "common/page_key.h"

namespace crumb::client {

using SharedTokens = std::shared_ptr<const std::vector<int32_t>>;

// The part of a prompt's page keys that is known without hashing.
struct PromptKeys {
  SharedTokens tokens;  // null unless the whole prompt is in the cache
  // Keys of leading full pages; the capacity suffices for all full pages.
  std::vector<PageKey> keys;
  PageKeyChain chain;  // chain behind the last of `keys`
};

// Appends the keys of further pages of a prompt, up to page `end`. `extra` as in SequenceOptions.
void HashPages(std::span<const int32_t> tokens, std::span<const Digest> extra, size_t end,
               std::vector<PageKey>* keys, PageKeyChain* chain);

// PromptKeyCache keeps a worker's latest prompts and the keys of their pages. A prompt that shares
// a prefix with a cached one is compared with it instead of being hashed. Thread-safe.
//
// Comparing 64 tokens costs a fraction of hashing them, and a conversation's next turn repeats
// nearly all of the last prompt. A prompt that contains a cached one replaces it. The oldest
// prompts leave when tokens or prompts exceed their bound; a prompt longer than tokens_max is not
// kept. Find works on a snapshot, so that it holds no lock while it compares.
class PromptKeyCache {
 public:
  // Keeps the most recently used prompts, up to `tokens_max` tokens and kPromptsMax prompts.
  explicit PromptKeyCache(size_t tokens_max) : tokens_max_(tokens_max) {}

  // Returns the keys of the longest cached prefix of `tokens`. `extra` as in SequenceOptions.
  PromptKeys Find(const KeyspaceId& keyspace, std::span<const int32_t> tokens,
                  std::span<const Digest> extra);
  // Adds a prompt; `keys` are those of all its full pages.
  void Keep(const KeyspaceId& keyspace, const SharedTokens& tokens, std::span<const Digest> extra,
            std::span<const PageKey> keys);

  size_t prompts() const;
  size_t tokens() const;  // sum over all cached prompts

  static constexpr size_t kPromptsMax = 32;

 private:
  struct Prompt {
    KeyspaceId keyspace;
    SharedTokens tokens;
    std::vector<Digest> extra;  // excludes trailing zeros
    std::vector<PageKey> keys;

    // Returns whether page `page` of another prompt has the same tokens and digests.
    bool SamePage(size_t page, std::span<const int32_t> of, std::span<const Digest> of_extra) const;
  };
  using Prompts = std::vector<std::shared_ptr<const Prompt>>;

  // Returns the prompts as of now; they are immutable.
  Prompts Snapshot() const;

  const size_t tokens_max_;
  mutable Mutex mutex_;
  Prompts prompts_ ABSL_GUARDED_BY(mutex_);  // most recently used last
  size_t tokens_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb::client
