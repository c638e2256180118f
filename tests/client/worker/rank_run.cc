// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "rank_run.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace crumb::client {
namespace {

using kernels::Bf16;

// Returns the heads in `range` of rows [tokens, heads, dim].
std::vector<Bf16> Slice(const std::vector<Bf16>& rows, int heads, IndexRange range, int dim) {
  std::vector<Bf16> out;
  const size_t row = static_cast<size_t>(heads) * dim;
  for (size_t at = 0; at < rows.size(); at += row) {
    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(at);
    out.insert(out.end(), begin + range.begin * dim, begin + range.end * dim);
  }
  return out;
}

}  // namespace

RankRun::RankRun(const WorkerOptions& whole, Degree degree, const std::vector<Client*>& clients)
    : whole_(whole) {
  for (int rank = 0; rank < degree.tp * degree.pp; ++rank) {
    WorkerOptions options = whole;
    const RankPlace place{.tp_rank = rank % degree.tp,
                          .tp_size = degree.tp,
                          .pp_rank = rank / degree.tp,
                          .pp_size = degree.pp};
    options.part = PartOfRank(place, whole.layers, whole.kv_heads, whole.q_heads).value();
    auto worker = Worker::Open(options, clients[rank]);
    EXPECT_TRUE(worker.ok()) << worker.status();
    workers_.push_back(std::move(worker).value());
  }
}

std::vector<std::unique_ptr<Sequence>> RankRun::Begin(const SequenceModel& model, int prompt,
                                                      const SequenceOptions& options) {
  std::vector<std::unique_ptr<Sequence>> sequences;
  LedSequence led = worker(0).Lead(model.prompt(prompt), options).value();
  sequences.push_back(std::move(led.sequence));
  for (int rank = 1; rank < ranks(); ++rank) {
    auto follower = worker(rank).Follow(led.token, model.prompt(prompt), options);
    EXPECT_TRUE(follower.ok()) << "rank " << rank << ": " << follower.status();
    sequences.push_back(std::move(follower).value());
    EXPECT_EQ(sequences.back()->cached_tokens(), sequences.front()->cached_tokens());
  }
  return sequences;
}

// out [layers, tokens, q_heads, head_dim] of the whole model.
void RankRun::Pass(const SequenceModel& model, Sequence& sequence, int rank, int end,
                   std::span<float> out) const {
  const WorkerOptions& own = options(rank);
  const IndexRange layers = own.own_tiles().layers, heads = own.own_tiles().heads;
  const IndexRange queries = own.own_q_head_range();
  const int begin = sequence.length(), tokens = end - begin, dim = whole_.head_dim;
  std::vector<float> got(static_cast<size_t>(tokens) * queries.size() * dim);
  for (int layer = layers.begin; layer < layers.end; ++layer) {
    const int local = layer - layers.begin;
    const auto k = Slice(model.Keys(layer, begin, end), whole_.kv_heads, heads, dim);
    const auto v = Slice(model.Values(layer, begin, end), whole_.kv_heads, heads, dim);
    const auto q = Slice(model.Queries(layer, begin, end), whole_.q_heads, queries, dim);
    ASSERT_TRUE(sequence.Append(local, tokens, k.data(), v.data()).ok());
    ASSERT_TRUE(sequence.Attend(local, tokens, q.data(), got.data()).ok());
    const size_t share = static_cast<size_t>(queries.size()) * dim;
    for (int t = 0; t < tokens; ++t) {
      const size_t row = (static_cast<size_t>(layer) * tokens + t) * whole_.q_heads;
      std::copy_n(got.begin() + static_cast<std::ptrdiff_t>(t * share), share,
                  out.begin() + static_cast<std::ptrdiff_t>((row + queries.begin) * dim));
    }
  }
  const absl::Status status =
      sequence.Advance({model.tokens().data() + begin, static_cast<size_t>(tokens)});
  ASSERT_TRUE(status.ok()) << status;
}

RunOutputs RankRun::Run(const SequenceModel& model,
                        std::span<const std::unique_ptr<Sequence>> sequences, int prompt,
                        int steps) {
  RunOutputs outputs{.cached = sequences.front()->cached_tokens(), .values = {}};
  const size_t token = static_cast<size_t>(whole_.layers) * whole_.q_heads * whole_.head_dim;
  for (int end = prompt; end <= prompt + steps; ++end) {
    const int tokens = end - sequences.front()->length();
    std::vector<float> out(token * tokens);
    for (int rank = 0; rank < ranks(); ++rank) Pass(model, *sequences[rank], rank, end, out);
    // Without the prompt's outputs, whose number depends on the hit.
    if (end > prompt) outputs.values.insert(outputs.values.end(), out.begin(), out.end());
  }
  return outputs;
}

void RankRun::Publish(const SequenceModel& model, int prompt) {
  for (int rank = 0; rank < ranks(); ++rank) PublishRank(model, prompt, rank);
}

void RankRun::PublishRank(const SequenceModel& model, int prompt, int rank) {
  SequenceOptions cold;
  cold.cached_tokens_max = 0;
  const auto sequence = worker(rank).Begin(model.prompt(prompt), cold).value();
  std::vector<float> out(static_cast<size_t>(prompt) * whole_.layers * whole_.q_heads *
                         whole_.head_dim);
  Pass(model, *sequence, rank, prompt, out);
  EXPECT_TRUE(sequence->Finish().ok());
  EXPECT_TRUE(worker(rank).WaitPublished(std::chrono::seconds(20)).ok());
}

}  // namespace crumb::client
