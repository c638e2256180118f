// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/passkey_recall.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "bench/measure.h"
#include "common/status_macros.h"

namespace crumb::bench {
namespace {

// Tokens that are generated for one passkey at most: five digits and some blanks.
constexpr int kAnswerTokensMax = 12;
// Equal parts of the depths, and of the distances, for which recall is reported.
constexpr int kRecallBins = 5;

std::vector<RecallBin> Bins(const std::vector<std::pair<double, double>>& keys, double from,
                            double to) {
  std::vector<RecallBin> bins;
  for (int i = 0; i < kRecallBins; ++i) {
    RecallBin bin{.from = from + (to - from) * i / kRecallBins,
                  .to = from + (to - from) * (i + 1) / kRecallBins,
                  .count = 0,
                  .recall = {}};
    std::vector<double> right;
    for (const auto& [at, value] : keys) {
      if (at >= bin.from && at < bin.to) right.push_back(value);
    }
    bin.count = static_cast<int>(right.size());
    bin.recall = EstimateOf(right);
    bins.push_back(bin);
  }
  return bins;
}

}  // namespace

double LogSumExp(std::span<const float> row) {
  const double most = *std::max_element(row.begin(), row.end());
  double sum = 0.0;
  for (const float logit : row) sum += std::exp(logit - most);
  return most + std::log(sum);
}

absl::StatusOr<std::vector<KeyScore>> PasskeyRecall::Score(const QualityMethod& method,
                                                           const PasskeyDocument& document) const {
  const std::span<const int32_t> tokens = document.tokens;
  CRUMB_ASSIGN_OR_RETURN(const auto cache, method.begin(tokens.first(kStepTokens)));
  std::vector<KeyScore> scores;
  for (const Passkey& key : document.keys) {
    const size_t until = document.apart ? key.position : tokens.size();
    CRUMB_RETURN_IF_ERROR(Read(*cache, tokens.first(until)));
    CRUMB_ASSIGN_OR_RETURN(const auto branch, cache->Fork());
    CRUMB_RETURN_IF_ERROR(Read(*branch, document.TokensWith(key)));
    CRUMB_ASSIGN_OR_RETURN(const KeyScore score, Ask(*branch, key));
    scores.push_back(score);
  }
  return scores;
}

absl::Status PasskeyRecall::Read(MethodCache& cache, std::span<const int32_t> tokens) const {
  while (cache.length() < static_cast<int>(tokens.size()) && !Interrupted()) {
    const auto step = tokens.subspan(cache.length());
    CRUMB_RETURN_IF_ERROR(engine_
                              .Forward(cache,
                                       step.first(std::min<size_t>(kStepTokens, step.size())),
                                       models::LogitRows::kLast)
                              .status());
  }
  return absl::OkStatus();
}

// One pass over the question and the right answer gives the answer's likelihood. As long as the
// most likely tokens are those of the answer, it also shows the text of greedy generation; only if
// they differ is the text generated token by token.
absl::StatusOr<KeyScore> PasskeyRecall::Ask(MethodCache& cache, const Passkey& key) const {
  std::vector<int32_t> tokens = key.question;
  tokens.insert(tokens.end(), key.answer.begin(), key.answer.end());
  CRUMB_ASSIGN_OR_RETURN(const auto answered, cache.Fork());
  CRUMB_ASSIGN_OR_RETURN(const models::Logits logits,
                         engine_.Forward(*answered, tokens, models::LogitRows::kAll));
  KeyScore score;
  bool matches = true;
  const int first = static_cast<int>(key.question.size()) - 1;
  const int count = static_cast<int>(key.answer.size());
  for (int i = 0; i < count; ++i) {
    const auto row = logits.row(first + i);
    score.answer_nll += (LogSumExp(row) - row[key.answer[i]]) / count;
    matches = matches && models::GreedyToken(row) == key.answer[i];
  }
  std::string text;
  if (matches) {
    const int32_t next = models::GreedyToken(logits.last());
    text = " " + key.digits + tokenizer_.Decode({&next, 1});
  } else {
    CRUMB_ASSIGN_OR_RETURN(text, Generate(cache, key.question));
  }
  score.right = AnswersPasskey(text, key.digits);
  return score;
}

absl::StatusOr<std::string> PasskeyRecall::Generate(MethodCache& cache,
                                                    std::span<const int32_t> question) const {
  CRUMB_ASSIGN_OR_RETURN(models::Logits logits,
                         engine_.Forward(cache, question, models::LogitRows::kLast));
  std::string text;
  for (int i = 0; i < kAnswerTokensMax; ++i) {
    const int32_t token = models::GreedyToken(logits.last());
    text += tokenizer_.Decode({&token, 1});
    if (!PasskeyUndecided(text)) break;
    CRUMB_ASSIGN_OR_RETURN(logits, engine_.Forward(cache, {&token, 1}, models::LogitRows::kLast));
  }
  return text;
}

void SummarizeRecall(std::span<const PasskeyDocument> documents, const DocumentScores& scores,
                     const DocumentScores& baseline, QualityRow& row) {
  std::vector<double> recall, nll, lost, keys;
  std::vector<std::pair<double, double>> by_depth, by_distance;  // second is 1 for a right answer
  for (size_t d = 0; d < documents.size(); ++d) {
    if (!scores[d]) continue;
    double right = 0.0, exact = 0.0, loss = 0.0;
    for (size_t i = 0; i < scores[d]->size(); ++i) {
      const KeyScore& score = (*scores[d])[i];
      const Passkey& key = documents[d].keys[i];
      right += score.right;
      exact += (*baseline[d])[i].right;
      loss += score.answer_nll;
      by_depth.emplace_back(documents[d].DepthOf(key), score.right);
      by_distance.emplace_back(documents[d].DistanceOf(key), score.right);
    }
    const double count = static_cast<double>(scores[d]->size());
    recall.push_back(right / count);
    nll.push_back(loss / count);
    lost.push_back(exact - right);
    keys.push_back(count);
  }
  if (keys.empty()) return;
  row.has_passkeys = true;
  row.passkey.recall = EstimateOf(recall);
  row.passkey.answer_nll = EstimateOf(nll);
  row.passkey.below_bf16 = BootstrapRatio(lost, keys);
  row.passkey.by_depth = Bins(by_depth, 0.0, 1.0);
  row.passkey.by_distance = Bins(by_distance, 0.0, row.context);
}

}  // namespace crumb::bench
