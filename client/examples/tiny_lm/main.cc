// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// crumb-tiny-lm: a real inference worker, on the CPU or on a GPU, that embeds the Crumb client.

#include <fmt/format.h>

#include <cstdio>
#include <string>

#include "client/examples/tiny_lm/inference.h"
#include "client/examples/tiny_lm/prompt.h"
#include "client/examples/tiny_lm/run_options.h"
#include "client/examples/tiny_lm/run_report.h"
#include "common/status_macros.h"

namespace crumb::tiny_lm {
namespace {

absl::Status Main(const RunOptions& options) {
  if (options.count_tokens) {
    CRUMB_ASSIGN_OR_RETURN(const auto tokenizer, models::Tokenizer::Load(options.model));
    CRUMB_ASSIGN_OR_RETURN(const Prompt prompt, ReadPrompt(options, *tokenizer));
    const size_t tokens = prompt.tokens.size();
    fmt::print("{}\n", options.json ? fmt::format("{{\"prompt_tokens\": {}}}", tokens)
                                    : fmt::format("{}", tokens));
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(const auto inference, Inference::Open(options));
  CRUMB_ASSIGN_OR_RETURN(const Prompt prompt, ReadPrompt(options, inference->tokenizer()));
  CRUMB_ASSIGN_OR_RETURN(const RunReport report, inference->Run(prompt));
  fmt::print("{}\n", options.json ? ToJson(report) : ToText(report));
  return absl::OkStatus();
}

}  // namespace
}  // namespace crumb::tiny_lm

int main(int argc, char** argv) {
  crumb::tiny_lm::RunOptions options;
  if (const auto code = crumb::tiny_lm::ParseRunOptions(argc, argv, options)) return *code;
  if (const absl::Status status = crumb::tiny_lm::Main(options); !status.ok()) {
    fmt::print(stderr, "crumb-tiny-lm: {}\n", std::string(status.message()));
    return 1;
  }
  return 0;
}
