// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "crumb/sequence.h"
#include "models/logits.h"

namespace crumb::tiny_lm {

// Comparison compares the worker's run with one with BF16 keys and values, token by token, over the
// prompt tokens that the worker computes itself and the generated ones.
struct Comparison {
  int hit_tokens = 0;  // hits of the compared run, which may be pages of the first run
  models::LogitAgreement agreement;
};

// RunReport has the results of one run of crumb-tiny-lm.
struct RunReport {
  std::string text;  // the generated text
  int generated_tokens = 0;
  double ttft_seconds = 0;    // lookup, fetch and prefill, up to the first generated token
  double decode_seconds = 0;  // time for all further tokens
  double history_bits_per_element = 0;  // average over one history page
  client::SequenceStats stats;          // statistics when the generation has ended
  uint64_t published_pages = 0;         // stored by crumbd or in the cache already
  uint64_t dropped_pages = 0;
  std::string store_state;  // "connected", "off", or why there is no connection
  std::optional<Comparison> comparison;
};

std::string ToJson(const RunReport& report);
std::string ToText(const RunReport& report);

}  // namespace crumb::tiny_lm
