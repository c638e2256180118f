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
  int tokens = 0;            // of each model, prompt and what follows
  uint32_t models = 0;       // seed of the first one's tokens
  int prompt_tokens = 0;     // of a prompt pass, at the most
  int sequences = 0;         // of a decode pass
};

// Many twins at once: up to three prompts share a pass on one stream, those behind their prompts a
// captured decode pass of three tokens on another, of which some are rejected.
class Crowd {
 public:
  // Borrows `pair`, which was opened with `options`.
  Crowd(WorkerPair& pair, const WorkerOptions& options, const CrowdOptions& crowd, uint32_t seed);

  const std::vector<std::unique_ptr<Twin>>& live() const { return live_; }
  bool AllJoined() const { return joined_ == models_.size(); }

  void Join();   // the next; not all may have joined
  void Round();  // one pass of each kind, if anybody is there for it
  // The one that joined first of those that are live, if it is behind its prompt.
  void ForkFirst();
  void FinishFirst();  // checks it, too
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
