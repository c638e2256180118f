// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

// The arguments of `crumb`, as data.
namespace crumb::tools {

inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

struct StatusCommand {};

struct StatsCommand {
  double watch_seconds = 0;  // above 0: again after so many seconds, until interrupted
};

struct LookupCommand {
  std::string keyspace;           // hexadecimal
  std::vector<std::string> keys;  // hexadecimal; or none and
  std::string tokens_file;        // token ids, from which the keys follow
  bool everywhere = false;        // asks every node, not only the homes
};

// Brings what a lookup would find into host memory.
struct PrefetchCommand {
  LookupCommand pages;
};

struct GetCommand {
  std::string keyspace;
  std::string key;
  std::string out;  // a page of several fragments is written to OUT, OUT.1, OUT.2...
};

struct PutCommand {
  std::string keyspace;
  std::vector<std::string> files;
};

// Deletes pages, or the whole keyspace when `keys` is empty.
struct DropCommand {
  std::string keyspace;
  std::vector<std::string> keys;
  bool confirmed = false;
};

struct FlushCommand {};

struct PinCommand {
  std::string keyspace;
  std::vector<std::string> keys;
  double ttl_seconds = 3600;
};

struct UnpinCommand {
  std::string keyspace;
  std::vector<std::string> keys;
};

struct KeyspaceStateCommand {
  std::string keyspace;
  std::string state;  // active or bf16
  std::string reason;
};

struct NodesCommand {};

struct WhereCommand {
  std::string key;
  std::string keyspace;  // empty: the one in which crumbd has the page
};

struct DrainCommand {
  std::string node;  // id, or a beginning of one that only one node's has
  bool wait = false;
};

struct PageInspectCommand {
  struct Tile {
    int layer = 0;
    int head = 0;
  };
  std::string file;
  std::optional<Tile> tile;  // show the rows of this one
};

struct CalibrateCommand {
  std::string method = "crumb";  // or oscar, hadamard
  // hadamard needs none of these; else a model and texts, or activations and perhaps a model.
  std::string model;                     // HF directory
  std::vector<std::string> texts;        // files
  std::vector<std::string> activations;  // safetensors files
  std::string out;
  int positions = 0;  // serving context; 0: the model's maximum
  // Of activations, instead of what their metadata and the model say.
  std::string model_name;
  std::vector<int> layer_ids;  // ascending
  std::optional<double> rope_theta;
  std::string rope_scaling;  // JSON, as in config.json
  std::optional<int> rotary_dim;
  bool value_hessian = false;  // feedback for values too, from the model's o_proj
  int context = 1024;
  int tokens = 32768;
  int head_dim = 128;  // of hadamard
  int threads = 0;
  std::optional<float> clip_k;  // instead of the method's own
  std::optional<float> clip_v;
};

struct RotationShowCommand {
  std::string file;
};

struct RotationVerifyCommand {
  std::string file;
};

struct RotationConvertCommand {
  std::vector<std::string> files;  // RotationZoo files for K and V, or one rotation file
  std::string out;
  std::string format = "crumb";  // or v1, v2: a RotationZoo file
  std::string side;              // k or v, where the files do not say
  std::string model;             // instead of the name the file has
  int layers = 0;                // of v1 and v2, from a file for all layers
  int kv_heads = 0;              // of v2, from a file for all KV heads
  std::optional<float> clip_k;
  std::optional<float> clip_v;
};

struct AbsorbCommand {
  std::string model;     // HF directory
  std::string rotation;  // file
  std::string out;       // a new folder
};

using Command =
    std::variant<StatusCommand, StatsCommand, LookupCommand, PrefetchCommand, GetCommand,
                 PutCommand, DropCommand, FlushCommand, PinCommand, UnpinCommand,
                 KeyspaceStateCommand, NodesCommand, WhereCommand, DrainCommand, PageInspectCommand,
                 CalibrateCommand, RotationShowCommand, RotationVerifyCommand,
                 RotationConvertCommand, AbsorbCommand>;

struct CommandLine {
  std::string socket_dir = "/run/crumb";  // of crumbd; used when `address` is empty
  std::string address;                    // HOST:PORT
  std::string tls_ca_file;                // PEM files for TLS to `address`
  std::string tls_cert_file;
  std::string tls_key_file;
  std::string tls_server_name;  // instead of the address's host
  std::string token_file;       // holds the tenant's token
  double timeout_seconds = 10;  // for each of crumbd's answers
  bool json = false;
  Command command;
};

// Nothing is to be run: help or version was asked for (code 0), or the arguments are wrong.
struct EarlyExit {
  int code = 0;
  std::string out;
  std::string error;
};

// Never throws. `argv` as main gets it.
std::variant<CommandLine, EarlyExit> ParseCommandLine(int argc, const char* const* argv);

}  // namespace crumb::tools
