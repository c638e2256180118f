// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "models/tokenizer.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"
#include "models/pre_tokenizer.h"

namespace crumb::models {

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& dir) {
  const std::string path = dir + "/tokenizer.json";
  CRUMB_ASSIGN_OR_RETURN(TokenizerDefinition definition, ReadTokenizerFile(path));
  absl::StatusOr<BytePairs> pairs = BytePairs::Build(
      std::move(definition.tokens), definition.merges, definition.whole_first, definition.unknown);
  if (!pairs.ok()) {
    return absl::Status(pairs.status().code(), path + ": " + std::string(pairs.status().message()));
  }
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::move(definition), *std::move(pairs)));
}

Tokenizer::Tokenizer(TokenizerDefinition definition, BytePairs pairs)
    : nfc_(definition.nfc),
      pattern_(definition.pattern),
      pairs_(std::move(pairs)),
      begin_(std::move(definition.begin)),
      bytes_of_(std::move(definition.bytes_of)) {
  for (AddedToken& token : definition.added) {
    AddedTokens& added = token.normalized ? added_normalized_ : added_raw_;
    added[token.text.front()].emplace_back(std::move(token.text), token.id);
  }
  for (AddedTokens* added : {&added_raw_, &added_normalized_}) {
    for (auto& [first, tokens] : *added) {
      std::stable_sort(tokens.begin(), tokens.end(), [](const auto& a, const auto& b) {
        return a.first.size() > b.first.size();
      });
    }
  }
}

template <typename Between>
void Tokenizer::CutAtAddedTokens(std::string_view text, const AddedTokens& added,
                                 const Between& between, std::vector<int32_t>* ids) {
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const auto it = added.find(text[at]);
    const std::pair<std::string, int32_t>* found = nullptr;
    if (it != added.end()) {
      for (const auto& token : it->second) {
        if (text.compare(at, token.first.size(), token.first) != 0) continue;
        found = &token;
        break;
      }
    }
    if (found == nullptr) {
      ++at;
      continue;
    }
    between(text.substr(begin, at - begin));
    ids->push_back(found->second);
    at += found->first.size();
    begin = at;
  }
  between(text.substr(begin));
}

std::vector<int32_t> Tokenizer::Encode(std::string_view text) const {
  std::vector<int32_t> ids;
  const auto encode_plain = [&](std::string_view plain) {
    for (const std::string_view piece : Split(pattern_, plain)) pairs_.Encode(piece, &ids);
  };
  const auto encode_raw = [&](std::string_view raw) {
    const std::string normalized = nfc_ ? ToNfc(raw) : std::string(raw);
    CutAtAddedTokens(normalized, added_normalized_, encode_plain, &ids);
  };
  CutAtAddedTokens(text, added_raw_, encode_raw, &ids);
  return ids;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) {
    if (id >= 0 && id < size()) text += bytes_of_[static_cast<size_t>(id)];
  }
  return text;
}

}  // namespace crumb::models
