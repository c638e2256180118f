// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_texts.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <unordered_map>
#include <utility>

#include "common/json_file.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

constexpr int64_t kTextBytesMax = int64_t{1} << 30;
// Bytes of a block. A passage of 2,047 bytes contains a whole block that starts at a multiple of
// 1,024.
constexpr size_t kBlockBytes = 1024;
// The longest shared passage, in bytes: more than the head that files have in common.
constexpr size_t kPassageBytesMax = 8 * kBlockBytes;
// At most 1 / kSharedPart of the evaluated text may be shared.
constexpr int64_t kSharedPart = 8;
constexpr uint64_t kBase = 0x9e3779b97f4a7c15;

uint64_t HashOf(const char* bytes) {
  uint64_t hash = 0;
  for (size_t i = 0; i < kBlockBytes; ++i) hash = hash * kBase + static_cast<uint8_t>(bytes[i]);
  return hash;
}

// The hashes of the blocks of texts at multiples of kBlockBytes, and the texts that own them.
class Blocks {
 public:
  void Add(const std::string& text, size_t owner) {
    for (size_t at = 0; at + kBlockBytes <= text.size(); at += kBlockBytes) {
      owners_.try_emplace(HashOf(text.data() + at), owner);
    }
  }

  // Calls found(at, owner) for every byte of `text` at which one of the blocks begins.
  void Find(const std::string& text, const std::function<void(size_t, size_t)>& found) const {
    if (text.size() < kBlockBytes) return;
    uint64_t leading = 1;  // kBase to the power of kBlockBytes
    for (size_t i = 0; i < kBlockBytes; ++i) leading *= kBase;
    uint64_t hash = HashOf(text.data());
    for (size_t at = 0;; ++at) {
      if (const auto owner = owners_.find(hash); owner != owners_.end()) found(at, owner->second);
      if (at + kBlockBytes >= text.size()) return;
      hash = hash * kBase + static_cast<uint8_t>(text[at + kBlockBytes]) -
             leading * static_cast<uint8_t>(text[at]);
    }
  }

 private:
  std::unordered_map<uint64_t, size_t> owners_;
};

// The blocks that a text shares.
struct Shared {
  int64_t bytes = 0;
  size_t longest = 0;  // bytes of the longest passage
  size_t begin = 0;    // its first byte
  size_t owner = 0;    // owner of its last block
};

Shared SharedOf(const Blocks& blocks, const std::string& text) {
  Shared shared;
  size_t begin = 0, end = 0;  // the current passage
  blocks.Find(text, [&](size_t at, size_t owner) {
    if (at > end || end == 0) begin = end = at;
    shared.bytes += static_cast<int64_t>(at + kBlockBytes - end);
    end = at + kBlockBytes;
    if (end - begin > shared.longest) shared = {shared.bytes, end - begin, begin, owner};
  });
  return shared;
}

absl::Status NotApart(const std::string& text, const std::string& calibration,
                      const std::string& what) {
  return absl::InvalidArgumentError(
      fmt::format("{} and the calibration text {} share {}: evaluate on text that was not "
                  "calibrated on",
                  text, calibration, what));
}

// Returns an error if one of `texts` is the calibration file, whose text is `learned`.
absl::Status RefuseSame(const std::vector<std::string>& texts, const std::string& calibration,
                        const std::string& learned) {
  for (const std::string& path : texts) {
    std::error_code error;
    bool same = std::filesystem::equivalent(path, calibration, error);
    if (!same && !learned.empty() && std::filesystem::file_size(path, error) == learned.size()) {
      CRUMB_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kTextBytesMax));
      same = text == learned;
    }
    if (same) return NotApart(path, calibration, "everything");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int64_t> CheckTextsApart(const std::vector<std::string>& texts,
                                        const std::vector<std::string>& calibration_texts) {
  Blocks blocks;
  for (size_t i = 0; i < calibration_texts.size(); ++i) {
    CRUMB_ASSIGN_OR_RETURN(const std::string learned,
                           ReadFile(calibration_texts[i], kTextBytesMax));
    CRUMB_RETURN_IF_ERROR(RefuseSame(texts, calibration_texts[i], learned));
    blocks.Add(learned, i);
  }
  int64_t shared_bytes = 0, all_bytes = 0;
  std::pair<std::string, std::string> first;  // two files that share a passage
  for (const std::string& path : texts) {
    CRUMB_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kTextBytesMax));
    const Shared shared = SharedOf(blocks, text);
    all_bytes += static_cast<int64_t>(text.size());
    shared_bytes += shared.bytes;
    if (shared.longest >= kPassageBytesMax) {
      return NotApart(path, calibration_texts[shared.owner],
                      fmt::format("the passage at byte {}", shared.begin));
    }
    if (shared.bytes > 0) first = {path, calibration_texts[shared.owner]};
  }
  if (shared_bytes == 0 || shared_bytes * kSharedPart < all_bytes) return shared_bytes;
  return NotApart(
      first.first, first.second,
      fmt::format("passages, in all {} of {} evaluated bytes", shared_bytes, all_bytes));
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
