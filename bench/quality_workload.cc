// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_workload.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>

#include "bench/measure.h"
#include "bench/passkey_recall.h"
#include "bench/passkeys.h"
#include "bench/quality_method_set.h"
#include "bench/quality_texts.h"
#include "common/mutex.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "models/engine.h"
#include "models/kv_cache.h"
#include "models/logits.h"
#include "models/tokenizer.h"
#include "tools/progress_bar.h"

namespace crumb::bench {
namespace {

// BF16 tokens that a long sequence has at least: the sink and the shortest recent window.
constexpr int kWindowTokens = 64 + 256;
// The shortest sequence, in tokens, on which oscar's clips are chosen.
constexpr int kClipTokensMin = 1024;
// The clips among which oscar's are chosen: fractions of the absolute values inside the range.
constexpr std::array<float, 5> kClips = {0.90f, 0.92f, 0.94f, 0.96f, 0.98f};
constexpr const char* kBestOscar = "oscar-best-clip";

// Means over those positions of one sequence whose next token is also in the sequence.
struct SequenceScore {
  double kl = 0.0;
  double kl_prefill = 0.0;
  double log_loss = 0.0;
  double top1 = 0.0;
};

// One score per sequence; empty if the run was interrupted before it.
using SequenceScores = std::vector<std::optional<SequenceScore>>;

// The exact next-token distributions of one step, which are computed once and compared with those
// of every method.
class StepReference {
 public:
  explicit StepReference(const models::Logits& exact) : exact_(exact) {
    log_p_.resize(exact.values.size());
    p_.resize(exact.values.size());
    for (int i = 0; i < exact.rows; ++i) {
      const auto row = exact.row(i);
      norm_.push_back(LogSumExp(row));
      top_.push_back(models::GreedyToken(row));
      for (size_t j = 0; j < row.size(); ++j) {
        log_p_[i * row.size() + j] = row[j] - norm_.back();
        p_[i * row.size() + j] = std::exp(row[j] - norm_.back());
      }
    }
  }

  double LogLoss(int row, int32_t token) const { return norm_[row] - exact_.row(row)[token]; }
  // KL(exact || other) of one row; `norm` is the log-sum-exp of `other`.
  double Kl(int row, std::span<const float> other, double norm) const {
    const size_t begin = row * other.size();
    double kl = 0.0;
    for (size_t j = 0; j < other.size(); ++j) {
      kl += p_[begin + j] * (log_p_[begin + j] - (other[j] - norm));
    }
    return std::max(kl, 0.0);
  }
  int32_t top(int row) const { return top_[row]; }

 private:
  const models::Logits& exact_;
  std::vector<double> norm_, log_p_, p_;
  std::vector<int32_t> top_;
};

class QualityRun {
 public:
  explicit QualityRun(const QualityOptions& options)
      : options_(options), jobs_(options.threads, "crumb-quality") {}

  absl::StatusOr<QualityResult> Run() {
    CRUMB_ASSIGN_OR_RETURN(result_.shared_bytes,
                           CheckTextsApart(options_.texts, options_.calibration_texts));
    if (result_.shared_bytes > 0) {
      Say(fmt::format("{} evaluated bytes are also in the calibration texts, in short passages",
                      result_.shared_bytes));
    }
    CRUMB_RETURN_IF_ERROR(OpenModel());
    if (options_.passkeys > 0) CRUMB_RETURN_IF_ERROR(HidePasskeys());
    CRUMB_RETURN_IF_ERROR(OpenMethods());
    for (const int context : contexts_) {
      if (!Interrupted()) CRUMB_RETURN_IF_ERROR(RunContext(context));
    }
    if (result_.rows.empty())
      return absl::CancelledError("the measurement was interrupted before two sequences were read");
    if (options_.passkeys > 0 && !Interrupted()) CRUMB_RETURN_IF_ERROR(RunPasskeys());
    result_.interrupted = Interrupted();
    return std::move(result_);
  }

 private:
  absl::Status OpenModel() {
    CRUMB_ASSIGN_OR_RETURN(tokenizer_, models::Tokenizer::Load(options_.model));
    // Sequences run side by side, each on one thread.
    CRUMB_ASSIGN_OR_RETURN(engine_, models::Engine::Load(options_.model, {.threads = 1}));
    const int most = engine_->config().max_positions;
    contexts_ = options_.contexts;
    if (contexts_.empty()) contexts_ = {std::min(1024, most), std::min(2048, most), most};
    std::sort(contexts_.begin(), contexts_.end());
    contexts_.erase(std::unique(contexts_.begin(), contexts_.end()), contexts_.end());
    if (contexts_.back() > most) {
      return absl::InvalidArgumentError(
          fmt::format("{} has {} positions, but the context is {}; give --context", options_.model,
                      most, contexts_.back()));
    }
    CRUMB_ASSIGN_OR_RETURN(text_, ReadTokens(*tokenizer_, options_.texts));
    const auto sequences = CutSequences(text_, contexts_.back(), options_.sequences);
    if (sequences.size() >= 2) return absl::OkStatus();
    return absl::InvalidArgumentError(fmt::format(
        "the texts give {} sequences of {} tokens; at least 2 are needed: give more text",
        sequences.size(), contexts_.back()));
  }

  absl::Status OpenMethods() {
    CRUMB_ASSIGN_OR_RETURN(set_,
                           QualityMethodSet::Open(options_, engine_->config(), contexts_.back()));
    std::vector<std::string> names = options_.methods;
    const auto named = [&](const char* name) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    // Recall is reported as the difference to bf16.
    if (options_.passkeys > 0 && !named("bf16")) names.insert(names.begin(), "bf16");
    for (const std::string& name : names) {
      Say("preparing " + name);
      CRUMB_ASSIGN_OR_RETURN(QualityMethod method, set_->Named(name));
      methods_.push_back(std::move(method));
      if (name == "oscar" && options_.clip_sequences > 0) {
        CRUMB_ASSIGN_OR_RETURN(QualityMethod best, BestOscar());
        methods_.push_back(std::move(best));
      }
    }
    for (const std::string& path : options_.rotations) {
      CRUMB_ASSIGN_OR_RETURN(QualityMethod method, set_->FromRotationFile(path));
      methods_.push_back(std::move(method));
    }
    return absl::OkStatus();
  }

  tools::ProgressBar::Style BarStyle() const {
    return options_.quiet ? tools::ProgressBar::Style::kQuiet
                          : tools::ProgressBar::StyleFor(STDERR_FILENO);
  }

  void Say(const std::string& what) const {
    if (!options_.quiet) fmt::print(stderr, "{}\n", what);
  }

  // Returns oscar with the clips that have the least KL on the calibration text. The clip of keys
  // is chosen first, then that of values.
  absl::StatusOr<QualityMethod> BestOscar() {
    CRUMB_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                           ReadTokens(*tokenizer_, options_.calibration_texts));
    // If there is little text, one shorter sequence serves, as long as most of it is history.
    const int length = static_cast<int>(
        std::min<size_t>(contexts_.back(), std::max<size_t>(tokens.size(), kClipTokensMin)));
    const auto sequences = CutSequences(tokens, length, options_.clip_sequences);
    if (sequences.empty()) {
      return absl::InvalidArgumentError(
          fmt::format("the calibration texts have {} tokens, but oscar's clips are chosen on "
                      "sequences of {}: give more text or --clip-sequences 0",
                      tokens.size(), length));
    }
    float clip_k = 0.96f, clip_v = 0.92f;
    for (float* clip : {&clip_k, &clip_v}) {
      std::vector<QualityMethod> candidates;
      for (const float value : kClips) {
        *clip = value;
        CRUMB_ASSIGN_OR_RETURN(QualityMethod method, set_->Oscar(clip_k, clip_v));
        candidates.push_back(std::move(method));
      }
      CRUMB_ASSIGN_OR_RETURN(const auto scores,
                             Score("oscar's clip", sequences, candidates, false));
      size_t best = 0;
      for (size_t i = 1; i < candidates.size(); ++i) {
        if (SumOfKl(scores[i]) < SumOfKl(scores[best])) best = i;
      }
      *clip = kClips[best];
    }
    CRUMB_ASSIGN_OR_RETURN(QualityMethod method, set_->Oscar(clip_k, clip_v));
    method.name = kBestOscar;
    return method;
  }

  static double SumOfKl(const SequenceScores& scores) {
    double sum = 0.0;
    for (const auto& score : scores) sum += score ? score->kl : 0.0;
    return sum;
  }

  // Runs body(i) for every i < count on the jobs' threads until one fails or the run is
  // interrupted.
  absl::Status ForJobs(int count, const std::function<absl::Status(int)>& body) {
    Mutex mutex;
    absl::Status first;
    jobs_.ParallelFor(count, [&](int i) {
      {
        MutexLock lock(&mutex);
        if (!first.ok()) return;
      }
      if (Interrupted()) return;
      const absl::Status status = body(i);
      MutexLock lock(&mutex);
      if (first.ok()) first = status;
    });
    return first;
  }

  // Scores every method on every sequence: [methods][sequences].
  absl::StatusOr<std::vector<SequenceScores>> Score(
      const std::string& what, const std::vector<std::vector<int32_t>>& sequences,
      const std::vector<QualityMethod>& methods, bool prefill) {
    std::vector<SequenceScores> scores(methods.size(), SequenceScores(sequences.size()));
    exact_loss_.assign(sequences.size(), std::nullopt);
    const int steps = (static_cast<int>(sequences.front().size()) + kStepTokens - 1) / kStepTokens;
    tools::ProgressBar bar(what, std::cerr, BarStyle());
    const double part = 1.0 / (static_cast<double>(sequences.size()) * steps);
    CRUMB_RETURN_IF_ERROR(ForJobs(static_cast<int>(sequences.size()), [&](int i) {
      return ScoreSequence(
          sequences[i], methods, prefill, [&] { bar.Add(part); }, i, scores);
    }));
    bar.End();
    return scores;
  }

  // Runs all methods over one sequence, step by step beside the exact cache. Calls `step_done`
  // after every step.
  absl::Status ScoreSequence(std::span<const int32_t> tokens,
                             const std::vector<QualityMethod>& methods, bool prefill,
                             const std::function<void()>& step_done, int index,
                             std::vector<SequenceScores>& scores) {
    models::DenseKvCache dense(engine_->config(), engine_->pool());
    std::vector<std::unique_ptr<MethodCache>> decode, fill;
    // Inside one prefill block no token reads stored pages, so all methods give the same figures
    // and one is run for all of them.
    const bool shared = static_cast<int>(tokens.size()) <= options_.prefill_block;
    for (const QualityMethod& method : methods) {
      CRUMB_ASSIGN_OR_RETURN(auto cache, method.begin(tokens.first(kStepTokens)));
      decode.push_back(std::move(cache));
      if (!prefill || (shared && !fill.empty())) continue;
      CRUMB_ASSIGN_OR_RETURN(cache, method.begin(tokens));
      fill.push_back(std::move(cache));
    }
    std::vector<SequenceScore> sums(methods.size());
    double exact_loss = 0.0;
    for (size_t begin = 0; begin < tokens.size() && !Interrupted(); begin += kStepTokens) {
      const auto step = tokens.subspan(begin, std::min<size_t>(kStepTokens, tokens.size() - begin));
      const auto next = tokens.subspan(begin + 1, std::min(step.size(), tokens.size() - begin - 1));
      CRUMB_ASSIGN_OR_RETURN(const models::Logits exact,
                             engine_->Forward(dense, step, models::LogitRows::kAll));
      const StepReference reference(exact);
      for (size_t i = 0; i < next.size(); ++i) {
        exact_loss += reference.LogLoss(static_cast<int>(i), next[i]);
      }
      for (size_t m = 0; m < methods.size(); ++m) {
        CRUMB_ASSIGN_OR_RETURN(const SequenceScore score,
                               ScoreStep(*decode[m], step, next, reference));
        sums[m].kl += score.kl;
        sums[m].log_loss += score.log_loss;
        sums[m].top1 += score.top1;
      }
      for (size_t m = 0; m < fill.size(); ++m) {
        CRUMB_ASSIGN_OR_RETURN(const SequenceScore score,
                               ScoreStep(*fill[m], step, next, reference));
        sums[m].kl_prefill += score.kl;
      }
      step_done();
    }
    if (Interrupted()) return absl::OkStatus();
    const double count = static_cast<double>(tokens.size() - 1);
    for (size_t m = 0; m < methods.size(); ++m) {
      const double kl_prefill = sums[fill.size() == 1 ? 0 : m].kl_prefill;
      scores[m][index] = SequenceScore{sums[m].kl / count, kl_prefill / count,
                                       sums[m].log_loss / count, sums[m].top1 / count};
    }
    exact_loss_[index] = exact_loss / count;
    return absl::OkStatus();
  }

  // Returns sums over those tokens of one step whose next tokens are `next`.
  absl::StatusOr<SequenceScore> ScoreStep(MethodCache& cache, std::span<const int32_t> step,
                                          std::span<const int32_t> next,
                                          const StepReference& reference) const {
    CRUMB_ASSIGN_OR_RETURN(const models::Logits ours,
                           engine_->Forward(cache, step, models::LogitRows::kAll));
    SequenceScore score;
    for (size_t i = 0; i < next.size(); ++i) {
      const int at = static_cast<int>(i);
      const auto row = ours.row(at);
      const double norm = LogSumExp(row);
      score.kl += reference.Kl(at, row, norm);
      score.log_loss += norm - row[next[i]];
      score.top1 += models::GreedyToken(row) == reference.top(at);
    }
    return score;
  }

  absl::Status RunContext(int context) {
    const auto sequences = CutSequences(text_, context, options_.sequences);
    CRUMB_ASSIGN_OR_RETURN(const auto scores,
                           Score(fmt::format("{} tokens", context), sequences, methods_, true));
    std::vector<double> exact_loss;
    for (const auto& loss : exact_loss_) {
      if (loss) exact_loss.push_back(*loss);
    }
    if (exact_loss.size() < 2) return absl::OkStatus();  // interrupted
    const int done = static_cast<int>(exact_loss.size());
    result_.sequences = result_.contexts.empty() ? done : std::min(result_.sequences, done);
    result_.prefill_block = options_.prefill_block;
    result_.device = options_.device;
    result_.contexts.push_back(context);
    result_.exact_perplexity.push_back(std::exp(EstimateOf(exact_loss).mean));
    for (size_t m = 0; m < methods_.size(); ++m) {
      result_.rows.push_back(RowOf(methods_[m], context, scores[m]));
      QualityRow& row = result_.rows.back();
      Compare(scores[m], ScoresOf(scores, "oscar"), row.kl_over_oscar);
      Compare(scores[m], ScoresOf(scores, kBestOscar), row.kl_over_best_oscar);
      if (row.method == "crumb") {
        Compare(scores[m], ScoresOf(scores, "crumb-context"), row.kl_over_long_calibration);
      }
    }
    return absl::OkStatus();
  }

  const SequenceScores* ScoresOf(const std::vector<SequenceScores>& scores,
                                 const std::string& name) const {
    for (size_t m = 0; m < methods_.size(); ++m) {
      if (methods_[m].name == name) return &scores[m];
    }
    return nullptr;
  }

  static std::vector<double> Column(const SequenceScores& scores, double SequenceScore::*member) {
    std::vector<double> values;
    for (const auto& score : scores) {
      if (score) values.push_back((*score).*member);
    }
    return values;
  }

  static void Compare(const SequenceScores& ours, const SequenceScores* theirs, Interval& ratio) {
    if (theirs == nullptr) return;
    ratio = BootstrapRatio(Column(ours, &SequenceScore::kl), Column(*theirs, &SequenceScore::kl));
  }

  static QualityRow RowOf(const QualityMethod& method, int context, const SequenceScores& scores) {
    QualityRow row;
    row.method = method.name;
    row.context = context;
    row.bits = method.bits;
    const double exact = std::min(1.0, static_cast<double>(kWindowTokens) / context);
    row.bits_with_windows = 16.0 * exact + method.bits * (1.0 - exact);
    row.clip_k = method.clip_k;
    row.clip_v = method.clip_v;
    row.kl = EstimateOf(Column(scores, &SequenceScore::kl));
    row.kl_prefill = EstimateOf(Column(scores, &SequenceScore::kl_prefill));
    row.top1 = EstimateOf(Column(scores, &SequenceScore::top1));
    const Estimate loss = EstimateOf(Column(scores, &SequenceScore::log_loss));
    row.perplexity = {std::exp(loss.mean), std::exp(loss.mean) * loss.error};
    return row;
  }

  // Makes the documents with passkeys. This runs before anything is measured, so that a context
  // that is too short for them is reported at once.
  absl::Status HidePasskeys() {
    const PasskeyLayout layout =
        options_.passkeys_together ? PasskeyLayout::kTogether : PasskeyLayout::kApart;
    auto documents =
        MakePasskeyDocuments(*tokenizer_, text_, contexts_.back(), options_.passkeys, layout);
    if (!documents.ok()) {
      return absl::InvalidArgumentError(std::string(documents.status().message()) +
                                        "; use --passkeys 0 to measure without passkeys");
    }
    documents_ = std::move(documents).value();
    return absl::OkStatus();
  }

  absl::Status RunPasskeys() {
    const int context = contexts_.back();
    result_.passkeys_together = options_.passkeys_together;
    const int documents = static_cast<int>(documents_.size());
    std::vector<DocumentScores> scores(methods_.size(), DocumentScores(documents));
    tools::ProgressBar bar("passkeys", std::cerr, BarStyle());
    const double part =
        1.0 / (static_cast<double>(documents) * static_cast<double>(methods_.size()));
    const PasskeyRecall recall(*engine_, *tokenizer_);
    // Documents are taken from both ends by turns, because their lengths grow: the pace so far then
    // predicts the time that is left.
    CRUMB_RETURN_IF_ERROR(ForJobs(documents, [&](int i) {
      const int document = i % 2 == 0 ? i / 2 : documents - 1 - i / 2;
      for (size_t m = 0; m < methods_.size() && !Interrupted(); ++m) {
        CRUMB_ASSIGN_OR_RETURN(auto keys, recall.Score(methods_[m], documents_[document]));
        if (Interrupted()) break;  // the last keys may belong to a document that was half read
        scores[m][document] = std::move(keys);
        bar.Add(part);
      }
      return absl::OkStatus();
    }));
    bar.End();
    KeepComplete(scores);
    for (QualityRow& row : result_.rows) {
      if (row.context != context) continue;
      for (size_t m = 0; m < methods_.size(); ++m) {
        if (methods_[m].name != row.method) continue;
        SummarizeRecall(documents_, scores[m], BaselineOf(scores), row);
      }
    }
    return absl::OkStatus();
  }

  // Drops the scores of documents that not every method has read.
  void KeepComplete(std::vector<DocumentScores>& scores) {
    for (size_t d = 0; d < documents_.size(); ++d) {
      const bool complete = std::all_of(scores.begin(), scores.end(),
                                        [&](const auto& method) { return method[d].has_value(); });
      if (complete) {
        ++result_.passkey_documents;
        result_.passkeys += static_cast<int>(documents_[d].keys.size());
        continue;
      }
      for (DocumentScores& method : scores) method[d].reset();
    }
  }

  const DocumentScores& BaselineOf(const std::vector<DocumentScores>& scores) const {
    for (size_t m = 0; m < methods_.size(); ++m) {
      if (methods_[m].name == "bf16") return scores[m];
    }
    return scores.front();
  }

  const QualityOptions& options_;
  models::ThreadPool jobs_;
  std::unique_ptr<models::Tokenizer> tokenizer_;
  std::unique_ptr<models::Engine> engine_;
  std::unique_ptr<QualityMethodSet> set_;
  std::vector<QualityMethod> methods_;
  std::vector<int> contexts_;
  std::vector<int32_t> text_;
  std::vector<std::optional<double>> exact_loss_;  // indexed by sequence of the current context
  std::vector<PasskeyDocument> documents_;
  QualityResult result_;
};

}  // namespace

absl::StatusOr<QualityResult> RunQualityWorkload(const QualityOptions& options) {
  return QualityRun(options).Run();
}

}  // namespace crumb::bench
