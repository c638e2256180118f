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

// What is known of a prompt without hashing.
struct PromptKeys {
  SharedTokens tokens;        // null: not all of them are known
  std::vector<PageKey> keys;  // of leading full pages, with room for those of all
  PageKeyChain chain;         // behind `keys`
};

// Hashes further pages of a prompt, up to page `end`. `extra` as SequenceOptions has it.
void HashPages(std::span<const int32_t> tokens, std::span<const Digest> extra, size_t end,
               std::vector<PageKey>* keys, PageKeyChain* chain);

// The latest prompts of a worker and the keys of their pages: as far as a prompt begins as one of
// them did its tokens are compared instead of hashed. Thread-safe.
class PromptKeyCache {
 public:
  // Keeps `tokens_max` tokens and kPromptsMax prompts at most, those that were used last.
  explicit PromptKeyCache(size_t tokens_max) : tokens_max_(tokens_max) {}

  // `extra` as SequenceOptions has it.
  PromptKeys Find(const KeyspaceId& keyspace, std::span<const int32_t> tokens,
                  std::span<const Digest> extra);
  // Keeps a prompt whose keys are known now; `keys` are of all its full pages.
  void Keep(const KeyspaceId& keyspace, const SharedTokens& tokens, std::span<const Digest> extra,
            std::span<const PageKey> keys);

  size_t prompts() const;
  size_t tokens() const;  // of all prompts

  static constexpr size_t kPromptsMax = 32;

 private:
  struct Prompt {
    KeyspaceId keyspace;
    SharedTokens tokens;
    std::vector<Digest> extra;  // without zeros at the end
    std::vector<PageKey> keys;

    bool SamePage(size_t page, std::span<const int32_t> of, std::span<const Digest> of_extra) const;
  };
  using Prompts = std::vector<std::shared_ptr<const Prompt>>;

  Prompts Snapshot() const;

  const size_t tokens_max_;
  mutable Mutex mutex_;
  Prompts prompts_ ABSL_GUARDED_BY(mutex_);  // the latest last
  size_t tokens_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb::client
