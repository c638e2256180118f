// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "crumb/client.h"
#include "crumb/worker.h"
#include "crumb/worker_options.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {

// How a replica is cut: tensor-parallel and pipeline-parallel ranks.
struct Degree {
  int tp = 1;
  int pp = 1;
};

// Outputs of a run by (step, layer, token, query head), in that order; ranks write theirs in.
struct RunOutputs {
  int cached = 0;  // of every rank
  std::vector<float> values;
};

// All ranks of an engine in this process, each with a Worker over a client of its own. Errors are
// test failures.
class RankRun {
 public:
  // `clients` borrowed, one per rank, tensor-parallel ranks of a stage together; a null one: none.
  RankRun(const WorkerOptions& whole, Degree degree, const std::vector<Client*>& clients);

  int ranks() const { return static_cast<int>(workers_.size()); }
  Worker& worker(int rank) { return *workers_[rank]; }
  const WorkerOptions& options(int rank) const { return workers_[rank]->options(); }

  // The model's sequence on every rank: rank 0 leads, the others follow.
  std::vector<std::unique_ptr<Sequence>> Begin(const SequenceModel& model, int prompt,
                                               const SequenceOptions& options = {});
  // The prompt's rest in one pass and `steps` decode steps, on every rank.
  RunOutputs Run(const SequenceModel& model, std::span<const std::unique_ptr<Sequence>> sequences,
                 int prompt, int steps);
  // Reads the prompt without the cache on every rank, and publishes its pages.
  void Publish(const SequenceModel& model, int prompt);
  void PublishRank(const SequenceModel& model, int prompt, int rank);

 private:
  void Pass(const SequenceModel& model, Sequence& sequence, int rank, int end,
            std::span<float> out) const;

  const WorkerOptions whole_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace crumb::client
