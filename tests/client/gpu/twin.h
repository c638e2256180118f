// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "tests/client/gpu/device_run.h"
#include "tests/client/gpu/worker_pair.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {

// Twin is a request that runs on both back ends, pass by pass; in the end the device's outputs are
// compared with the CPU's. Borrows model and workers.
class Twin {
 public:
  Twin(const SequenceModel& model, int prompt, Worker& cpu, DeviceWorker& worker,
       const SequenceOptions& options = {});
  Twin(const SequenceModel& model, int prompt, WorkerPair& pair,
       const SequenceOptions& options = {})
      : Twin(model, prompt, *pair.cpu, *pair.worker, options) {}
  Twin(Twin&&) = default;
  Twin& operator=(Twin&&) = default;

  int length() const { return sequence_->length(); }
  bool InPrompt() const { return length() < prompt_; }
  DeviceSequence& sequence() { return *sequence_; }
  Sequence& expected() { return *expected_; }

  // An entry of `tokens` fresh tokens, of which `accepted` stay.
  RunEntry Entry(int tokens, int accepted) const;
  RunEntry PromptEntry(int tokens_max) const;

  // Runs the same pass on the CPU, before the device's, and keeps its outputs for Check.
  void Expect(const RunEntry& entry);
  void Note(std::shared_ptr<RunPass> pass, size_t entry);
  // Checks that all passes so far gave the same outputs.
  void Check() const;

  Twin Fork(DeviceBatch& batch);
  void Finish(DeviceBatch& batch);

 private:
  Twin() = default;

  const SequenceModel* model_ = nullptr;
  int prompt_ = 0;
  std::unique_ptr<Sequence> expected_;
  std::unique_ptr<DeviceSequence> sequence_;
  std::vector<std::vector<float>> outputs_;
  std::vector<std::pair<std::shared_ptr<RunPass>, size_t>> passes_;
};

// Runs one pass of the twins on both back ends.
void PassOf(DeviceRun& run, const std::vector<std::pair<Twin*, RunEntry>>& shares);
// Runs passes of up to `tokens` tokens each, to the prompt's end.
void RunPrompt(DeviceRun& run, Twin& twin, int tokens);
// Does the same on the device only, up to token `end`.
void RunPrompt(DeviceRun& run, DeviceSequence& sequence, const SequenceModel& model, int end);
// Runs passes of one token each.
void RunDecode(DeviceRun& run, Twin& twin, int passes);

}  // namespace crumb::client
