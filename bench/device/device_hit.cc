// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/device/device_hit.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "client/gpu/device/owned.h"
#include "client/gpu/device_geometry.h"
#include "client/gpu/gpu_sequence.h"
#include "client/gpu/pools/device_pool.h"
#include "client/worker/keyspace_binding.h"
#include "common/crc32c.h"
#include "common/page_key.h"
#include "common/status_macros.h"
#include "crumb/client.h"
#include "crumb/device_worker.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

using client::DevicePool;
using kernels::PageFormat;

constexpr Duration kHitPatience = std::chrono::seconds(60);
constexpr uint64_t kHandleBytes = uint64_t{256} << 20;
constexpr int kWarmUp = 3;
constexpr int kCommitBatch = 64;
constexpr int kAcquires = 20;
// A pool has one additional slot per so many pages.
constexpr int kPagesPerSpareSlot = 16;

double MsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

double Quantile(std::vector<double> values, double share) {
  const auto at = static_cast<size_t>(std::lround(share * static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const DeviceHitWorkload& workload) {
  client::ClientOptions options;
  options.socket_dir = workload.socket_dir;
  CRUMB_ASSIGN_OR_RETURN(auto client, client::Client::Open(options));
  if (!client->WaitConnected(workload.connect_wait)) return absl::UnavailableError("no crumbd");
  return client;
}

// Returns the slots of a pool for so many pages. crumbd keeps a fraction of a pool blank by copying
// pages to host memory, 2 percent by default (device.blank_percent_min); without additional slots
// the first pages would be evicted.
uint64_t WholeHandles(size_t slot_bytes, int slots) {
  const auto per_handle = static_cast<int>(kHandleBytes / slot_bytes);
  const int spare = slots / kPagesPerSpareSlot + 1;
  return kHandleBytes * static_cast<uint64_t>((slots + spare + per_handle - 1) / per_handle + 1);
}

// The worker that fills the pools: it commits pages of zeros under the prompt's keys.
class Writer {
 public:
  Writer(const DeviceHitWorkload& workload, client::Device& device)
      : workload_(workload), device_(device), geometry_(workload.options) {}

  // REQUIRES: all prompts have the same number of pages.
  absl::Status Fill(std::span<const std::vector<int32_t>> prompts) {
    CRUMB_ASSIGN_OR_RETURN(client_, Connect(workload_));
    CRUMB_ASSIGN_OR_RETURN(memory_, device_.OpenMemory());
    CRUMB_ASSIGN_OR_RETURN(stream_, client::NewStream(device_));
    CRUMB_ASSIGN_OR_RETURN(written_, client::NewEvent(device_));
    CRUMB_RETURN_IF_ERROR(OpenKeyspace());
    for (const std::vector<int32_t>& tokens : prompts) {
      keys_.push_back(PageKeysOf(keyspace_.id, tokens));
    }
    CRUMB_RETURN_IF_ERROR(FillPool(PageFormat::kBf16, 0, 1));
    return FillPool(PageFormat::kInt2, 1, static_cast<int>(keys_.front().size()));
  }

  // Returns the time of an Acquire of all pages by itself.
  absl::StatusOr<double> AcquireMs(int pages) const {
    std::vector<double> times;
    for (int round = 0; round < kAcquires; ++round) {
      client::AcquireRequest request;
      request.keyspace = keyspace_.id;
      request.generation = keyspace_.generation;
      request.keys = std::span(keys_.front()).first(static_cast<size_t>(pages));
      request.range = workload_.options.own_tiles();
      for (const auto& pool : pools_) request.pools.push_back(pool->id());
      request.timeout = kHitPatience;
      const auto start = std::chrono::steady_clock::now();
      CRUMB_ASSIGN_OR_RETURN(const auto found, client_->Acquire(request));
      times.push_back(MsSince(start));
      if (found.hit_pages != pages) return absl::InternalError("pages are not there any more");
    }
    return Quantile(times, 0.5);
  }

 private:
  absl::Status OpenKeyspace() {
    client::KeyspaceSpec spec;
    CRUMB_ASSIGN_OR_RETURN(spec.fields,
                           client::KeyspaceFields(workload_.options, PageFormat::kInt2));
    spec.layers = workload_.options.layers;
    spec.kv_heads = workload_.options.kv_heads;
    spec.head_dim = workload_.options.head_dim;
    spec.group_size = workload_.options.group_size;
    CRUMB_ASSIGN_OR_RETURN(keyspace_, client_->OpenKeyspace(spec, kHitPatience));
    return absl::OkStatus();
  }

  FragmentHeader HeaderOf(PageFormat format, size_t prompt, int page) const {
    const std::vector<PageKey>& keys = keys_[prompt];
    FragmentHeader header;
    header.format = format;
    header.layout_id = kernels::kTileLayoutId;
    header.tile_bytes = static_cast<uint32_t>(geometry_.tile.bytes(format));
    header.generation = keyspace_.generation;
    header.keyspace = keyspace_.id;
    header.key = keys[static_cast<size_t>(page)];
    if (page > 0) header.parent = keys[static_cast<size_t>(page) - 1];
    header.position = static_cast<uint32_t>(page) + 1;
    header.range = workload_.options.own_tiles();
    const std::vector<std::byte> zeros(header.tile_bytes);
    header.tile_sums.assign(static_cast<size_t>(header.range.tiles()), Crc32c(zeros));
    return header;
  }

  // Commits pages [first, end) of every prompt, which have one format.
  absl::Status FillPool(PageFormat format, int first, int end) {
    client::DevicePoolOptions options;
    options.slot_bytes = geometry_.page_bytes(format);
    options.handle_bytes = kHandleBytes;
    options.bytes_max =
        WholeHandles(options.slot_bytes, (end - first) * static_cast<int>(keys_.size()));
    options.blank_slots = 1;
    CRUMB_ASSIGN_OR_RETURN(pools_.emplace_back(), DevicePool::Open(options, *memory_, *client_));
    DevicePool& pool = *pools_.back();
    if (!pool.WaitBlank(1, kHitPatience))
      return absl::UnavailableError("no slots in a device pool");
    for (size_t prompt = 0; prompt < keys_.size(); ++prompt) {
      CRUMB_RETURN_IF_ERROR(FillPrompt(pool, format, prompt, first, end));
    }
    return absl::OkStatus();
  }

  absl::Status FillPrompt(DevicePool& pool, PageFormat format, size_t prompt, int first, int end) {
    for (int page = first; page < end;) {
      const auto slots = pool.Reserve(std::min(kCommitBatch, end - page), kHitPatience);
      if (slots.empty()) {
        // The pool may still grow.
        if (!pool.WaitBlank(1, kHitPatience)) {
          return absl::ResourceExhaustedError("a device pool is full");
        }
        continue;
      }
      std::vector<DevicePool::Fragment> fragments;
      for (const auto& slot : slots) {
        CRUMB_RETURN_IF_ERROR(device_.Clear(slot->address(), pool.slot_bytes(), stream_.get()));
        fragments.push_back({slot, HeaderOf(format, prompt, page++)});
      }
      CRUMB_RETURN_IF_ERROR(device_.Record(written_.get(), stream_.get()));
      CRUMB_RETURN_IF_ERROR(device_.Synchronize(written_.get()));
      CRUMB_ASSIGN_OR_RETURN(const auto outcomes,
                             pool.Commit(keyspace_.id, fragments, kHitPatience));
      for (const client::CommitOutcome outcome : outcomes) {
        if (outcome != client::CommitOutcome::kStored) {
          return absl::InternalError("a page was not stored in its slot");
        }
      }
    }
    return absl::OkStatus();
  }

  const DeviceHitWorkload& workload_;
  client::Device& device_;
  const client::DeviceGeometry geometry_;
  std::unique_ptr<client::Client> client_;
  std::unique_ptr<client::DeviceMemory> memory_;
  client::OwnedStream stream_;
  client::OwnedEvent written_;
  client::KeyspaceInfo keyspace_;
  std::vector<std::vector<PageKey>> keys_;  // per prompt
  std::vector<std::unique_ptr<DevicePool>> pools_;
};

// The worker whose sequences begin with the prefix.
class Reader {
 public:
  Reader(const DeviceHitWorkload& workload, client::Device& device)
      : workload_(workload), device_(device) {}

  // Its pools have room for `prefixes` prefixes, which are copied from the device of ordinal `peer`
  // unless it is -1.
  absl::Status Open(int prefixes, int peer) {
    const client::WorkerOptions& options = workload_.options;
    const client::DeviceGeometry geometry(options);
    const int pages = workload_.tokens / kPageTokens + 16;
    CRUMB_ASSIGN_OR_RETURN(client_, Connect(workload_));
    client::DeviceWorkerOptions on_device;
    on_device.pages = 64;
    on_device.sequences = 2;
    on_device.prompts = 1;
    on_device.loads = 1;
    on_device.load_pages = peer < 0 ? 64 : pages;
    if (peer >= 0) on_device.pool_peers = {peer};
    on_device.pool_bytes = WholeHandles(geometry.page_bytes(PageFormat::kInt2), pages * prefixes);
    on_device.pool_sink_bytes = WholeHandles(geometry.page_bytes(PageFormat::kBf16), prefixes);
    on_device.pool_handle_bytes = kHandleBytes;
    on_device.pool_blank_pages = 1;
    on_device.pool_blank_sinks = 1;
    CRUMB_ASSIGN_OR_RETURN(worker_,
                           client::DeviceWorker::Open(options, on_device, client_.get(), device_));
    CRUMB_ASSIGN_OR_RETURN(stream_, client::NewStream(device_));
    CRUMB_ASSIGN_OR_RETURN(event_, client::NewEvent(device_));
    CRUMB_ASSIGN_OR_RETURN(prompts_, worker_->NewBatch({.stream = stream_.get(),
                                                        .kind = client::PassKind::kPrompt,
                                                        .sequences = 1,
                                                        .tokens = kChunk,
                                                        .pages = pages}));
    CRUMB_RETURN_IF_ERROR(MakeRows());
    return WaitFor([this] { return worker_->pool_use().joined; });
  }

  // Runs one hit and adds its times.
  absl::Status Round(std::span<const int32_t> prompt, std::vector<double>* begin,
                     std::vector<double>* ready, int* pages) {
    const uint64_t held = worker_->pool_use().held_slots;
    client::SequenceOptions options;
    options.publish = client::Publish::kNone;
    options.deadline = std::chrono::seconds(2);
    const auto start = std::chrono::steady_clock::now();
    CRUMB_ASSIGN_OR_RETURN(auto sequence, worker_->Begin(prompt, options));
    begin->push_back(MsSince(start));
    const int count = std::min(kChunk, sequence->pass_tokens_max());
    const client::PassEntry entry{sequence.get(), count};
    CRUMB_RETURN_IF_ERROR(prompts_->Prepare({&entry, 1}));
    CRUMB_RETURN_IF_ERROR(prompts_->Start());
    CRUMB_RETURN_IF_ERROR(Drain());
    ready->push_back(MsSince(start));
    const client::SequenceStats stats = sequence->stats();
    if (stats.hit_tokens() != stats.hit_tokens_device || stats.loaded_bytes != 0 ||
        stats.hit_tokens() + 2 * kChunk < workload_.tokens) {
      return absl::InternalError(fmt::format(
          "of {} tokens {} hit, {} on the device, and {} bytes were copied: {}", workload_.tokens,
          stats.hit_tokens(), stats.hit_tokens_device, stats.loaded_bytes, stats.miss_reason));
    }
    *pages = stats.hit_tokens() / kPageTokens;
    for (int layer = 0; layer < workload_.options.own_layers(); ++layer) {
      CRUMB_RETURN_IF_ERROR(Layer(layer));
    }
    const auto kept =
        prompt.subspan(static_cast<size_t>(sequence->length()), static_cast<size_t>(count));
    CRUMB_RETURN_IF_ERROR(prompts_->Advance({&kept, 1}));
    CRUMB_RETURN_IF_ERROR(Drain());
    sequence.reset();
    // The next round must find no live sequence and no lease.
    return WaitFor([&] { return worker_->pool_use().held_slots <= held; });
  }

  // Runs one prefix that is copied from the peer, and sets its times.
  absl::Status PeerRound(std::span<const int32_t> prompt, PeerHitResult* round) {
    client::SequenceOptions options;
    options.publish = client::Publish::kNone;
    options.deadline = std::chrono::seconds(2);
    const auto start = std::chrono::steady_clock::now();
    CRUMB_ASSIGN_OR_RETURN(auto sequence, worker_->Begin(prompt, options));
    round->begin_ms = MsSince(start);
    const auto& loads = static_cast<const client::GpuSequence&>(*sequence).loads;
    for (const auto& load : loads) CRUMB_RETURN_IF_ERROR(load->MakeWait(stream_.get(), 0));
    CRUMB_RETURN_IF_ERROR(Drain());
    round->first_layer_ms = MsSince(start);
    for (const auto& load : loads) CRUMB_RETURN_IF_ERROR(load->MakeWaitAll(stream_.get()));
    CRUMB_RETURN_IF_ERROR(Drain());
    round->all_layers_ms = MsSince(start);
    const client::SequenceStats stats = sequence->stats();
    if (stats.hit_tokens_device + 2 * kChunk < workload_.tokens || stats.loaded_bytes == 0) {
      return absl::InternalError(fmt::format(
          "of {} tokens {} hit on devices and {} elsewhere, {} bytes came: {}", workload_.tokens,
          stats.hit_tokens_device, stats.hit_tokens() - stats.hit_tokens_device, stats.loaded_bytes,
          stats.miss_reason));
    }
    round->pages = stats.hit_tokens_device / kPageTokens;
    round->bytes = static_cast<int64_t>(stats.loaded_bytes);
    round->gbps = static_cast<double>(round->bytes) / round->all_layers_ms / 1e6;
    sequence.reset();
    return worker_->WaitPublished(kHitPatience);
  }

 private:
  static constexpr int kChunk = 256;

  template <typename Condition>
  static absl::Status WaitFor(const Condition& condition) {
    const TimePoint deadline = Clock::Real().Now() + kHitPatience;
    while (!condition()) {
      if (Clock::Real().Now() > deadline) return absl::DeadlineExceededError("a device pool waits");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return absl::OkStatus();
  }

  absl::Status Drain() {
    CRUMB_RETURN_IF_ERROR(device_.Record(event_.get(), stream_.get()));
    return device_.Synchronize(event_.get());
  }

  absl::Status MakeRows() {
    const client::WorkerOptions& options = workload_.options;
    const size_t row = size_t{2} * kChunk * options.head_dim;
    for (const auto& [buffer, heads] :
         {std::pair(&q_, options.q_heads), std::pair(&k_, options.kv_heads),
          std::pair(&v_, options.kv_heads), std::pair(&out_, options.q_heads)}) {
      const size_t bytes = row * static_cast<size_t>(heads);
      CRUMB_ASSIGN_OR_RETURN(*buffer, client::NewDeviceBuffer(device_, bytes));
      CRUMB_RETURN_IF_ERROR(device_.Clear(buffer->get(), bytes, stream_.get()));
    }
    return Drain();
  }

  absl::Status Layer(int layer) {
    const auto at = [](const client::DeviceBuffer& buffer) {
      return reinterpret_cast<void*>(buffer.get());
    };
    CRUMB_RETURN_IF_ERROR(prompts_->Append(layer, at(k_), at(v_)));
    return prompts_->Attend(layer, at(q_), at(out_));
  }

  const DeviceHitWorkload& workload_;
  client::Device& device_;
  std::unique_ptr<client::Client> client_;
  client::OwnedStream stream_;
  client::OwnedEvent event_;
  client::DeviceBuffer q_, k_, v_, out_;
  std::unique_ptr<client::DeviceWorker> worker_;
  std::unique_ptr<client::DeviceBatch> prompts_;
};

std::vector<std::vector<int32_t>> Prompts(const DeviceHitWorkload& workload, int count) {
  std::vector<std::vector<int32_t>> prompts(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    auto& prompt = prompts[static_cast<size_t>(i)];
    prompt.resize(static_cast<size_t>(workload.tokens));
    std::iota(prompt.begin(), prompt.end(), 1 + i * 1000003);
  }
  return prompts;
}

}  // namespace

absl::StatusOr<DeviceHitResult> RunDeviceHit(const DeviceHitWorkload& workload,
                                             client::Device& device) {
  const std::vector<std::vector<int32_t>> prompts = Prompts(workload, 1);
  const std::vector<int32_t>& tokens = prompts.front();
  Writer writer(workload, device);
  CRUMB_RETURN_IF_ERROR(writer.Fill(prompts));
  Reader reader(workload, device);
  CRUMB_RETURN_IF_ERROR(reader.Open(1, -1));
  DeviceHitResult result;
  std::vector<double> begin, ready;
  for (int round = 0; round < workload.rounds + kWarmUp; ++round) {
    if (round == kWarmUp) begin.clear(), ready.clear();
    CRUMB_RETURN_IF_ERROR(reader.Round(tokens, &begin, &ready, &result.pages));
  }
  result.rounds = workload.rounds;
  result.begin_ms_p50 = Quantile(begin, 0.5);
  result.ready_ms_p50 = Quantile(ready, 0.5);
  result.ready_ms_p99 = Quantile(ready, 0.99);
  CRUMB_ASSIGN_OR_RETURN(result.acquire_ms_p50, writer.AcquireMs(result.pages));
  return result;
}

absl::StatusOr<PeerHitResult> RunPeerHit(const DeviceHitWorkload& workload, client::Device& device,
                                         client::Device& peer, int peer_ordinal) {
  const int prefixes = workload.rounds + 1;
  const std::vector<std::vector<int32_t>> prompts = Prompts(workload, prefixes);
  Writer writer(workload, peer);
  CRUMB_RETURN_IF_ERROR(writer.Fill(prompts));
  Reader reader(workload, device);
  CRUMB_RETURN_IF_ERROR(reader.Open(prefixes, peer_ordinal));
  std::vector<PeerHitResult> rounds;
  for (const std::vector<int32_t>& prompt : prompts) {
    CRUMB_RETURN_IF_ERROR(reader.PeerRound(prompt, &rounds.emplace_back()));
  }
  rounds.erase(rounds.begin());
  const auto median = [&rounds](double PeerHitResult::*field) {
    std::vector<double> values;
    values.reserve(rounds.size());
    for (const PeerHitResult& round : rounds) values.push_back(round.*field);
    return Quantile(std::move(values), 0.5);
  };
  PeerHitResult result = rounds.front();
  result.rounds = workload.rounds;
  result.begin_ms = median(&PeerHitResult::begin_ms);
  result.first_layer_ms = median(&PeerHitResult::first_layer_ms);
  result.all_layers_ms = median(&PeerHitResult::all_layers_ms);
  result.gbps = median(&PeerHitResult::gbps);
  return result;
}

}  // namespace crumb::bench
