// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/examples/tiny_lm/run_options.h"

#include <CLI/CLI.hpp>
#include <iostream>

namespace crumb::tiny_lm {
namespace {

void AddPromptOptions(CLI::App& app, RunOptions& options) {
  CLI::Option* prompt = app.add_option("--prompt-file", options.prompt_file,
                                       "file with the prompt, or - for standard input");
  app.add_flag("--chat", options.chat,
               "the prompt is one user's message; write it by the model's chat template")
      ->needs(prompt);
  app.add_option("--messages", options.messages,
                 "file with a conversation instead of a prompt: a JSON array of objects with "
                 "\"role\" and \"content\"; written by the model's chat template")
      ->excludes(prompt);
  app.add_option("--system", options.system,
                 "system message of --chat; default: the chat template's");
}

// Adds the options on the format of pages in the store.
void AddPageOptions(CLI::App& app, RunOptions& options) {
  app.add_option("--kv", options.kv, "format of history pages")
      ->check(CLI::IsMember({"int2", "bf16"}))
      ->capture_default_str();
  app.add_option("--method", options.method,
                 "how INT2 codes are chosen; default: as the rotation file says, or oscar")
      ->check(CLI::IsMember({"oscar", "crumb", "hadamard", "naive"}));
  app.add_option(
         "--rotation", options.rotation,
         "basis that INT2 pages are quantized in: hadamard, identity, or a file that `crumb "
         "calibrate` made")
      ->check(CLI::IsMember({"hadamard", "identity"}) | CLI::ExistingFile)
      ->capture_default_str();
  app.add_option("--group-size", options.group_size,
                 "channels that share a scale; 0: head_dim, at most 128")
      ->check(CLI::IsMember({0, 32, 64, 128}))
      ->capture_default_str();
}

}  // namespace

std::optional<int> ParseRunOptions(int argc, char** argv, RunOptions& options) {
  CLI::App app{
      "An inference worker: runs a model of the Llama, Qwen2 or Qwen3 family on this machine's "
      "CPU, or a Qwen3 model on its GPU, and keeps its KV cache in Crumb.",
      "crumb-tiny-lm"};
  app.set_version_flag("--version", std::string(CRUMB_VERSION));
  app.add_option("--model", options.model, "HF directory: config.json, safetensors, tokenizer.json")
      ->capture_default_str();
  AddPromptOptions(app, options);
  app.add_option("--generate", options.generate, "tokens to generate at most")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--store", options.store, "folder of crumbd's sockets, or none to work alone")
      ->capture_default_str();
  AddPageOptions(app, options);
  app.add_option("--device", options.device,
                 "where the model runs: cpu, or cuda for the first GPU (needs cuBLAS)")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "compute threads; 0: one per CPU")
      ->check(CLI::Range(0, 256))
      ->capture_default_str();
  app.add_option("--weights-version", options.weights_version,
                 "names the weights in page keys; default: a digest of the checkpoint's files");
  app.add_option("--salt", options.salt, "share pages only with requests of the same salt");
  app.add_flag("--compare", options.compare,
               "run prompt and answer again and report KL and top-1 agreement against BF16");
  app.add_flag("--flush", options.flush, "return when the published pages are durable on SSD");
  app.add_flag("--count-tokens", options.count_tokens,
               "print the prompt's length in tokens and stop");
  app.add_flag("--json", options.json, "print one JSON object");
  app.footer(
      "Example:\n  crumb-tiny-lm --prompt-file question.txt --store /run/crumb --generate 32");
  try {
    app.parse(argc, argv);
    if (options.prompt_file.empty() && options.messages.empty()) {
      throw CLI::RequiredError("--prompt-file or --messages");
    }
    if (!options.system.empty() && !options.chat) throw CLI::RequiresError("--system", "--chat");
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << "crumb-tiny-lm: " << error.what() << " (see crumb-tiny-lm --help)\n";
    return 2;
  }
  return std::nullopt;
}

}  // namespace crumb::tiny_lm
