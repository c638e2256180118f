// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/prompt_key_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace crumb::client {
namespace {

Digest ExtraOf(std::span<const Digest> extra, size_t page) {
  return page < extra.size() ? extra[page] : Digest{};
}

}  // namespace

bool PromptKeyCache::Prompt::SamePage(size_t page, std::span<const int32_t> of,
                                      std::span<const Digest> of_extra) const {
  const size_t at = page * kPageTokens;
  return std::memcmp(tokens->data() + at, of.data() + at, sizeof(int32_t) * kPageTokens) == 0 &&
         (page >= std::max(extra.size(), of_extra.size()) ||
          ExtraOf(extra, page) == ExtraOf(of_extra, page));
}

void HashPages(std::span<const int32_t> tokens, std::span<const Digest> extra, size_t end,
               std::vector<PageKey>* keys, PageKeyChain* chain) {
  for (size_t page = keys->size(); page < end; ++page) {
    keys->push_back(
        chain->Next(tokens.subspan(page * kPageTokens, kPageTokens), ExtraOf(extra, page)));
  }
}

PromptKeyCache::Prompts PromptKeyCache::Snapshot() const {
  MutexLock lock(&mutex_);
  return prompts_;
}

PromptKeys PromptKeyCache::Find(const KeyspaceId& keyspace, std::span<const int32_t> tokens,
                                std::span<const Digest> extra) {
  const size_t pages = tokens.size() / kPageTokens;
  PromptKeys found{.tokens = nullptr, .keys = {}, .chain = PageKeyChain(keyspace)};
  size_t known = 0;
  const Prompts prompts = Snapshot();
  const Prompt* best = nullptr;
  for (auto next = prompts.rbegin(); next != prompts.rend() && known < pages; ++next) {
    const Prompt& prompt = **next;
    const size_t common = std::min(pages, prompt.keys.size());
    if (prompt.keyspace != keyspace || common <= known) continue;
    // A key determines all pages before it.
    if (known > 0 && prompt.keys[known - 1] != best->keys[known - 1]) continue;
    size_t same = known;
    while (same < common && prompt.SamePage(same, tokens, extra)) ++same;
    if (same == known) continue;
    known = same;
    best = &prompt;
  }
  found.keys.reserve(pages);
  if (known > 0) {
    found.keys.assign(best->keys.begin(), best->keys.begin() + static_cast<std::ptrdiff_t>(known));
    found.chain = PageKeyChain(keyspace, found.keys.back());
  }
  if (known == pages && best != nullptr && std::ranges::equal(*best->tokens, tokens)) {
    found.tokens = best->tokens;
  }
  return found;
}

void PromptKeyCache::Keep(const KeyspaceId& keyspace, const SharedTokens& tokens,
                          std::span<const Digest> extra, std::span<const PageKey> keys) {
  if (keys.empty() || tokens->size() > tokens_max_) return;
  // A prompt that is a prefix of this one is recognized by its last key.
  const auto part_of = [&](const Prompt& prompt) {
    return prompt.keyspace == keyspace && prompt.keys.size() <= keys.size() &&
           prompt.keys.back() == keys[prompt.keys.size() - 1];
  };
  MutexLock lock(&mutex_);
  for (auto there = prompts_.begin(); there != prompts_.end(); ++there) {
    const Prompt& prompt = **there;
    if (prompt.keyspace != keyspace || prompt.keys.size() < keys.size() ||
        prompt.keys[keys.size() - 1] != keys.back()) {
      continue;
    }
    std::rotate(there, there + 1, prompts_.end());
    return;
  }
  size_t replaced = 0;  // tokens of prompts that are parts of this one
  std::erase_if(prompts_, [&](const std::shared_ptr<const Prompt>& prompt) {
    if (!part_of(*prompt)) return false;
    replaced += prompt->tokens->size();
    return true;
  });
  tokens_ -= replaced;
  size_t oldest = 0;
  while (oldest < prompts_.size() &&
         (tokens_ + tokens->size() > tokens_max_ || prompts_.size() - oldest >= kPromptsMax)) {
    tokens_ -= prompts_[oldest++]->tokens->size();
  }
  prompts_.erase(prompts_.begin(), prompts_.begin() + static_cast<std::ptrdiff_t>(oldest));
  auto prompt = std::make_shared<Prompt>();
  prompt->keyspace = keyspace;
  prompt->tokens = tokens;
  prompt->extra.assign(extra.begin(), extra.begin() + static_cast<std::ptrdiff_t>(
                                                          std::min(extra.size(), keys.size())));
  while (!prompt->extra.empty() && prompt->extra.back() == Digest{}) prompt->extra.pop_back();
  prompt->keys.assign(keys.begin(), keys.end());
  prompts_.push_back(std::move(prompt));
  tokens_ += tokens->size();
}

size_t PromptKeyCache::prompts() const {
  MutexLock lock(&mutex_);
  return prompts_.size();
}

size_t PromptKeyCache::tokens() const {
  MutexLock lock(&mutex_);
  return tokens_;
}

}  // namespace crumb::client
