// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace crumb::tiny_lm {

// The command line of crumb-tiny-lm.
struct RunOptions {
  std::string model = "models/data/tiny-lm";
  std::string prompt_file;            // "-": standard input
  int generate = 16;                  // tokens at most
  std::string store = "none";         // folder of crumbd's sockets, or none
  std::string kv = "int2";            // or bf16
  std::string method;                 // empty: the rotation file's, or oscar
  std::string rotation = "hadamard";  // or identity, or a rotation file
  std::string device = "cpu";         // or cuda
  int group_size = 0;                 // 0: head_dim, 128 at most
  int threads = 0;                    // 0: one per CPU
  std::string weights_version;        // empty: the digest of the checkpoint's files
  std::string salt;                   // pages are shared with requests of the same salt only
  bool compare = false;               // against BF16 keys and values
  bool flush = false;                 // wait until the published pages are durable
  bool count_tokens = false;          // print the prompt's length and stop
  bool json = false;
};

// Parses the command line. Returns an exit code instead when the process is to end (help, errors,
// which were printed).
std::optional<int> ParseRunOptions(int argc, char** argv, RunOptions& options);

}  // namespace crumb::tiny_lm
