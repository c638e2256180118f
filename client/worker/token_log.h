// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/worker/segment_rule.h"
#include "client/worker/sequence_start.h"
#include "common/page_key.h"
#include "crumb/sequence.h"
#include "kernels/tile.h"

namespace crumb::client {

// TokenLog keeps the tokens of one sequence, its position in the prompt and the keys of its pages.
// Copyable; not thread-safe.
//
// Keys of the prompt come from SequenceStart; those of generated pages are hashed when a page
// becomes complete, 64 tokens at a time.
class TokenLog {
 public:
  // Moves prompt, keys and chain out of `start`, whose pages are the hit.
  TokenLog(const SegmentRule& rule, const SequenceOptions& options, SequenceStart& start);

  int length() const { return length_; }  // number of tokens held, which starts with the hit's
  int prompt() const { return prompt_; }
  int hit() const { return hit_; }
  bool InPrompt() const { return length_ < prompt_; }

  // kInvalidArgument: the sequence is in its prompt and `tokens` are not the next ones.
  absl::Status CheckNext(std::span<const int32_t> tokens) const;
  // Adds accepted tokens, behind those that are held. REQUIRES: CheckNext has passed.
  void Accept(std::span<const int32_t> tokens);

  // Returns the key of a page. REQUIRES: all its tokens are known.
  PageKey KeyOf(int page);
  // Sets key, parent, position and over_int2_prefix of `page`, which is page `index`.
  void Identify(int index, Page& page);

 private:
  // Returns a token of the prompt or a generated one.
  int32_t TokenAt(size_t position) const;
  // Returns whether a token of the page had INT2 pages before it when it was computed.
  bool OverInt2Prefix(int page) const;

  SegmentRule rule_;
  kernels::PageFormat history_format_;
  std::vector<Digest> extra_;
  int prompt_;
  int hit_;
  int length_;
  std::shared_ptr<const std::vector<int32_t>> prompt_tokens_;
  std::vector<int32_t> generated_;
  std::vector<PageKey> keys_;  // keys of full pages that are known
  PageKeyChain chain_;         // chain behind keys_
};

}  // namespace crumb::client
