// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/token_log.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace crumb::client {

TokenLog::TokenLog(const SegmentRule& rule, const SequenceOptions& options, SequenceStart& start)
    : rule_(rule),
      history_format_(start.keyspace->history_format),
      extra_(options.extra),
      prompt_(static_cast<int>(start.prompt->size())),
      hit_(static_cast<int>(start.pages.size()) * kPageTokens),
      length_(hit_),
      prompt_tokens_(std::move(start.prompt)),
      keys_(std::move(start.prompt_keys)),
      chain_(start.chain) {}

absl::Status TokenLog::CheckNext(std::span<const int32_t> tokens) const {
  if (InPrompt() && !std::equal(tokens.begin(), tokens.end(), prompt_tokens_->begin() + length_)) {
    return absl::InvalidArgumentError("the tokens from position " + std::to_string(length_) +
                                      " on differ from the prompt given to Begin");
  }
  return absl::OkStatus();
}

void TokenLog::Accept(std::span<const int32_t> tokens) {
  if (!InPrompt()) generated_.insert(generated_.end(), tokens.begin(), tokens.end());
  length_ += static_cast<int>(tokens.size());
}

int32_t TokenLog::TokenAt(size_t position) const {
  const size_t prompt = prompt_tokens_->size();
  return position < prompt ? (*prompt_tokens_)[position] : generated_[position - prompt];
}

PageKey TokenLog::KeyOf(int page) {
  while (static_cast<int>(keys_.size()) <= page) {
    const size_t next = keys_.size();
    std::array<int32_t, kPageTokens> tokens;
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = TokenAt(next * kPageTokens + i);
    keys_.push_back(chain_.Next(tokens, next < extra_.size() ? extra_[next] : Digest{}));
  }
  return keys_[page];
}

void TokenLog::Identify(int index, Page& page) {
  page.key = KeyOf(index);
  if (index > 0) page.parent = KeyOf(index - 1);
  page.position = static_cast<uint32_t>(index);
  page.over_int2_prefix = OverInt2Prefix(index);
}

bool TokenLog::OverInt2Prefix(int page) const {
  if (history_format_ != kernels::PageFormat::kInt2) return false;
  const int last = (page + 1) * kPageTokens - 1;
  const int history =
      last < prompt_ ? rule_.PromptHistoryEnd(last, hit_) : rule_.HistoryEnd(last + 1);
  return history > kPageTokens;
}

}  // namespace crumb::client
