// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/examples/tiny_lm/run_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace crumb::tiny_lm {
namespace {

int ComputedTokens(const client::SequenceStats& stats) {
  return stats.prompt_tokens - stats.hit_tokens();
}

}  // namespace

std::string ToJson(const RunReport& report) {
  const client::SequenceStats& stats = report.stats;
  nlohmann::json json = {
      {"prompt_tokens", stats.prompt_tokens},
      {"hit_tokens",
       {{"worker", stats.hit_tokens_worker},
        {"device", stats.hit_tokens_device},
        {"host", stats.hit_tokens_host},
        {"ssd", stats.hit_tokens_ssd},
        {"remote", stats.hit_tokens_remote}}},
      {"computed_tokens", ComputedTokens(stats)},
      {"miss_reason", stats.miss_reason},
      {"ttft_seconds", report.ttft_seconds},
      {"generated_tokens", report.generated_tokens},
      {"decode_seconds", report.decode_seconds},
      {"fetched_bytes", stats.fetched_bytes},
      {"kept_bytes", stats.held_bytes},
      {"bf16_bytes", stats.held_bytes_bf16},
      {"bits_per_element", stats.bits_per_element()},
      {"history_bits_per_element", report.history_bits_per_element},
      {"published_pages", report.published_pages},
      {"dropped_pages", report.dropped_pages},
      {"store", report.store_state},
      {"text", report.text},
  };
  if (report.comparison) {
    json["kl"] = report.comparison->agreement.mean_kl;
    json["top1"] = report.comparison->agreement.top1;
    json["compared_tokens"] = report.comparison->agreement.rows;
    json["compared_hit_tokens"] = report.comparison->hit_tokens;
  }
  // A token may end inside a character; such bytes are replaced.
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string ToText(const RunReport& report) {
  const client::SequenceStats& stats = report.stats;
  std::string text = report.text + "\n\n";
  text += fmt::format(
      "prompt {} tokens: {} from worker, {} from device memory, {} from host memory, {} from SSD, "
      "{} computed\n",
      stats.prompt_tokens, stats.hit_tokens_worker, stats.hit_tokens_device, stats.hit_tokens_host,
      stats.hit_tokens_ssd, ComputedTokens(stats));
  text += fmt::format(
      "first token after {:.0f} ms, then {:.1f} tokens/s\n", report.ttft_seconds * 1e3,
      report.decode_seconds > 0 ? (report.generated_tokens - 1) / report.decode_seconds : 0.0);
  text += fmt::format("KV {} bytes, {} in BF16: {:.2f} bits per element\n", stats.held_bytes,
                      stats.held_bytes_bf16, stats.bits_per_element());
  text += fmt::format("crumbd: {}, {} pages published, {} dropped\n", report.store_state,
                      report.published_pages, report.dropped_pages);
  if (report.comparison) {
    text += fmt::format("against BF16 over {} tokens: KL {:.4f} nats, top-1 agreement {:.1f} %\n",
                        report.comparison->agreement.rows, report.comparison->agreement.mean_kl,
                        report.comparison->agreement.top1 * 100);
  }
  return text;
}

}  // namespace crumb::tiny_lm
