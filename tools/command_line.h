// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tools/cli.h"

// The arguments of `crumb`, as data.
namespace crumb::tools {

// `crumb status`: health, tiers, keyspaces and sessions of crumbd.
struct StatusCommand {};

// `crumb stats`: hit rates by tier, bytes saved, and all counters.
struct StatsCommand {
  double watch_seconds = 0;  // above 0: repeat after so many seconds, until interrupted
};

// `crumb lookup`: the length of the longest cached prefix, without leasing it.
struct LookupCommand {
  std::string keyspace;           // hexadecimal
  std::vector<std::string> keys;  // hexadecimal; empty: `tokens_file` has the prefix
  std::string tokens_file;        // token ids, from which the keys are computed
  bool everywhere = false;        // looks at every node instead of the homes
};

// Loads the pages that a lookup would find into host memory.
struct PrefetchCommand {
  LookupCommand pages;
};

// `crumb get`: reads one page into files.
struct GetCommand {
  std::string keyspace;
  std::string key;
  std::string out;  // the fragments of the page are written to OUT, OUT.1, OUT.2...
};

// `crumb put`: commits fragments from files that `crumb get` wrote.
struct PutCommand {
  std::string keyspace;
  std::vector<std::string> files;
};

// Deletes pages, or the whole keyspace if `keys` is empty.
struct DropCommand {
  std::string keyspace;
  std::vector<std::string> keys;
  bool confirmed = false;
};

// `crumb flush`: returns once all committed pages are durable.
struct FlushCommand {};

// `crumb pin`: keeps pages from eviction for a limited time.
struct PinCommand {
  std::string keyspace;
  std::vector<std::string> keys;
  double ttl_seconds = 3600;
};

// `crumb unpin`: ends the pins of pages before their time.
struct UnpinCommand {
  std::string keyspace;
  std::vector<std::string> keys;
};

// `crumb keyspace state`: whether a keyspace serves INT2 pages.
struct KeyspaceStateCommand {
  std::string keyspace;
  std::string state;  // active or bf16
  std::string reason;
};

// `crumb nodes`: the nodes of the cluster as crumbd sees them.
struct NodesCommand {};

// `crumb where`: the homes of a page and the nodes that have it.
struct WhereCommand {
  std::string key;
  std::string keyspace;  // empty: the one in which crumbd has the page
};

// `crumb drain`: makes a node push its pages to their homes before it leaves the cluster.
struct DrainCommand {
  std::string node;  // id, or a prefix of exactly one id
  bool wait = false;
};

// `crumb page inspect`: the header, checksums and statistics of a fragment file.
struct PageInspectCommand {
  struct Tile {
    int layer = 0;
    int head = 0;
  };
  std::string file;
  std::optional<Tile> tile;  // shows the rows of this tile
};

// `crumb calibrate`: makes a rotation file from a model and texts, or from activations.
struct CalibrateCommand {
  std::string method = "crumb";  // crumb, oscar, hadamard or naive
  // crumb and oscar need a model and texts, or activations and possibly a model.
  std::string model;                     // HF directory
  std::vector<std::string> texts;        // files
  std::vector<std::string> activations;  // safetensors files
  std::string out;
  int positions = 0;  // serving context; 0: the model's maximum
  // Properties of activations, which override their metadata and the model.
  std::string model_name;
  std::vector<int> layer_ids;  // ascending
  std::optional<double> rope_theta;
  std::string rope_scaling;  // JSON, as in config.json
  std::optional<int> rotary_dim;
  bool value_hessian = false;  // adds feedback for values to that of activations, from o_proj
  // Exponents of the bases of `crumb`; 0: orthogonal.
  std::optional<double> whitening_k, whitening_v;
  int context = 1024;
  int tokens = 32768;
  int head_dim = 128;  // used by hadamard and naive
  int threads = 0;
  std::optional<float> clip_k;  // overrides the method's clip
  std::optional<float> clip_v;
};

// `crumb rotation show`: the contents of a rotation file.
struct RotationShowCommand {
  std::string file;
};

// `crumb rotation verify`: checks digest and orthogonality of a rotation file.
struct RotationVerifyCommand {
  std::string file;
};

// `crumb rotation convert`: between a rotation file and the formats of RotationZoo.
struct RotationConvertCommand {
  std::vector<std::string> files;  // RotationZoo files for K and V, or one rotation file
  std::string out;
  std::string format = "crumb";  // crumb, or v1 or v2: a RotationZoo file
  std::string side;              // k or v, if the files do not say
  std::string model;             // overrides the name in the file
  int layers = 0;                // layers of v1 and v2, if the file is for all layers
  int kv_heads = 0;              // KV heads of v2, if the file is for all KV heads
  std::optional<float> clip_k;
  std::optional<float> clip_v;
};

// `crumb absorb`: folds the rotation of values into a copy of a model.
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

// A command, and how its calls reach crumbd.
struct CommandLine {
  std::string socket_dir = "/run/crumb";  // folder of crumbd's sockets; used if `address` is empty
  std::string address;                    // HOST:PORT
  std::string tls_ca_file;                // PEM files for TLS to `address`
  std::string tls_cert_file;
  std::string tls_key_file;
  std::string tls_server_name;  // overrides the address's host
  std::string token_file;       // contains the tenant's token
  double timeout_seconds = 10;  // limit of each call to crumbd
  bool json = false;
  Command command;
};

// Parses the arguments of main. Never throws.
std::variant<CommandLine, EarlyExit> ParseCommandLine(int argc, const char* const* argv);

}  // namespace crumb::tools
