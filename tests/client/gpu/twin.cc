// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/twin.h"

#include <algorithm>
#include <string>

#include "gtest/gtest.h"

namespace crumb::client {

Twin::Twin(const SequenceModel& model, int prompt, Worker& cpu, DeviceWorker& worker,
           const SequenceOptions& options)
    : model_(&model),
      prompt_(prompt),
      expected_(cpu.Begin(model.prompt(prompt), options).value()),
      sequence_(BeginOn(worker, model.prompt(prompt), options)) {}

RunEntry Twin::Entry(int tokens, int accepted) const {
  return {sequence_.get(), model_, length() + tokens, accepted};
}

RunEntry Twin::PromptEntry(int tokens_max) const {
  const int tokens = std::min(tokens_max, sequence_->pass_tokens_max());
  return Entry(tokens, tokens);
}

void Twin::Expect(const RunEntry& entry) {
  outputs_.push_back(model_->Pass(*expected_, entry.end, entry.accepted));
}

void Twin::Note(std::shared_ptr<RunPass> pass, size_t entry) {
  passes_.emplace_back(std::move(pass), entry);
}

void Twin::Check() const {
  ASSERT_EQ(outputs_.size(), passes_.size());
  for (size_t i = 0; i < passes_.size(); ++i) {
    const auto& [pass, entry] = passes_[i];
    ExpectSame(pass->Outputs(entry), outputs_[i], "pass " + std::to_string(i));
  }
}

Twin Twin::Fork(DeviceBatch& batch) {
  Twin fork;
  fork.model_ = model_;
  fork.prompt_ = prompt_;
  fork.expected_ = expected_->Fork().value();
  auto forked = batch.Fork(*sequence_);
  EXPECT_TRUE(forked.ok()) << forked.status();
  fork.sequence_ = std::move(forked).value();
  return fork;
}

void Twin::Finish(DeviceBatch& batch) {
  EXPECT_TRUE(expected_->Finish().ok());
  EXPECT_TRUE(batch.Finish(*sequence_).ok());
  sequence_.reset();
}

void PassOf(DeviceRun& run, const std::vector<std::pair<Twin*, RunEntry>>& shares) {
  std::vector<RunEntry> entries;
  for (const auto& [twin, entry] : shares) {
    twin->Expect(entry);
    entries.push_back(entry);
  }
  const auto pass = run.Pass(entries);
  for (size_t i = 0; i < shares.size(); ++i) shares[i].first->Note(pass, i);
}

void RunPrompt(DeviceRun& run, Twin& twin, int tokens) {
  while (twin.InPrompt()) PassOf(run, {{&twin, twin.PromptEntry(tokens)}});
}

void RunPrompt(DeviceRun& run, DeviceSequence& sequence, const SequenceModel& model, int end) {
  while (sequence.length() < end) {
    const int tokens = sequence.pass_tokens_max();
    run.Pass({{&sequence, &model, sequence.length() + tokens, tokens}});
  }
}

void RunDecode(DeviceRun& run, Twin& twin, int passes) {
  for (int i = 0; i < passes; ++i) PassOf(run, {{&twin, twin.Entry(1, 1)}});
}

}  // namespace crumb::client
