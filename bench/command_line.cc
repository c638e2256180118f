// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/command_line.h"

#include <memory>
#include <utility>

#include "CLI/CLI.hpp"
#include "bench/model_shape.h"
#include "bench/synthetic_traces.h"
#include "common/config.h"

namespace crumb::bench {
namespace {

constexpr const char* kExamples = R"(Examples:
  crumb-bench codec --json
  crumb-bench kernels --only 0,4 --json
  crumb-bench decode --shape qwen3-8b --context 102400 --batch 1,8,32 --memory-gb 80
  crumb-bench store --planes shm,grpc --sizes 128KiB,1MiB --redis auto
  crumb-bench store --planes shm --ops acquire --socket-dir /run/crumb
  crumb-bench replay --trace trace.jsonl --capacity-gb 64 --format int2 --policy default --json
  crumb-bench simulate --nodes 4..1000 --trace trace.jsonl
  crumb-bench replay --synthetic chats --capacity-gb 16,64 --policy lru,default,belady
  crumb-bench quality --model DIR --text eval.txt --calibration-text cal.txt --plot quality.svg

GB are 1e9 bytes. --json prints one object: the figures (rows, where there are several), machine,
commit and command. Progress goes to standard error. Exit code: 0 done, 1 failed, 2 wrong arguments.)";

// Converts a size such as "64MiB" to bytes, for CLI11.
CLI::Validator ByteSizeText() {
  return CLI::Validator(
      [](std::string& text) {
        const auto size = ParseByteSize(text);
        if (!size.ok() || size->value == 0) return "'" + text + "' is no size like 128KiB";
        text = std::to_string(size->value);
        return std::string();
      },
      "SIZE");
}

class Grammar {
 public:
  explicit Grammar(const std::string& program_folder)
      : app_("Measures Crumb on this machine.", "crumb-bench") {
    app_.require_subcommand(1);
    app_.set_version_flag("--version", std::string("crumb-bench ") + CRUMB_VERSION);
    app_.add_flag("--json", line_.json, "print one JSON object instead of a table");
    app_.fallthrough();
    store_->crumbd = program_folder + "/crumbd";
    store_->fragment_server = program_folder + "/crumb-fragment-server";
    kernels_->program = program_folder + "/crumb-kernel-bench";
    decode_->program = program_folder + "/crumb-decode-bench";
    AddCodec();
    AddKernels();
    AddDecode();
    AddStore();
    AddReplay();
    AddSimulate();
    AddQuality();
    app_.footer(kExamples);  // last, because subcommands inherit the settings before them
  }

  std::variant<CommandLine, EarlyExit> Parse(int argc, const char* const* argv) {
    if (auto exit = tools::ParseArguments(app_, argc, argv)) return *std::move(exit);
    return std::move(line_);
  }

 private:
  template <typename Options>
  CLI::App* Add(const std::string& name, const std::string& description,
                std::shared_ptr<Options> options) {
    CLI::App* sub = app_.add_subcommand(name, description);
    sub->fallthrough();
    sub->callback([this, options] { line_.workload = *options; });
    return sub;
  }

  void AddCodec() {
    CLI::App* sub =
        Add("codec", "quantize, dequantize and attention per instruction set, one core", codec_);
    sub->add_option("--contexts", codec_->contexts, "tokens attended")
        ->delimiter(',')
        ->check(CLI::Range(64, 1 << 20));
    sub->add_option("--rounds", codec_->rounds, "rounds; the median is reported")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
  }

  void AddStore() {
    CLI::App* sub = Add("store", "put, get and acquire over each plane of a crumbd", store_);
    sub->add_option("--planes", store_->planes, "shm, ucx-tcp, grpc, ssd")->delimiter(',');
    sub->add_option("--ops", store_->operations, "acquire, put, get, idle")->delimiter(',');
    sub->add_option("--sizes", store_->fragment_bytes, "fragment sizes")
        ->delimiter(',')
        ->transform(ByteSizeText());
    sub->add_option("--seconds", store_->seconds, "seconds of each figure")
        ->check(CLI::Range(0.05, 600.0))
        ->capture_default_str();
    sub->add_option("--idle-seconds", store_->idle_seconds, "seconds of the operation idle")
        ->check(CLI::Range(1.0, 600.0))
        ->capture_default_str();
    sub->add_option(
           "--beside-load", store_->beside_load,
           "processes that compute beside every figure: one for each core is a busy machine")
        ->check(CLI::Range(0, 1024))
        ->capture_default_str();
    CLI::Option* socket_dir = sub->add_option("--socket-dir", store_->socket_dir,
                                              "folder of a running crumbd's sockets; without it "
                                              "one is started in a temporary folder");
    sub->add_option("--crumbd", store_->crumbd, "the crumbd to start; default: beside this program")
        ->excludes(socket_dir);
    sub->add_option("--host-bytes", store_->host_bytes.value, "host memory of the started crumbd")
        ->transform(ByteSizeText());
    sub->add_option("--ssd-set-bytes", store_->ssd_set_bytes.value,
                    "bytes that plane ssd reads in a pass")
        ->transform(ByteSizeText());
    sub->add_option("--redis", store_->redis,
                    "compare with the Redis at HOST:PORT; auto starts redis-server");
    sub->callback([this] {
      const absl::Status status = store_->Validate();
      if (!status.ok()) throw CLI::ValidationError("store", std::string(status.message()));
      line_.workload = *store_;
    });
  }

  void AddSimulate() {
    CLI::App* sub =
        Add("simulate", "a trace over a cluster, without bytes: placement, hits, load", simulated_);
    CLI::Option* trace = sub->add_option("--trace", simulated_->trace_path,
                                         "JSON lines with hash_ids of 512-token blocks");
    trace->check(CLI::ExistingFile);
    sub->add_option("--synthetic", simulated_->synthetic, "a synthetic family instead of a trace")
        ->check(CLI::IsMember(SyntheticFamilyNames()))
        ->excludes(trace);
    sub->add_option("--seed", simulated_->seed, "seed of the family")->capture_default_str();
    sub->add_option("--nodes", node_counts_, "4,16 or 4..1000 (in steps of four times)")
        ->check([](const std::string& text) {
          const auto counts = ParseNodeCounts(text);
          return counts.ok() ? std::string() : std::string(counts.status().message());
        })
        ->capture_default_str();
    sub->add_option("--capacity-gb", simulated_->capacity_gb, "GB of one node")
        ->check(CLI::Range(0.001, 1e9))
        ->capture_default_str();
    sub->add_option("--replicas", simulated_->replicas, "homes of a run")
        ->check(CLI::Range(1, 8))
        ->capture_default_str();
    sub->add_option("--push", simulated_push_, "cluster.push: always, reused, or both of them")
        ->check(CLI::IsMember({"always", "reused", "both"}))
        ->capture_default_str();
    NetworkOptions& network = simulated_->network;
    sub->add_option("--zones", network.zones, "zones that the nodes are spread over")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    sub->add_option("--rtt-us", network.rtt_us, "round trip within a zone, in microseconds")
        ->check(CLI::Range(0.0, 1e6))
        ->capture_default_str();
    sub->add_option("--rtt-zones-us", network.rtt_zones_us, "round trip between zones")
        ->check(CLI::Range(0.0, 1e6))
        ->capture_default_str();
    sub->add_option("--nic-gbit", network.nic_gbit, "rate of a node's network card")
        ->check(CLI::Range(0.001, 1e6))
        ->capture_default_str();
    sub->add_option("--speedup", simulated_->speedup, "requests arrive so many times faster")
        ->check(CLI::Range(0.001, 1e6))
        ->capture_default_str();
    sub->add_option("--model", simulated_->model, "model of the pages")
        ->check(CLI::IsMember(ReplayModelNames()))
        ->capture_default_str();
    sub->add_option("--format", simulated_format_, "bf16 or int2")
        ->check(CLI::IsMember({"bf16", "int2"}))
        ->capture_default_str();
    sub->callback([this, trace] {
      if (trace->count() == 0 && simulated_->synthetic.empty()) {
        throw CLI::RequiredError("simulate: --trace or --synthetic");
      }
      simulated_->nodes = *ParseNodeCounts(node_counts_);  // was checked above
      simulated_->format = *ParseReplayFormat(simulated_format_);
      if (simulated_push_ == "always") simulated_->push = {SimulatedPush::kAlways};
      if (simulated_push_ == "reused") simulated_->push = {SimulatedPush::kReused};
      line_.workload = *simulated_;
    });
  }

  void AddReplay() {
    CLI::App* sub =
        Add("replay", "hit rate of a trace of prompts in a cache of limited size", replay_);
    CLI::Option* trace = sub->add_option("--trace", replay_->trace_path,
                                         "JSON lines with hash_ids of 512-token blocks");
    trace->check(CLI::ExistingFile);
    sub->add_option("--synthetic", replay_->synthetic, "a synthetic family instead of a trace")
        ->check(CLI::IsMember(SyntheticFamilyNames()))
        ->excludes(trace);
    sub->add_option("--seed", replay_->seed, "seed of the family")->capture_default_str();
    sub->add_option("--capacity-gb", replay_->capacities_gb, "bytes of the cache in GB")
        ->delimiter(',')
        ->check(CLI::Range(0.001, 1e9));
    sub->add_option("--policy", replay_->policies, "eviction policies")
        ->delimiter(',')
        ->check(CLI::IsMember(ReplayPolicyNames()));
    sub->add_option("--model", replay_->model, "model of the pages")
        ->check(CLI::IsMember(ReplayModelNames()))
        ->capture_default_str();
    sub->add_option("--format", format_, "bf16 or int2")
        ->check(CLI::IsMember({"bf16", "int2"}))
        ->capture_default_str();
    sub->add_flag(
        "--simulate", simulate_,
        "decide on block ids alone, without storing bytes; the only mode, and the default");
    sub->callback([this, trace] {
      if (trace->count() == 0 && replay_->synthetic.empty()) {
        throw CLI::RequiredError("replay: --trace or --synthetic");
      }
      replay_->format = *ParseReplayFormat(format_);  // was checked above
      line_.workload = *replay_;
    });
  }

  void AddKernels() {
    CLI::App* sub = Add("kernels", "the CUDA kernels on the first GPU", kernels_);
    sub->add_option("--only", kernels_->only, "decode rows by number; default: every row")
        ->delimiter(',')
        ->check(CLI::Range(0, 1000));
  }

  void AddDecode() {
    CLI::App* sub =
        Add("decode", "whole decode steps on the first GPU, INT2 against BF16", decode_);
    sub->add_option("--shape", decode_->shapes, "models whose shapes are measured")
        ->delimiter(',')
        ->check(CLI::IsMember(ModelShapeNames()))
        ->capture_default_str();
    sub->add_option("--context", decode_->context, "tokens of each sequence")
        ->check(CLI::Range(kDecodeContextMin, kDecodeContextMax))
        ->capture_default_str();
    sub->add_option("--batch", decode_->batches, "sequences; the largest that fits is added")
        ->delimiter(',')
        ->check(CLI::Range(1, kDecodeBatchMax))
        ->capture_default_str();
    sub->add_option("--kv", decode_->formats, "formats of keys and values: bf16, int2")
        ->delimiter(',')
        ->check(CLI::IsMember({"bf16", "int2"}))
        ->capture_default_str();
    sub->add_option("--memory-gb", decode_->memory_gb, "device memory of the largest batch")
        ->check(CLI::Range(1.0, 1e6))
        ->capture_default_str();
  }

  void AddQuality() {
    CLI::App* sub = Add("quality", "effect of 2-bit history on a model's predictions", quality_);
    sub->add_option("--model", quality_->model, "HF directory of a Llama, Qwen2 or Qwen3 model")
        ->required()
        ->check(CLI::ExistingDirectory);
    sub->add_option("--text", quality_->texts, "text files that are evaluated")
        ->required()
        ->check(CLI::ExistingFile);
    sub->add_option("--calibration-text", quality_->calibration_texts,
                    "other text files, for methods that are calibrated")
        ->check(CLI::ExistingFile);
    sub->add_option("--methods", quality_->methods, "methods to compare")
        ->delimiter(',')
        ->check(CLI::IsMember({"bf16", "naive", "hadamard", "kivi", "turboquant3",
                               "turboquant3-mse", "int4-hadamard", "kvarn", "block-gtq", "optr",
                               "optr-mean", "oscar", "crumb", "crumb-context"}))
        ->capture_default_str();
    sub->add_option("--rotation", quality_->rotations, "rotation files to compare as well")
        ->check(CLI::ExistingFile);
    sub->add_option("--context", quality_->contexts,
                    "tokens of a sequence; default 1024, 2048 and the model's maximum")
        ->delimiter(',')
        ->check(CLI::Range(64, 1 << 20));
    sub->add_option("--sequences", quality_->sequences, "sequences of each context at most")
        ->check(CLI::Range(2, 1 << 20))
        ->capture_default_str();
    sub->add_option("--passkeys", quality_->passkeys, "passkeys at the largest context; 0: none")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str();
    sub->add_flag("--passkeys-together", quality_->passkeys_together,
                  "hide up to 16 keys in a document rather than one");
    sub->add_option("--prefill-block", quality_->prefill_block,
                    "tokens that prefill attends in BF16, for the prefill column")
        ->check(CLI::Range(320, 1 << 20))
        ->capture_default_str();
    sub->add_option("--clip-sequences", quality_->clip_sequences,
                    "calibration sequences on which oscar's best clip is chosen; 0: no such row")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str();
    sub->add_option("--device", quality_->device, "device of INT2 attention")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
    sub->add_option("--plot", quality_->plot, "SVG file of KL against bits to write");
    sub->add_option("--calibration-context", quality_->calibration_context,
                    "tokens of one calibration sequence")
        ->check(CLI::Range(128, 1 << 20))
        ->capture_default_str();
    sub->add_option("--calibration-tokens", quality_->calibration_tokens,
                    "calibration tokens at most")
        ->check(CLI::Range(128, 1 << 28))
        ->capture_default_str();
    sub->add_option("--threads", quality_->threads, "sequences computed at a time; 0: one per CPU")
        ->check(CLI::Range(0, 256))
        ->capture_default_str();
  }

  CommandLine line_;
  std::shared_ptr<CodecOptions> codec_ = std::make_shared<CodecOptions>();
  std::shared_ptr<KernelsOptions> kernels_ = std::make_shared<KernelsOptions>();
  std::shared_ptr<DecodeOptions> decode_ = std::make_shared<DecodeOptions>();
  std::shared_ptr<StoreWorkloadOptions> store_ = std::make_shared<StoreWorkloadOptions>();
  std::shared_ptr<ReplayOptions> replay_ = std::make_shared<ReplayOptions>();
  std::shared_ptr<QualityOptions> quality_ = std::make_shared<QualityOptions>();
  std::shared_ptr<SimulateOptions> simulated_ = std::make_shared<SimulateOptions>();
  std::string node_counts_ = "4..1000";
  std::string simulated_format_ = "int2";
  std::string simulated_push_ = "both";
  std::string format_ = "int2";
  bool simulate_ = true;
  CLI::App app_;
};

}  // namespace

std::variant<CommandLine, EarlyExit> ParseCommandLine(int argc, const char* const* argv,
                                                      const std::string& program_folder) {
  return Grammar(program_folder).Parse(argc, argv);
}

}  // namespace crumb::bench
