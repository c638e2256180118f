// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace crumb::tiny_lm {

// RunOptions is the command line of crumb-tiny-lm.
struct RunOptions {
  std::string model = "models/data/tiny-lm";
  std::string prompt_file;            // "-": standard input
  bool chat = false;                  // the prompt is a user's message to a chat model
  std::string messages;               // file with a conversation, in place of a prompt
  std::string system;                 // system message; empty: that of the chat template
  int generate = 16;                  // maximum number of tokens
  std::string store = "none";         // folder of crumbd's sockets, or "none"
  std::string kv = "int2";            // or "bf16"
  std::string method;                 // empty: that of the rotation file, or oscar
  std::string rotation = "hadamard";  // or "identity", or a rotation file
  std::string device = "cpu";         // or "cuda"
  int group_size = 0;                 // 0: head_dim, at most 128
  int threads = 0;                    // 0: one per CPU
  std::string weights_version;        // empty: the digest of the checkpoint's files
  std::string salt;                   // pages are reused by requests with the same salt only
  bool compare = false;               // also run with BF16 keys and values
  bool flush = false;                 // wait until the published pages are durable
  bool count_tokens = false;          // print the prompt's length and stop
  bool json = false;
};

// Parses the command line. Returns an exit code if the process should end: after --help, or after
// an error, which was printed.
std::optional<int> ParseRunOptions(int argc, char** argv, RunOptions& options);

}  // namespace crumb::tiny_lm
