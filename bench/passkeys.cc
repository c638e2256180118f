// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/passkeys.h"

#include <algorithm>
#include <array>
#include <random>

#include "common/page_key.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

constexpr int kWindowTokensMax = 320;   // tokens of the recent window at most
constexpr int kContextMin = 640;        // tokens of the shortest context with a key in history
constexpr int kLengthMin = 1024;        // tokens of the shortest document, if the context has them
constexpr int kKeysMax = 16;            // keys per document at most
constexpr int kPartTokens = 80;         // tokens of a document's middle per key at least
constexpr int kQuestionTokensMax = 54;  // leaves room for the answer in one page
constexpr int kLineEndSearch = 40;      // tokens in which the end of a line is searched

constexpr std::array<const char*, 24> kNames = {
    "Ada",  "Bob",   "Clara", "David", "Emma",   "Frank", "Grace",  "Henry",
    "Iris", "Jack",  "Kate",  "Leo",   "Mary",   "Nina",  "Oscar",  "Paul",
    "Rosa", "Simon", "Tina",  "Uma",   "Victor", "Wendy", "Xavier", "Yara"};

int KeysIn(int length) {
  return std::clamp((length - kPageTokens - kWindowTokensMax) / kPartTokens, 1, kKeysMax);
}

// Returns the fewest, evenly spread lengths whose documents have room for `count` keys.
std::vector<int> LengthsFor(int context, int count) {
  const int longest = context - kPageTokens;
  const int shortest = std::min(longest, std::max(kLengthMin, context / 4));
  std::vector<int> lengths;
  for (int room = 0, documents = 1; room < count; ++documents) {
    lengths.clear();
    room = 0;
    for (int i = 0; i < documents; ++i) {
      const int more = documents == 1 ? longest - shortest : 0;
      const int64_t step = int64_t{longest - shortest} * i / std::max(1, documents - 1);
      lengths.push_back((shortest + more + static_cast<int>(step)) / kPageTokens * kPageTokens);
      room += KeysIn(lengths.back());
    }
  }
  return lengths;
}

// Builds one document. The text around its keys begins at token `begin` of `tokens` and wraps
// around.
class DocumentWriter {
 public:
  DocumentWriter(const models::Tokenizer& tokenizer, const std::vector<int32_t>& tokens,
                 size_t begin)
      : tokenizer_(tokenizer), tokens_(tokens), at_(begin) {}

  PasskeyDocument Write(int length, int keys, PasskeyLayout layout, std::mt19937_64& random) {
    document_.apart = layout == PasskeyLayout::kApart;
    const int room = length - kPageTokens - kWindowTokensMax;
    std::vector<int> names(kNames.size());
    for (size_t i = 0; i < names.size(); ++i) names[i] = static_cast<int>(i);
    std::shuffle(names.begin(), names.end(), random);
    for (int i = 0; i < keys; ++i) {
      const int part = room / keys;
      const std::string name = kNames[names[i]];
      const std::string digits = fmt::format("{:05}", 10000 + random() % 90000);
      const std::vector<int32_t> line =
          tokenizer_.Encode(fmt::format("\n# The pass key for {} is {}.\n", name, digits));
      const int slack = std::max(1, part - static_cast<int>(line.size()) - kLineEndSearch);
      FillTo(kPageTokens + i * part + static_cast<int>(random() % slack));
      if (document_.apart) {
        FillTo((static_cast<int>(document_.tokens.size()) + kPageTokens - 1) / kPageTokens *
               kPageTokens);
      } else {
        FillToLineEnd();
      }
      AddKey(name, digits, line);
    }
    FillTo(length);
    return std::move(document_);
  }

 private:
  void FillTo(int length) {
    while (static_cast<int>(document_.tokens.size()) < length) AddText();
  }
  void AddText() { document_.tokens.push_back(tokens_[at_++ % tokens_.size()]); }
  void FillToLineEnd() {
    for (int i = 0; i < kLineEndSearch; ++i) {
      const std::string last = tokenizer_.Decode({&document_.tokens.back(), 1});
      if (last.ends_with('\n')) return;
      AddText();
    }
  }
  void AddKey(const std::string& name, const std::string& digits,
              const std::vector<int32_t>& line) {
    Passkey key;
    key.digits = digits;
    key.question = tokenizer_.Encode(fmt::format("\n# What is the pass key for {}? It is", name));
    key.answer = tokenizer_.Encode(" " + digits);
    key.line = line;
    key.position = static_cast<int>(document_.tokens.size());
    if (!document_.apart) {
      document_.tokens.insert(document_.tokens.end(), line.begin(), line.end());
    }
    document_.keys.push_back(std::move(key));
  }

  const models::Tokenizer& tokenizer_;
  const std::vector<int32_t>& tokens_;
  size_t at_;
  PasskeyDocument document_;
};

}  // namespace

absl::StatusOr<std::vector<PasskeyDocument>> MakePasskeyDocuments(
    const models::Tokenizer& tokenizer, const std::vector<int32_t>& tokens, int context, int count,
    PasskeyLayout layout) {
  if (context < kContextMin || static_cast<int64_t>(tokens.size()) < context) {
    return absl::InvalidArgumentError(
        fmt::format("passkeys need a context of {} tokens and as much text as it has: the context "
                    "is {}, the texts have {} tokens",
                    kContextMin, context, tokens.size()));
  }
  std::mt19937_64 random(1);
  const std::vector<int> lengths = LengthsFor(context, count);
  std::vector<PasskeyDocument> made;
  int left = count;
  for (size_t i = 0; i < lengths.size(); ++i) {
    DocumentWriter writer(tokenizer, tokens, tokens.size() / lengths.size() * i);
    made.push_back(writer.Write(lengths[i], std::min(left, KeysIn(lengths[i])), layout, random));
    left -= static_cast<int>(made.back().keys.size());
    for (const Passkey& key : made.back().keys) {
      if (key.question.size() > kQuestionTokensMax) {
        return absl::InvalidArgumentError("the tokenizer takes too many tokens for a question");
      }
    }
  }
  return made;
}

std::vector<int32_t> PasskeyDocument::TokensWith(const Passkey& key) const {
  if (!apart) return tokens;
  std::vector<int32_t> with = tokens;
  with.insert(with.begin() + key.position, key.line.begin(), key.line.end());
  with.resize(tokens.size());
  return with;
}

bool PasskeyUndecided(std::string_view generated) {
  const size_t first = std::min(generated.find_first_not_of(' '), generated.size());
  const std::string_view rest = generated.substr(first);
  return rest.size() <= 5 && rest.find_first_not_of("0123456789") == std::string_view::npos;
}

bool AnswersPasskey(std::string_view generated, std::string_view digits) {
  const size_t first = std::min(generated.find_first_not_of(' '), generated.size());
  const std::string_view rest = generated.substr(first);
  if (!rest.starts_with(digits)) return false;
  return rest.size() == digits.size() || rest[digits.size()] < '0' || rest[digits.size()] > '9';
}

}  // namespace crumb::bench
