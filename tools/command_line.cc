// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tools/command_line.h"

#include <charconv>
#include <functional>
#include <memory>
#include <utility>

#include "CLI/CLI.hpp"

namespace crumb::tools {
namespace {

constexpr const char* kExamples = R"(Examples:
  crumb status
  crumb --address 127.0.0.1:7070 stats --watch 2
  crumb lookup KEYSPACE KEY0 KEY1 KEY2
  crumb get KEYSPACE KEY --out page.crumb && crumb page inspect page.crumb
  crumb page inspect page.crumb --tile 3,0
  crumb calibrate --model DIR --text a.txt --text b.txt --out rotation.safetensors
  crumb rotation show rotation.safetensors
  crumb rotation convert k_rotation.pt v_rotation.pt --out rotation.safetensors
  crumb absorb --model DIR --rotation rotation.safetensors --out ABSORBED
  crumb nodes && crumb drain NODE --wait
  crumb keyspace state KEYSPACE bf16 --reason "attention error rose"

Keyspaces and keys are 64 hexadecimal digits. Exit code: 0 done, 1 failed, 2 wrong arguments.)";

// The grammar of `crumb`. Every Add function adds one subcommand, whose callback moves its
// arguments to line_.command.
class Grammar {
 public:
  Grammar() : app_("Looks into and steers a running crumbd, and reads fragment files.", "crumb") {
    app_.require_subcommand(1);
    app_.set_version_flag("--version", std::string("crumb ") + CRUMB_VERSION);
    app_.add_option("--socket-dir", line_.socket_dir, "folder of crumbd's sockets")
        ->capture_default_str();
    app_.add_option("--address", line_.address,
                    "crumbd's TCP address HOST:PORT, instead of a socket");
    AddSecurity();
    app_.add_option("--timeout", line_.timeout_seconds, "seconds to wait for crumbd's response")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app_.add_flag("--json", line_.json, "print one JSON object instead of tables");
    // `crumb status --json` and `crumb --json status` are the same.
    app_.fallthrough();
    AddObservers();
    AddPageTransfers();
    AddDrop();
    AddPins();
    AddKeyspaceState();
    AddCluster();
    AddPageInspect();
    AddCalibrate();
    AddRotation();
    AddAbsorb();
    app_.footer(kExamples);  // last, because subcommands inherit the settings before them
  }

  std::variant<CommandLine, EarlyExit> Parse(int argc, const char* const* argv) {
    if (auto exit = ParseArguments(app_, argc, argv)) return *std::move(exit);
    return std::move(line_);
  }

 private:
  // Adds a subcommand that sets line_.command to `options` after parsing.
  template <typename Options>
  CLI::App* Add(CLI::App* parent, const std::string& name, const std::string& description,
                std::shared_ptr<Options> options) {
    CLI::App* sub = parent->add_subcommand(name, description);
    sub->fallthrough();
    sub->callback([this, options] { line_.command = *options; });
    return sub;
  }

  static CLI::Option* AddKeyspace(CLI::App* sub, std::string& keyspace) {
    return sub->add_option("keyspace", keyspace, "keyspace id")->required()->check(HexId());
  }
  static CLI::Option* AddKeys(CLI::App* sub, std::vector<std::string>& keys) {
    return sub->add_option("keys", keys, "page keys, in prefix order")->check(HexId());
  }

  static CLI::Validator HexId() {
    return CLI::Validator(
        [](const std::string& text) {
          const bool hex = text.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
          return hex && text.size() == 64 ? std::string()
                                          : "'" + text + "' is not 64 hexadecimal digits";
        },
        "HEX");
  }

  void AddSecurity() {
    CLI::Option* address = app_.get_option("--address");
    CLI::Option* ca = app_.add_option("--tls-ca", line_.tls_ca_file,
                                      "use TLS to --address; PEM certificates that verify crumbd")
                          ->needs(address);
    CLI::Option* key =
        app_.add_option("--tls-key", line_.tls_key_file, "PEM private key of --tls-cert");
    app_.add_option("--tls-cert", line_.tls_cert_file,
                    "PEM certificate of this caller, if crumbd verifies its callers")
        ->needs(ca)
        ->needs(key);
    key->needs(ca);
    app_.add_option("--tls-server-name", line_.tls_server_name,
                    "name in crumbd's certificate, if it is not the host of --address")
        ->needs(ca);
    app_.add_option("--token-file", line_.token_file,
                    "file with the tenant's token, if crumbd has tenants");
  }

  void AddObservers() {
    Add(&app_, "status", "show health, version, tiers, keyspaces and sessions",
        std::make_shared<StatusCommand>());
    Add(&app_, "flush", "wait until everything committed is durable",
        std::make_shared<FlushCommand>());
    auto stats = std::make_shared<StatsCommand>();
    Add(&app_, "stats", "show all counters, hit rate by tier, bytes saved", stats)
        ->add_option("--watch", stats->watch_seconds, "repeat every so many seconds")
        ->check(CLI::Range(0.1, 3600.0));
    auto lookup = std::make_shared<LookupCommand>();
    CLI::App* sub = Add(&app_, "lookup", "show how much of a prefix is cached, and where", lookup);
    AddPrefix(sub, *lookup, [this, lookup] { line_.command = *lookup; });
    auto prefetch = std::make_shared<PrefetchCommand>();
    sub =
        Add(&app_, "prefetch",
            "start to load a prefix into host memory, from the SSD and from other nodes", prefetch);
    AddPrefix(sub, prefetch->pages, [this, prefetch] { line_.command = *prefetch; });
  }

  // Adds keys or tokens, which are parsed into `pages`; `done` is called if there are any.
  void AddPrefix(CLI::App* sub, LookupCommand& pages, const std::function<void()>& done) {
    AddKeyspace(sub, pages.keyspace);
    CLI::Option* keys = AddKeys(sub, pages.keys);
    CLI::Option* tokens =
        sub->add_option("--tokens-file", pages.tokens_file,
                        "token ids in decimal, divided by blanks or commas, instead of keys")
            ->check(CLI::ExistingFile)
            ->excludes(keys);
    sub->add_flag(
        "--everywhere", pages.everywhere,
        "look at every node of the cluster instead of the homes: needed for keys that do not "
        "begin a sequence");
    sub->callback([sub, keys, tokens, done] {
      if (keys->count() + tokens->count() == 0) {
        throw CLI::RequiredError(sub->get_name() + ": keys or --tokens-file");
      }
      done();
    });
  }

  void AddPageTransfers() {
    auto get = std::make_shared<GetCommand>();
    CLI::App* sub = Add(&app_, "get", "write a page's fragments to files", get);
    AddKeyspace(sub, get->keyspace);
    sub->add_option("key", get->key, "page key")->required()->check(HexId());
    sub->add_option("--out", get->out, "file to write; further fragments go to FILE.1, FILE.2...")
        ->required();
    auto put = std::make_shared<PutCommand>();
    sub = Add(&app_, "put", "store fragment files", put);
    AddKeyspace(sub, put->keyspace);
    sub->add_option("files", put->files, "fragment files")->required()->check(CLI::ExistingFile);
  }

  void AddDrop() {
    auto drop = std::make_shared<DropCommand>();
    CLI::App* sub =
        Add(&app_, "drop", "delete pages, or all pages of a keyspace if no key is given", drop);
    AddKeyspace(sub, drop->keyspace);
    AddKeys(sub, drop->keys);
    sub->add_flag("--yes", drop->confirmed, "confirm the deletion")->required();
  }

  void AddPins() {
    auto pin = std::make_shared<PinCommand>();
    CLI::App* sub = Add(&app_, "pin", "protect pages from eviction for a time", pin);
    AddKeyspace(sub, pin->keyspace);
    AddKeys(sub, pin->keys)->required();
    sub->add_option("--ttl", pin->ttl_seconds, "seconds")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    auto unpin = std::make_shared<UnpinCommand>();
    sub = Add(&app_, "unpin", "allow pages to be evicted again", unpin);
    AddKeyspace(sub, unpin->keyspace);
    AddKeys(sub, unpin->keys)->required();
  }

  void AddKeyspaceState() {
    auto state = std::make_shared<KeyspaceStateCommand>();
    CLI::App* keyspace = app_.add_subcommand("keyspace", "keyspace settings");
    keyspace->require_subcommand(1);
    keyspace->fallthrough();
    CLI::App* sub = Add(keyspace, "state", "serve INT2 pages (active) or not (bf16)", state);
    AddKeyspace(sub, state->keyspace);
    sub->add_option("state", state->state, "active or bf16")
        ->required()
        ->check(CLI::IsMember({"active", "bf16"}));
    sub->add_option("--reason", state->reason, "reason, which is stored with the state")
        ->required();
  }

  static PageInspectCommand::Tile ParseTile(const std::string& text) {
    PageInspectCommand::Tile tile;
    const char* end = text.data() + text.size();
    auto parsed = std::from_chars(text.data(), end, tile.layer);
    const bool comma = parsed.ec == std::errc() && parsed.ptr != end && *parsed.ptr == ',';
    if (comma) parsed = std::from_chars(parsed.ptr + 1, end, tile.head);
    if (!comma || parsed.ec != std::errc() || parsed.ptr != end) {
      throw CLI::ValidationError("--tile", "'" + text + "' is not LAYER,HEAD");
    }
    return tile;
  }

  void AddCluster() {
    Add(&app_, "nodes", "list the nodes of the cluster", std::make_shared<NodesCommand>());
    auto where = std::make_shared<WhereCommand>();
    CLI::App* sub = Add(&app_, "where", "show a page's homes and the nodes that hold it", where);
    sub->add_option("key", where->key, "page key")->required()->check(HexId());
    sub->add_option("--keyspace", where->keyspace,
                    "keyspace id; default: the one in which this crumbd has the page")
        ->check(HexId());
    auto drain = std::make_shared<DrainCommand>();
    sub = Add(&app_, "drain", "make a node leave: it pushes its pages to their new homes", drain);
    sub->add_option("node", drain->node, "node id, or a prefix of it")->required();
    sub->add_flag("--wait", drain->wait, "wait until the node is drained");
  }

  void AddPageInspect() {
    auto inspect = std::make_shared<PageInspectCommand>();
    CLI::App* page = app_.add_subcommand("page", "fragment files");
    page->require_subcommand(1);
    page->fallthrough();
    CLI::App* sub = Add(page, "inspect", "check a fragment file and show what it holds", inspect);
    sub->add_option("file", inspect->file, "fragment file")->required()->check(CLI::ExistingFile);
    sub->add_option_function<std::string>(
           "--tile", [inspect](const std::string& text) { inspect->tile = ParseTile(text); },
           "show the rows of one tile")
        ->type_name("LAYER,HEAD");
  }

  void AddCalibrate() {
    auto options = std::make_shared<CalibrateCommand>();
    CLI::App* sub =
        Add(&app_, "calibrate", "make a rotation file from a model and texts, or from activations",
            options);
    sub->add_option("--method", options->method, "hadamard and naive need no data")
        ->check(CLI::IsMember({"crumb", "oscar", "hadamard", "naive"}))
        ->capture_default_str();
    CLI::Option* model =
        sub->add_option("--model", options->model, "HF directory of a Llama, Qwen2 or Qwen3 model")
            ->check(CLI::ExistingDirectory);
    CLI::Option* text =
        sub->add_option("--text", options->texts, "text files, UTF-8")->check(CLI::ExistingFile);
    CLI::Option* activations =
        sub->add_option("--activations", options->activations,
                        "safetensors files with layers.N.{q,k,v} and positions, instead of text")
            ->check(CLI::ExistingFile)
            ->excludes(text);
    AddActivationModel(sub, *options);
    sub->add_flag("--value-hessian", options->value_hessian,
                  "with activations: add feedback for values, from the model's o_proj")
        ->needs(model);
    sub->add_option("--whiten-k", options->whitening_k,
                    "crumb: how far keys' bases level the variance of channels; 0: not at all, and "
                    "bases are orthogonal")
        ->check(CLI::Range(0.0, 1.0));
    sub->add_option("--whiten-v", options->whitening_v, "the same for values")
        ->check(CLI::Range(0.0, 1.0));
    sub->add_option("--out", options->out, "rotation file to write")->required();
    sub->add_option("--positions", options->positions,
                    "tokens of the serving context; default: the model's maximum")
        ->check(CLI::Range(65, 1 << 24));
    sub->add_option("--context", options->context, "tokens of one calibration sequence")
        ->check(CLI::Range(128, 1 << 20))
        ->capture_default_str();
    sub->add_option("--tokens", options->tokens, "calibration tokens at most")
        ->check(CLI::Range(128, 1 << 28))
        ->capture_default_str();
    sub->add_option("--head-dim", options->head_dim, "head dimension for hadamard and naive")
        ->capture_default_str();
    sub->add_option("--threads", options->threads, "compute threads; 0: one per CPU")
        ->check(CLI::Range(0, 256))
        ->capture_default_str();
    AddClips(sub, options->clip_k, options->clip_v);
    sub->callback([this, options, model, text, activations] {
      const bool from_text = model->count() > 0 && text->count() > 0;
      const bool free = options->method == "hadamard" || options->method == "naive";
      if (!free && !from_text && activations->count() == 0) {
        throw CLI::RequiredError("calibrate: --model and --text, or --activations");
      }
      line_.command = *options;
    });
  }

  static void AddActivationModel(CLI::App* sub, CalibrateCommand& options) {
    sub->add_option("--model-name", options.model_name, "model name, for activations");
    sub->add_option("--layer-ids", options.layer_ids,
                    "for activations: the layers to use, if some have no full attention")
        ->delimiter(',')
        ->check(CLI::Range(0, 1023));
    sub->add_option("--rope-theta", options.rope_theta, "RoPE base, for activations")
        ->check(CLI::PositiveNumber);
    sub->add_option("--rope-scaling", options.rope_scaling,
                    "for activations: the object of this name in config.json");
    sub->add_option("--rotary-dim", options.rotary_dim,
                    "for activations: channels that RoPE rotates; 0: none")
        ->check(CLI::Range(0, 1024));
  }

  void AddRotation() {
    CLI::App* rotation = app_.add_subcommand("rotation", "rotation files");
    rotation->require_subcommand(1);
    rotation->fallthrough();
    auto show = std::make_shared<RotationShowCommand>();
    Add(rotation, "show", "show a rotation file, layer by layer", show)
        ->add_option("file", show->file, "rotation file")
        ->required()
        ->check(CLI::ExistingFile);
    auto verify = std::make_shared<RotationVerifyCommand>();
    Add(rotation, "verify", "check digest, orthogonality and diag(R' C R)", verify)
        ->add_option("file", verify->file, "rotation file")
        ->required()
        ->check(CLI::ExistingFile);
    AddRotationConvert(rotation);
  }

  void AddRotationConvert(CLI::App* rotation) {
    auto convert = std::make_shared<RotationConvertCommand>();
    CLI::App* sub =
        Add(rotation, "convert", "convert between RotationZoo's files and rotation files", convert);
    sub->add_option("files", convert->files,
                    "RotationZoo files for K and V (torch.save), or one rotation file")
        ->required()
        ->expected(1, 2)
        ->check(CLI::ExistingFile);
    sub->add_option("--out", convert->out, "file to write")->required();
    sub->add_option("--format", convert->format,
                    "v1 and v2 are RotationZoo's: one rotation per layer, or per KV head")
        ->check(CLI::IsMember({"crumb", "v1", "v2"}))
        ->capture_default_str();
    sub->add_option("--side", convert->side, "tensor whose rotations are written to v1 or v2")
        ->check(CLI::IsMember({"k", "v"}));
    sub->add_option("--model-name", convert->model, "model name; default: from the file's name");
    sub->add_option("--layers", convert->layers,
                    "layers of v1 and v2, if the file is for all layers")
        ->check(CLI::Range(1, 1024));
    sub->add_option("--kv-heads", convert->kv_heads,
                    "KV heads of v2, if the file is for all KV heads")
        ->check(CLI::Range(1, 1024));
    AddClips(sub, convert->clip_k, convert->clip_v);
  }

  void AddAbsorb() {
    auto absorb = std::make_shared<AbsorbCommand>();
    CLI::App* sub =
        Add(&app_, "absorb", "copy a model and fold R_V into its v_proj and o_proj", absorb);
    sub->add_option("--model", absorb->model, "HF directory, safetensors weights")
        ->required()
        ->check(CLI::ExistingDirectory);
    sub->add_option("--rotation", absorb->rotation, "rotation file of the model")
        ->required()
        ->check(CLI::ExistingFile);
    sub->add_option("--out", absorb->out, "new folder for the model")->required();
  }

  static void AddClips(CLI::App* sub, std::optional<float>& k, std::optional<float>& v) {
    sub->add_option("--clip-k", k, "fraction of |k| inside the range, 0: all")
        ->check(CLI::Range(0.0, 1.0));
    sub->add_option("--clip-v", v, "fraction of |v| inside the range, 0: all")
        ->check(CLI::Range(0.0, 1.0));
  }

  CommandLine line_;
  CLI::App app_;
};

}  // namespace

std::variant<CommandLine, EarlyExit> ParseCommandLine(int argc, const char* const* argv) {
  return Grammar().Parse(argc, argv);
}

}  // namespace crumb::tools
