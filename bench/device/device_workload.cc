// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/device/device_workload.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

#include "bench/device/endless_client.h"
#include "client/gpu/device/owned.h"
#include "client/gpu/gpu_sequence.h"
#include "common/page_key.h"
#include "common/status_macros.h"
#include "crumb/device_worker.h"
#include "kernels/bf16.h"

namespace crumb::bench {
namespace {

using client::Device;
using client::DeviceBatch;
using client::DeviceBuffer;
using client::DeviceSequence;
using client::DeviceStream;
using client::DeviceWorker;
using client::PassKind;

constexpr int kChunk = 512;
// Passes beside a prefix that is fetched, at most.
constexpr int kPassesBeside = 192;
constexpr Duration kPatience = std::chrono::seconds(120);

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

class Run {
 public:
  Run(const DeviceWorkload& workload, Device& device, const CapturePass& capture)
      : workload_(workload),
        options_(workload.options),
        device_(device),
        capture_(capture),
        client_(workload.options, workload.host_pages, 1) {}

  absl::StatusOr<DeviceResult> All() {
    CRUMB_ASSIGN_OR_RETURN(stream_, client::NewStream(device_));
    CRUMB_ASSIGN_OR_RETURN(event_, client::NewEvent(device_));
    const int most = *std::max_element(workload_.batches.begin(), workload_.batches.end());
    const int pages = (workload_.context + workload_.passes + kPassesBeside) / kPageTokens + 8;
    const bool bf16 = options_.history_format == kernels::PageFormat::kBf16;
    CRUMB_ASSIGN_OR_RETURN(worker_,
                           DeviceWorker::Open(options_,
                                              {.pages = bf16 ? 1 : pages * (most + 1),
                                               .bf16_pages = bf16 ? pages * (most + 1) : 0,
                                               .sequences = most,
                                               .prompts = 1,
                                               .loads = 1,
                                               .load_pages = pages,
                                               .load_kernel_layers = workload_.load_kernel_layers},
                                              &client_, device_));
    CRUMB_ASSIGN_OR_RETURN(prompts_, worker_->NewBatch({.stream = stream_.get(),
                                                        .kind = PassKind::kPrompt,
                                                        .sequences = 1,
                                                        .tokens = kChunk,
                                                        .pages = pages}));
    CRUMB_ASSIGN_OR_RETURN(first_, worker_->NewBatch({.stream = stream_.get(), .pages = pages}));
    CRUMB_RETURN_IF_ERROR(MakeRows(std::max(kChunk, most)));
    DeviceResult result;
    CRUMB_ASSIGN_OR_RETURN(result.fetch, Fetch());
    for (const int batch : workload_.batches) {
      CRUMB_ASSIGN_OR_RETURN(DecodeResult decode, Decode(batch, pages));
      result.decode.push_back(decode);
    }
    return result;
  }

 private:
  using Launch = std::function<void()>;

  absl::Status Wait() {
    CRUMB_RETURN_IF_ERROR(device_.Record(event_.get(), stream_.get()));
    return device_.Synchronize(event_.get());
  }

  // The rows of q, k, v and out that every layer and pass uses. They are random, because equal rows
  // are a special case for quantization.
  absl::Status MakeRows(int rows) {
    const size_t k_bytes = size_t{2} * rows * options_.own_kv_heads() * options_.head_dim;
    const size_t q_bytes = size_t{2} * rows * options_.own_q_heads() * options_.head_dim;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const auto& [buffer, bytes] : {std::pair(&q_, q_bytes), std::pair(&k_, k_bytes),
                                        std::pair(&v_, k_bytes), std::pair(&out_, q_bytes)}) {
      CRUMB_ASSIGN_OR_RETURN(*buffer, client::NewDeviceBuffer(device_, bytes));
      CRUMB_ASSIGN_OR_RETURN(const auto host, client::NewPinnedBuffer(device_, bytes));
      auto* values = reinterpret_cast<kernels::Bf16*>(host.get());
      for (size_t i = 0; i < bytes / sizeof(kernels::Bf16); ++i) {
        values[i] = kernels::Bf16FromFloat(normal(random));
      }
      const client::DeviceCopy copy{buffer->get(), reinterpret_cast<uint64_t>(host.get()), bytes};
      CRUMB_RETURN_IF_ERROR(device_.ToDevice({&copy, 1}, stream_.get()));
      CRUMB_RETURN_IF_ERROR(Wait());
    }
    return absl::OkStatus();
  }

  absl::Status Layer(DeviceBatch& batch, int layer) {
    const auto pointer = [](const DeviceBuffer& b) { return reinterpret_cast<void*>(b.get()); };
    CRUMB_RETURN_IF_ERROR(batch.Append(layer, pointer(k_), pointer(v_)));
    return batch.Attend(layer, pointer(q_), pointer(out_));
  }

  // Returns the tokens of sequence `number`, which differ from those of all others.
  std::vector<int32_t> Tokens(int number) const {
    std::vector<int32_t> tokens(workload_.context + workload_.passes + kPassesBeside);
    std::iota(tokens.begin(), tokens.end(), number * 1000003);
    return tokens;
  }

  // Waits for the sequence's prefix layer by layer, as attention does.
  absl::Status AwaitPrefix(const DeviceSequence& sequence, double start, FetchResult* fetch) {
    const auto& resident = static_cast<const client::GpuSequence&>(sequence);
    for (const auto& load : resident.loads) {
      CRUMB_RETURN_IF_ERROR(load->MakeWait(stream_.get(), 0));
    }
    CRUMB_RETURN_IF_ERROR(Wait());
    fetch->first_layer_seconds = Now() - start;
    for (const auto& load : resident.loads) {
      CRUMB_RETURN_IF_ERROR(load->MakeWaitAll(stream_.get()));
    }
    CRUMB_RETURN_IF_ERROR(Wait());
    fetch->all_layers_seconds = Now() - start;
    return absl::OkStatus();
  }

  // Begins a sequence and computes the tokens that the cache does not have. With `await`, it waits
  // for the whole prefix before the first pass, otherwise each layer of that pass waits for its
  // part.
  absl::StatusOr<std::unique_ptr<DeviceSequence>> Begin(const std::vector<int32_t>& tokens,
                                                        bool await, FetchResult* fetch) {
    const double start = Now();
    const std::span<const int32_t> prompt(tokens.data(), workload_.context);
    CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<DeviceSequence> sequence, worker_->Begin(prompt));
    fetch->begin_seconds = Now() - start;
    if (await) CRUMB_RETURN_IF_ERROR(AwaitPrefix(*sequence, start, fetch));
    bool first = true;
    while (sequence->length() < workload_.context) {
      const int length = sequence->length();
      const int count = std::min(kChunk, sequence->pass_tokens_max());
      const client::PassEntry entry{sequence.get(), count};
      CRUMB_RETURN_IF_ERROR(prompts_->Prepare({&entry, 1}));
      CRUMB_RETURN_IF_ERROR(prompts_->Start());
      for (int layer = 0; layer < options_.own_layers(); ++layer) {
        CRUMB_RETURN_IF_ERROR(Layer(*prompts_, layer));
        if (!first || layer > 0) continue;
        CRUMB_RETURN_IF_ERROR(Wait());
        fetch->first_attended_seconds = Now() - start;
      }
      if (std::exchange(first, false)) {
        CRUMB_RETURN_IF_ERROR(Wait());
        fetch->all_attended_seconds = Now() - start;
      }
      const std::span<const int32_t> kept = prompt.subspan(length, count);
      CRUMB_RETURN_IF_ERROR(prompts_->Advance({&kept, 1}));
    }
    return sequence;
  }

  absl::StatusOr<double> PinnedCopyRate(size_t bytes) {
    CRUMB_ASSIGN_OR_RETURN(const auto host, client::NewPinnedBuffer(device_, bytes));
    CRUMB_ASSIGN_OR_RETURN(const auto target, client::NewDeviceBuffer(device_, bytes));
    const client::DeviceCopy copy{target.get(), reinterpret_cast<uint64_t>(host.get()), bytes};
    std::vector<double> seconds;
    for (int i = 0; i < 5; ++i) {
      const double start = Now();
      CRUMB_RETURN_IF_ERROR(device_.ToDevice({&copy, 1}, stream_.get()));
      CRUMB_RETURN_IF_ERROR(Wait());
      seconds.push_back(Now() - start);
    }
    return static_cast<double>(bytes) / Median(seconds) / 1e9;
  }

  absl::StatusOr<FetchResult> Fetch() {
    constexpr int kRounds = 5;
    std::vector<FetchResult> awaited, attended;
    for (int i = 0; i < 2 * kRounds + 2; ++i) {
      FetchResult round;
      const bool await = i % 2 == 0;
      CRUMB_ASSIGN_OR_RETURN(const auto sequence, Begin(Tokens(i), await, &round));
      round.bytes = static_cast<int64_t>(sequence->stats().fetched_bytes);
      if (sequence->stats().hit_tokens() < workload_.context / 2) {
        return absl::InternalError("the prefix did not hit: " + sequence->stats().miss_reason);
      }
      if (i > 1) (await ? awaited : attended).push_back(round);  // the first rounds warm up
      CRUMB_RETURN_IF_ERROR(worker_->WaitPublished(kPatience));
    }
    const auto median = [](const std::vector<FetchResult>& rounds, double FetchResult::*field) {
      std::vector<double> values;
      values.reserve(rounds.size());
      for (const FetchResult& round : rounds) values.push_back(round.*field);
      return Median(std::move(values));
    };
    FetchResult result;
    result.bytes = awaited.front().bytes;
    result.begin_seconds = median(awaited, &FetchResult::begin_seconds);
    result.first_layer_seconds = median(awaited, &FetchResult::first_layer_seconds);
    result.all_layers_seconds = median(awaited, &FetchResult::all_layers_seconds);
    result.first_attended_seconds = median(attended, &FetchResult::first_attended_seconds);
    result.all_attended_seconds = median(attended, &FetchResult::all_attended_seconds);
    result.fetch_gbps = static_cast<double>(result.bytes) / result.all_layers_seconds / 1e9;
    CRUMB_ASSIGN_OR_RETURN(result.copy_gbps, PinnedCopyRate(result.bytes));
    return result;
  }

  absl::StatusOr<DecodeResult> Decode(int size, int pages) {
    CRUMB_ASSIGN_OR_RETURN(const auto batch, worker_->NewBatch({.stream = stream_.get(),
                                                                .kind = PassKind::kDecode,
                                                                .sequences = size,
                                                                .tokens = 1,
                                                                .pages = pages}));
    std::vector<std::vector<int32_t>> tokens;
    std::vector<std::unique_ptr<DeviceSequence>> sequences;
    for (int i = 0; i < size; ++i) {
      FetchResult unused;
      tokens.push_back(Tokens(100 * size + i));
      CRUMB_ASSIGN_OR_RETURN(auto sequence, Begin(tokens.back(), false, &unused));
      sequences.push_back(std::move(sequence));
      // The first decode pass releases the prompt's rows for the next sequence.
      CRUMB_RETURN_IF_ERROR(Pass(*first_, {&sequences.back(), 1}, {&tokens.back(), 1}, nullptr));
      CRUMB_RETURN_IF_ERROR(worker_->WaitPublished(kPatience));
    }
    DecodeResult result;
    result.batch = size;
    Launch launch;
    std::vector<double> plain, evicting;
    const uint64_t published = client_.committed();
    // Most passes run one by one, then the others without waits between them.
    const int waited = workload_.passes * 5 / 7;
    double start = Now();
    for (int pass = 0; pass < workload_.passes; ++pass) {
      if (pass == waited) {
        CRUMB_RETURN_IF_ERROR(Wait());
        start = Now();
      }
      const uint64_t evicted = sequences.front()->stats().stored_bytes;
      const double begin = Now();
      CRUMB_RETURN_IF_ERROR(Pass(*batch, sequences, tokens, &launch));
      if (pass >= waited) continue;
      CRUMB_RETURN_IF_ERROR(Wait());
      const double seconds = Now() - begin;
      const bool left = sequences.front()->stats().stored_bytes != evicted;
      if (pass > 1) (left ? evicting : plain).push_back(seconds);
    }
    CRUMB_RETURN_IF_ERROR(Wait());
    result.mean_seconds = (Now() - start) / (workload_.passes - waited);
    result.step_seconds = Median(plain);
    result.evict_seconds = Median(evicting);
    CRUMB_RETURN_IF_ERROR(worker_->WaitPublished(kPatience));
    result.published_pages = client_.committed() - published;
    CRUMB_RETURN_IF_ERROR(PassesBeside(*batch, sequences, tokens, &launch, &result));
    return result;
  }

  // Times passes while other prefixes are fetched.
  absl::Status PassesBeside(DeviceBatch& batch,
                            std::span<const std::unique_ptr<DeviceSequence>> sequences,
                            std::span<const std::vector<int32_t>> tokens, Launch* launch,
                            DecodeResult* result) {
    constexpr int kRounds = 3;
    std::vector<double> steps, loads;
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<int32_t> prompt = Tokens(5000 + 100 * result->batch + round);
      const double start = Now();
      CRUMB_ASSIGN_OR_RETURN(const auto coming,
                             worker_->Begin(std::span(prompt).first(workload_.context)));
      const auto& pending = static_cast<const client::GpuSequence&>(*coming).loads;
      const auto loaded = [&] {
        return std::all_of(pending.begin(), pending.end(), [](const auto& l) { return l->done(); });
      };
      for (int pass = 0; pass < kPassesBeside / kRounds && (pass == 0 || !loaded()); ++pass) {
        const double begin = Now();
        CRUMB_RETURN_IF_ERROR(Pass(batch, sequences, tokens, launch));
        CRUMB_RETURN_IF_ERROR(Wait());
        steps.push_back(Now() - begin);
      }
      loads.push_back(Now() - start);
      CRUMB_RETURN_IF_ERROR(worker_->WaitPublished(kPatience));
    }
    result->beside_load_seconds = Median(std::move(steps));
    result->load_seconds = Median(std::move(loads));
    return absl::OkStatus();
  }

  // Runs a pass, which is captured the first time if `launch` is not null.
  absl::Status Pass(DeviceBatch& batch, std::span<const std::unique_ptr<DeviceSequence>> sequences,
                    std::span<const std::vector<int32_t>> tokens, Launch* launch) {
    std::vector<client::PassEntry> entries;
    std::vector<std::span<const int32_t>> kept;
    for (size_t i = 0; i < sequences.size(); ++i) {
      entries.push_back({sequences[i].get(), 1});
      kept.emplace_back(tokens[i].data() + sequences[i]->length(), 1);
    }
    CRUMB_RETURN_IF_ERROR(batch.Prepare(entries));
    absl::Status enqueued;
    const auto pass = [&] {
      enqueued = batch.Start();
      for (int layer = 0; layer < options_.own_layers() && enqueued.ok(); ++layer) {
        enqueued = Layer(batch, layer);
      }
    };
    if (launch == nullptr || !capture_) {
      pass();
    } else {
      if (*launch == nullptr) *launch = capture_(stream_.get(), pass);
      (*launch)();
    }
    CRUMB_RETURN_IF_ERROR(enqueued);
    return batch.Advance(kept);
  }

  const DeviceWorkload& workload_;
  const client::WorkerOptions& options_;
  Device& device_;
  const CapturePass& capture_;
  EndlessClient client_;
  client::OwnedStream stream_;
  client::OwnedEvent event_;
  DeviceBuffer q_, k_, v_, out_;
  std::unique_ptr<DeviceWorker> worker_;
  std::unique_ptr<DeviceBatch> prompts_;
  std::unique_ptr<DeviceBatch> first_;
};

}  // namespace

absl::StatusOr<DeviceResult> RunDeviceWorkload(const DeviceWorkload& workload, Device& device,
                                               const CapturePass& capture) {
  if (workload.batches.empty() || workload.context < 1024 || workload.passes < 130) {
    return absl::InvalidArgumentError(
        "a batch size, a context of 1,024 tokens and 130 passes at least");
  }
  return Run(workload, device, capture).All();
}

client::WorkerOptions Qwen3Of8B() {
  client::WorkerOptions options;
  options.model = "qwen3-8b";
  options.weights = "none";
  options.layers = 36;
  options.kv_heads = 8;
  options.q_heads = 32;
  options.head_dim = 128;
  options.watch_every = 0;
  options.draft_slots = 7;
  options.rotations = client::RotationSet::Hadamard(128).value();
  return options;
}

}  // namespace crumb::bench
