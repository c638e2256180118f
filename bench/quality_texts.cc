// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_texts.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <unordered_set>

#include "common/json_file.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

constexpr int64_t kTextBytesMax = int64_t{1} << 30;
// Any passage of 2,047 bytes holds a whole block that starts at a multiple of 1,024.
constexpr size_t kBlockBytes = 1024;
constexpr uint64_t kBase = 0x9e3779b97f4a7c15;

uint64_t HashOf(const char* bytes) {
  uint64_t hash = 0;
  for (size_t i = 0; i < kBlockBytes; ++i) hash = hash * kBase + static_cast<uint8_t>(bytes[i]);
  return hash;
}

// Hashes of the blocks of `text` at multiples of kBlockBytes.
std::unordered_set<uint64_t> BlocksOf(const std::string& text) {
  std::unordered_set<uint64_t> blocks;
  for (size_t at = 0; at + kBlockBytes <= text.size(); at += kBlockBytes) {
    blocks.insert(HashOf(text.data() + at));
  }
  return blocks;
}

// Where in `text` one of `blocks` begins, at any byte.
std::optional<size_t> FindBlock(const std::string& text,
                                const std::unordered_set<uint64_t>& blocks) {
  if (text.size() < kBlockBytes) return std::nullopt;
  uint64_t leading = 1;  // kBase to the power of kBlockBytes
  for (size_t i = 0; i < kBlockBytes; ++i) leading *= kBase;
  uint64_t hash = HashOf(text.data());
  for (size_t at = 0;; ++at) {
    if (blocks.contains(hash)) return at;
    if (at + kBlockBytes >= text.size()) return std::nullopt;
    hash = hash * kBase + static_cast<uint8_t>(text[at + kBlockBytes]) -
           leading * static_cast<uint8_t>(text[at]);
  }
}

}  // namespace

absl::Status CheckTextsApart(const std::vector<std::string>& texts,
                             const std::vector<std::string>& calibration_texts) {
  for (const std::string& calibration : calibration_texts) {
    CRUMB_ASSIGN_OR_RETURN(const std::string learned, ReadFile(calibration, kTextBytesMax));
    const std::unordered_set<uint64_t> blocks = BlocksOf(learned);
    for (const std::string& path : texts) {
      CRUMB_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kTextBytesMax));
      std::error_code error;
      const bool same = std::filesystem::equivalent(path, calibration, error) || text == learned;
      const auto shared = same ? std::optional<size_t>(0) : FindBlock(text, blocks);
      if (!shared) continue;
      return absl::InvalidArgumentError(fmt::format(
          "{} and the calibration text {} share {}: evaluate on text that was not calibrated on",
          path, calibration, same ? "everything" : fmt::format("the passage at byte {}", *shared)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> ReadTokens(const models::Tokenizer& tokenizer,
                                                const std::vector<std::string>& texts) {
  std::vector<int32_t> tokens;
  for (const std::string& path : texts) {
    CRUMB_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kTextBytesMax));
    const std::vector<int32_t> ids = tokenizer.Encode(text);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
  }
  return tokens;
}

std::vector<std::vector<int32_t>> CutSequences(const std::vector<int32_t>& tokens, int length,
                                               int count) {
  const int64_t available = static_cast<int64_t>(tokens.size()) / length;
  const int64_t taken = std::min<int64_t>(available, count);
  std::vector<std::vector<int32_t>> sequences;
  for (int64_t i = 0; i < taken; ++i) {
    const auto begin = tokens.begin() + i * available / taken * length;
    sequences.emplace_back(begin, begin + length);
  }
  return sequences;
}

}  // namespace crumb::bench
