// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/crowd.h"

#include <utility>

namespace crumb::client {
namespace {

constexpr int kPromptsAtOnce = 3;
constexpr int kDecodeTokens = 3;

}  // namespace

Crowd::Crowd(WorkerPair& pair, const WorkerOptions& options, const CrowdOptions& crowd,
             uint32_t seed)
    : pair_(pair),
      options_(crowd),
      random_(seed),
      prompts_(
          pair.device, *pair.worker,
          {.kind = PassKind::kPrompt, .sequences = kPromptsAtOnce, .tokens = crowd.prompt_tokens}),
      decode_(pair.device, *pair.worker,
              {.kind = PassKind::kDecode, .sequences = crowd.sequences, .tokens = kDecodeTokens}) {
  for (uint32_t i = 0; i < crowd.prompts.size(); ++i) {
    models_.emplace_back(options, RandomTokens(crowd.tokens, crowd.models + i));
  }
  decode_.Capture(Simulated(pair.device));
}

void Crowd::Join() {
  live_.push_back(std::make_unique<Twin>(models_[joined_], options_.prompts[joined_], pair_));
  ++joined_;
}

void Crowd::Round() {
  std::vector<std::pair<Twin*, RunEntry>> in_prompt, behind;
  for (const auto& twin : live_) {
    if (!twin->InPrompt()) {
      behind.emplace_back(twin.get(), twin->Entry(kDecodeTokens, random_() % (kDecodeTokens + 1)));
    } else if (in_prompt.size() < kPromptsAtOnce) {
      in_prompt.emplace_back(twin.get(), twin->PromptEntry(1 + random_() % options_.prompt_tokens));
    }
  }
  if (!in_prompt.empty()) PassOf(prompts_, in_prompt);
  if (!behind.empty()) PassOf(decode_, behind);
}

void Crowd::ForkFirst() {
  if (!FirstDecodes()) return;
  live_.push_back(std::make_unique<Twin>(live_.front()->Fork(decode_.batch())));
}

void Crowd::FinishFirst() {
  if (!FirstDecodes()) return;
  live_.front()->Check();
  live_.front()->Finish(decode_.batch());
  live_.erase(live_.begin());
}

void Crowd::CheckAll() const {
  for (const auto& twin : live_) twin->Check();
}

void Crowd::FinishAll() {
  for (const auto& twin : live_) {
    twin->Finish(twin->InPrompt() ? prompts_.batch() : decode_.batch());
  }
  live_.clear();
}

}  // namespace crumb::client
