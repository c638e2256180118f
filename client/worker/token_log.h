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

// The tokens of one sequence and what follows from them alone: how far the prompt goes, the keys of
// its pages. Copyable; not thread-safe.
class TokenLog {
 public:
  // Takes prompt, keys and chain of `start`, whose pages are the hit.
  TokenLog(const SegmentRule& rule, const SequenceOptions& options, SequenceStart& start);

  int length() const { return length_; }  // tokens held; the hit's at first
  int prompt() const { return prompt_; }
  int hit() const { return hit_; }
  bool InPrompt() const { return length_ < prompt_; }

  // kInvalidArgument: the sequence is in its prompt and these tokens are not its next ones.
  absl::Status CheckNext(std::span<const int32_t> tokens) const;
  void Accept(std::span<const int32_t> tokens);

  // Of a page whose tokens are all known.
  PageKey KeyOf(int page);
  // Sets key, parent, position and over_int2_prefix.
  void Identify(int index, Page& page);

 private:
  int32_t TokenAt(size_t position) const;
  // Whether a token of the page had INT2 pages before it when it was computed.
  bool OverInt2Prefix(int page) const;

  SegmentRule rule_;
  kernels::PageFormat history_format_;
  std::vector<Digest> extra_;
  int prompt_;
  int hit_;
  int length_;
  std::shared_ptr<const std::vector<int32_t>> prompt_tokens_;
  std::vector<int32_t> generated_;
  std::vector<PageKey> keys_;  // of full pages, as far as they are known
  PageKeyChain chain_;         // stands behind keys_
};

}  // namespace crumb::client
