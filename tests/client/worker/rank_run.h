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

// The degree of a replica: its numbers of tensor-parallel and pipeline-parallel ranks.
struct Degree {
  int tp = 1;
  int pp = 1;
};

// Outputs of a run, ordered by (step, layer, token, query head); every rank writes its own.
struct RunOutputs {
  int cached = 0;  // the same for every rank
  std::vector<float> values;
};

// RankRun has all ranks of an engine in this process, each with a Worker and a client. Errors fail
// the test.
class RankRun {
 public:
  // `clients` are borrowed, one per rank, with the tensor-parallel ranks of a stage together; null
  // means no client.
  RankRun(const WorkerOptions& whole, Degree degree, const std::vector<Client*>& clients);

  int ranks() const { return static_cast<int>(workers_.size()); }
  Worker& worker(int rank) { return *workers_[rank]; }
  const WorkerOptions& options(int rank) const { return workers_[rank]->options(); }

  // Begins the model's sequence on every rank: rank 0 leads, the others follow.
  std::vector<std::unique_ptr<Sequence>> Begin(const SequenceModel& model, int prompt,
                                               const SequenceOptions& options = {});
  // Runs the rest of the prompt in one pass and `steps` decode steps, on every rank.
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
