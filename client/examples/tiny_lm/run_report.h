// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "crumb/sequence.h"
#include "models/logits.h"

namespace crumb::tiny_lm {

// The worker's run against one with BF16 keys and values, token by token over the prompt tokens it
// computes itself and the generated ones.
struct Comparison {
  int hit_tokens = 0;  // of the compared run, which may hit pages that the first run made
  models::LogitAgreement agreement;
};

// What one run of crumb-tiny-lm did.
struct RunReport {
  std::string text;  // what was generated
  int generated_tokens = 0;
  double ttft_seconds = 0;    // from the tokens to the first generated one: lookup, fetch, prefill
  double decode_seconds = 0;  // all further tokens
  double history_bits_per_element = 0;  // of one history page
  client::SequenceStats stats;          // at the end of the generation
  uint64_t published_pages = 0;         // stored by crumbd or there already
  uint64_t dropped_pages = 0;
  std::string store_state;  // "connected", "off", or why crumbd is not there
  std::optional<Comparison> comparison;
};

std::string ToJson(const RunReport& report);
std::string ToText(const RunReport& report);

}  // namespace crumb::tiny_lm
