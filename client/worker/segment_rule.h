// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "common/page_key.h"

namespace crumb::client {

// SegmentRule says which positions of a sequence are attended from which segment. All results are
// multiples of kPageTokens; positions count from the sequence's first token.
//
//     0         64                      history end              length
//     | sink    | history pages          | recent window, BF16    |
// In the prompt the history ends at the begin of the token's prefill block, or at the hit's end if
// that is later; afterwards it ends 256 to 319 tokens before `length`.
//
// CPU and GPU sequences use the one rule, so that both attend, and store, the same bytes.
struct SegmentRule {
  int recent_tokens = 256;
  int prefill_block = 8192;

  static constexpr int FloorPage(int position) { return position / kPageTokens * kPageTokens; }

  // Number of leading tokens that a hit may supply to a prompt of `prompt` tokens: none of the last
  // recent_tokens in INT2, and at least one token is left to compute.
  constexpr int HitTokensMax(int prompt) const {
    if (prompt <= kPageTokens) return 0;
    return std::max(kPageTokens, FloorPage(std::max(0, prompt - recent_tokens)));
  }

  // End of the history when the sequence has `length` tokens and the prompt is over.
  constexpr int HistoryEnd(int length) const {
    return std::max(kPageTokens, FloorPage(std::max(0, length - recent_tokens)));
  }

  // End of the history for the prompt token at `position`, after a hit of `hit` tokens.
  constexpr int PromptHistoryEnd(int position, int hit) const {
    return std::max({kPageTokens, BlockBegin(position), hit});
  }

  constexpr int BlockBegin(int position) const { return position / prefill_block * prefill_block; }

  // First position, apart from the sink, whose BF16 row a sequence of `length` tokens still needs.
  constexpr int RowsBegin(int length, int prompt, int hit) const {
    const int decode = HistoryEnd(length);
    if (length >= prompt) return std::max(hit, decode);
    return std::max({kPageTokens, hit, std::min(BlockBegin(length), decode)});
  }
};

}  // namespace crumb::client
