// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/synthetic_traces.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <queue>
#include <random>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace crumb::bench {
namespace {

// Random numbers. The standard defines the bits of the engine but not of its distributions, which
// are therefore implemented here.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}

  double Fraction() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }  // [0, 1)
  uint64_t Between(uint64_t least, uint64_t most) {
    return least + static_cast<uint64_t>(Fraction() * static_cast<double>(most - least + 1));
  }

 private:
  std::mt19937_64 engine_;
};

// Draws ranks 0, 1, ... with probability proportional to 1 / (rank + 1)^exponent.
class Zipf {
 public:
  Zipf(size_t ranks, double exponent) : cumulative_(ranks) {
    double sum = 0;
    for (size_t rank = 0; rank < ranks; ++rank) {
      sum += std::pow(static_cast<double>(rank + 1), -exponent);
      cumulative_[rank] = sum;
    }
  }

  size_t Draw(Dice& dice) const {
    const double at = dice.Fraction() * cumulative_.back();
    return static_cast<size_t>(std::upper_bound(cumulative_.begin(), cumulative_.end(), at) -
                               cumulative_.begin());
  }

 private:
  std::vector<double> cumulative_;
};

// Documents that share no blocks.
class Library {
 public:
  using Document = std::vector<uint64_t>;

  Document Fresh(size_t blocks) {
    Document document(blocks);
    std::iota(document.begin(), document.end(), next_block_);
    next_block_ += blocks;
    return document;
  }

  std::vector<Document> Shelf(size_t documents, Dice& dice) {
    std::vector<Document> shelf;
    for (size_t i = 0; i < documents; ++i) shelf.push_back(Fresh(dice.Between(1, 16)));
    return shelf;
  }

 private:
  uint64_t next_block_ = 0;
};

constexpr double kZipfExponent = 0.9;
constexpr size_t kPrompts = 40000;
constexpr size_t kDocuments = 4000;

BlockTrace MakeZipf(Dice& dice) {
  Library library;
  const std::vector<Library::Document> shelf = library.Shelf(kDocuments, dice);
  const Zipf zipf(shelf.size(), kZipfExponent);
  BlockTrace trace;
  for (size_t i = 0; i < kPrompts; ++i) trace.Add(shelf[zipf.Draw(dice)]);
  return trace;
}

BlockTrace MakeScan(Dice& dice) {
  constexpr size_t kHotDocuments = 1000;
  constexpr size_t kPromptsBetweenScans = 500;
  constexpr size_t kScanPrompts = 100;
  constexpr size_t kScanBlocks = 32;
  Library library;
  const std::vector<Library::Document> shelf = library.Shelf(kHotDocuments, dice);
  const Zipf zipf(shelf.size(), kZipfExponent);
  BlockTrace trace;
  for (size_t i = 1; i <= kPrompts; ++i) {
    trace.Add(shelf[zipf.Draw(dice)]);
    if (i % kPromptsBetweenScans != 0) continue;
    for (size_t k = 0; k < kScanPrompts; ++k) trace.Add(library.Fresh(kScanBlocks));
  }
  return trace;
}

BlockTrace MakeLoop(Dice& dice) {
  constexpr size_t kLoopDocuments = 300;
  constexpr size_t kRounds = 40;
  Library library;
  const std::vector<Library::Document> shelf = library.Shelf(kLoopDocuments, dice);
  BlockTrace trace;
  for (size_t round = 0; round < kRounds; ++round) {
    for (const Library::Document& document : shelf) trace.Add(document);
  }
  return trace;
}

BlockTrace MakeDrift(Dice& dice) {
  constexpr size_t kPromptsBetweenSwaps = 4000;
  Library library;
  std::vector<Library::Document> shelf = library.Shelf(kDocuments, dice);
  const Zipf zipf(shelf.size(), kZipfExponent);
  BlockTrace trace;
  for (size_t i = 1; i <= kPrompts; ++i) {
    trace.Add(shelf[zipf.Draw(dice)]);
    if (i % kPromptsBetweenSwaps != 0) continue;
    for (size_t swap = 0; swap < shelf.size() / 8; ++swap) {
      std::swap(shelf[dice.Between(0, shelf.size() - 1)], shelf[dice.Between(0, shelf.size() - 1)]);
    }
  }
  return trace;
}

struct Chat {
  double due = 0;  // prompts since the beginning
  uint64_t number = 0;
  uint64_t turns_left = 0;
  Library::Document prompt;  // all blocks so far
};

struct DueLater {
  bool operator()(const Chat& a, const Chat& b) const {
    return std::tie(a.due, a.number) > std::tie(b.due, b.number);
  }
};

BlockTrace MakeChats(Dice& dice) {
  constexpr uint64_t kChats = 6000;
  constexpr uint64_t kTurnsMax = 30;
  constexpr double kTurnsMean =
      5;  // prompts per chat, approximately, which spaces their beginnings
  constexpr size_t kBeginnings = 8;
  constexpr double kGapMin = 10;
  constexpr double kGapMax = 2000;
  Library library;
  std::vector<Library::Document> beginnings;
  for (size_t i = 0; i < kBeginnings; ++i) beginnings.push_back(library.Fresh(dice.Between(1, 6)));
  std::priority_queue<Chat, std::vector<Chat>, DueLater> chats;
  for (uint64_t i = 0; i < kChats; ++i) {
    // Most chats are short, because the number of turns is log-uniform.
    const double turns = std::pow(static_cast<double>(kTurnsMax + 1), dice.Fraction());
    chats.push({.due = static_cast<double>(i) * kTurnsMean,
                .number = i,
                .turns_left = static_cast<uint64_t>(turns),
                .prompt = beginnings[dice.Between(0, kBeginnings - 1)]});
  }
  BlockTrace trace;
  while (!chats.empty()) {
    Chat chat = chats.top();
    chats.pop();
    const Library::Document added = library.Fresh(dice.Between(1, 8));
    chat.prompt.insert(chat.prompt.end(), added.begin(), added.end());
    trace.Add(chat.prompt);
    if (--chat.turns_left == 0) continue;
    chat.due += kGapMin * std::pow(kGapMax / kGapMin, dice.Fraction());
    chats.push(std::move(chat));
  }
  return trace;
}

struct Family {
  const char* name;
  BlockTrace (*make)(Dice& dice);
};

constexpr std::array kFamilies = {
    Family{"zipf", MakeZipf},   Family{"scan", MakeScan},   Family{"loop", MakeLoop},
    Family{"chats", MakeChats}, Family{"drift", MakeDrift},
};

}  // namespace

std::vector<std::string> SyntheticFamilyNames() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) names.emplace_back(family.name);
  return names;
}

absl::StatusOr<BlockTrace> MakeSyntheticTrace(std::string_view family, uint64_t seed) {
  for (const Family& known : kFamilies) {
    if (family != known.name) continue;
    Dice dice(seed);
    return known.make(dice);
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown trace family '", std::string(family),
                                                 "'; known are ",
                                                 absl::StrJoin(SyntheticFamilyNames(), ", ")));
}

absl::StatusOr<BlockTrace> LoadTrace(const std::string& path, const std::string& family,
                                     uint64_t seed) {
  if (path.empty() == family.empty()) {
    return absl::InvalidArgumentError("name either a trace or a synthetic family");
  }
  return path.empty() ? MakeSyntheticTrace(family, seed) : ReadTraceFile(path);
}

}  // namespace crumb::bench
