// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "tests/client/gpu/twin.h"

namespace crumb::client {

struct CrowdOptions {
  std::vector<int> prompts;  // lengths, in the order in which twins join
  int tokens = 0;            // length of each model, prompt included
  uint32_t models = 0;       // seed of the first model's tokens
  int prompt_tokens = 0;     // maximum of a prompt pass
  int sequences = 0;         // capacity of a decode pass
};

// Crowd runs many twins at once: up to three prompts in a pass on one stream, and the decoding ones
// in a captured pass of three tokens, some of which are rejected, on another.
class Crowd {
 public:
  // Borrows `pair`, which was opened with `options`.
  Crowd(WorkerPair& pair, const WorkerOptions& options, const CrowdOptions& crowd, uint32_t seed);

  const std::vector<std::unique_ptr<Twin>>& live() const { return live_; }
  bool AllJoined() const { return joined_ == models_.size(); }

  void Join();   // lets the next twin join; REQUIRES: one is left
  void Round();  // runs one pass of each kind that has twins
  // Forks the live twin that joined first, if it is behind its prompt.
  void ForkFirst();
  void FinishFirst();  // checks it as well
  void CheckAll() const;
  void FinishAll();

 private:
  bool FirstDecodes() const { return !live_.empty() && !live_.front()->InPrompt(); }

  WorkerPair& pair_;
  const CrowdOptions options_;
  std::mt19937 random_;
  std::vector<SequenceModel> models_;
  DeviceRun prompts_, decode_;
  std::vector<std::unique_ptr<Twin>> live_;
  size_t joined_ = 0;
};

}  // namespace crumb::client
