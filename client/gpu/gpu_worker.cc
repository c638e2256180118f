// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/gpu_worker.h"

#include <algorithm>
#include <string>
#include <utility>

#include "client/gpu/device/owned.h"
#include "client/gpu/gpu_batch.h"
#include "client/gpu/gpu_sequence.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "crumb/client.h"

namespace crumb::client {

using kernels::PageFormat;

namespace {

constexpr int kDraftSlotsMax = 7;     // the decode kernel has 8 query tokens
constexpr int kEvictWindowsMin = 64;  // windows of one launch outside a pass
constexpr int kSequencesMax = 1024;
// Timeout for reserving pool slots for a prefix that is to be loaded; crumbd responds from memory.
constexpr Duration kSlotsTimeout = std::chrono::milliseconds(50);

absl::Status CheckServed(const WorkerOptions& options, Device& device) {
  if (options.draft_slots > kDraftSlotsMax) {
    return absl::InvalidArgumentError("device workers have 7 draft_slots at most, not " +
                                      std::to_string(options.draft_slots));
  }
  if (!device.kernels().Supports(options.tile_shape())) {
    return absl::InvalidArgumentError("the device's kernels do not serve head_dim " +
                                      std::to_string(options.head_dim) + " and group_size " +
                                      std::to_string(options.group_size));
  }
  return absl::OkStatus();
}

absl::Status CheckPools(const DeviceWorkerOptions& options) {
  if (options.pool_bytes == 0) {
    if (options.pool_peers.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError("pool_peers without pool_bytes");
  }
  if (options.pool_handle_bytes == 0 || options.pool_bytes < options.pool_handle_bytes ||
      options.pool_sink_bytes < options.pool_handle_bytes) {
    return absl::InvalidArgumentError(
        "pool_bytes and pool_sink_bytes must be pool_handle_bytes at least");
  }
  if (options.pool_blank_pages < 1 || options.pool_blank_sinks < 1) {
    return absl::InvalidArgumentError("pool_blank_pages and pool_blank_sinks must be 1 at least");
  }
  return absl::OkStatus();
}

// DevicePageReader copies pages from device memory to the host with the copy engine, on a stream of
// its own. It returns the checksums that the pages were made with, so that crumbd detects errors of
// the copy.
class DevicePageReader final : public PageReader {
 public:
  // Both are borrowed.
  static absl::StatusOr<std::unique_ptr<PageReader>> Create(Device& device, ArenaPinner& pinner) {
    std::unique_ptr<DevicePageReader> reader(new DevicePageReader(device, pinner));
    CRUMB_ASSIGN_OR_RETURN(reader->stream_, NewStream(device));
    CRUMB_ASSIGN_OR_RETURN(reader->done_, NewEvent(device));
    return reader;
  }

  // Called by one thread at a time. Pages are published after their pass is done, so that the
  // copies wait for nothing.
  absl::StatusOr<std::vector<std::vector<uint32_t>>> Read(
      std::span<const std::shared_ptr<const Page>> pages, std::span<std::byte* const> to) override {
    std::vector<std::vector<uint32_t>> sums;
    std::vector<DeviceCopy> copies;
    for (size_t i = 0; i < pages.size(); ++i) {
      copies.push_back({reinterpret_cast<uint64_t>(to[i]),
                        reinterpret_cast<uint64_t>(pages[i]->tiles), pages[i]->bytes});
      sums.push_back(pages[i]->tile_sums);
    }
    const std::shared_ptr<const PinnedArena> arena = pinner_.Use();
    const absl::Status queued = device_.ToHost(arena->CutToHost(copies), stream_.get());
    // Waits even after an error, because some copies to memory of the caller may be in flight.
    CRUMB_RETURN_IF_ERROR(device_.Record(done_.get(), stream_.get()));
    CRUMB_RETURN_IF_ERROR(device_.Synchronize(done_.get()));
    CRUMB_RETURN_IF_ERROR(queued);
    return sums;
  }

 private:
  DevicePageReader(Device& device, ArenaPinner& pinner) : device_(device), pinner_(pinner) {}

  Device& device_;
  ArenaPinner& pinner_;
  OwnedStream stream_;
  OwnedEvent done_;
};

}  // namespace

absl::Status DeviceWorkerOptions::Validate() const {
  CRUMB_RETURN_IF_ERROR(CheckPools(*this));
  const std::pair<const char*, int> least_one[] = {{"pages", pages},
                                                   {"sequences", sequences},
                                                   {"prompts", prompts},
                                                   {"loads", loads},
                                                   {"load_pages", load_pages},
                                                   {"passes_in_flight", passes_in_flight},
                                                   {"evict_results", evict_results}};
  for (const auto& [name, value] : least_one) {
    if (value < 1) {
      return absl::InvalidArgumentError(std::string(name) + " must be 1 at least, is " +
                                        std::to_string(value));
    }
  }
  const std::pair<const char*, int> least_none[] = {
      {"load_kernel_layers", load_kernel_layers},
      {"bf16_pages", bf16_pages},
      {"scrub_pages_per_second", scrub_pages_per_second}};
  for (const auto& [name, value] : least_none) {
    if (value < 0) {
      return absl::InvalidArgumentError(std::string(name) + " must be 0 at least, is " +
                                        std::to_string(value));
    }
  }
  if (sequences > kSequencesMax) {
    return absl::InvalidArgumentError("sequences must be " + std::to_string(kSequencesMax) +
                                      " at most, is " + std::to_string(sequences));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DeviceWorker>> DeviceWorker::Open(
    const WorkerOptions& options, const DeviceWorkerOptions& device_options, Client* client,
    Device& device) {
  return GpuWorker::Create(options, device_options, client, device);
}

absl::StatusOr<std::unique_ptr<GpuWorker>> GpuWorker::Create(
    const WorkerOptions& options, const DeviceWorkerOptions& device_options, Client* client,
    Device& device) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  CRUMB_RETURN_IF_ERROR(device_options.Validate());
  CRUMB_RETURN_IF_ERROR(CheckServed(options, device));
  std::unique_ptr<GpuWorker> worker(new GpuWorker(options, device_options, client, device));
  CRUMB_RETURN_IF_ERROR(worker->Allocate());
  return worker;
}

// The prompt's ring holds a prefill block and the window before it.
GpuWorker::GpuWorker(const WorkerOptions& options, const DeviceWorkerOptions& device_options,
                     Client* client, Device& device)
    : options_(options),
      device_options_(device_options),
      client_(client),
      device_(device),
      geometry_(options_),
      decode_ring_(geometry_.Ring(options.recent_tokens + kPageTokens + 1 + options.draft_slots)),
      prompt_ring_(geometry_.Ring(options.prefill_block + options.recent_tokens + kPageTokens)),
      pinner_(std::make_unique<ArenaPinner>(device,
                                            device_options.pin_piece_bytes > 0 ? client : nullptr,
                                            std::max<size_t>(1, device_options.pin_piece_bytes))),
      background_(std::make_unique<Background>("crumb-settle")) {}

// Threads may still use any member, and slots return to their pools before these are destroyed.
GpuWorker::~GpuWorker() {
  scrubber_.reset();
  for (SlotPool* pool : {pages_.get(), sinks_.get()}) {
    if (pool != nullptr) pool->StopSharing();
  }
}

absl::Status GpuWorker::JoinPools() {
  if (device_options_.pool_bytes == 0 || client_ == nullptr || client_->pools() == nullptr) {
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(pools_, WorkerPools::Open(options_, device_options_, geometry_, device_,
                                                   *client_, *pages_, *sinks_));
  pages_->Share(pools_->pages(), *background_);
  sinks_->Share(pools_->sinks(), *background_);
  return absl::OkStatus();
}

DevicePoolUse GpuWorker::pool_use() const {
  DevicePoolUse use;
  if (pools_ == nullptr) return use;
  for (const DevicePool* pool : {&pools_->pages(), &pools_->sinks()}) {
    const DevicePoolStats stats = pool->stats();
    use.joined = (pool == &pools_->pages() || use.joined) && pool->id() != PoolId();
    use.handles += stats.handles;
    use.blank_slots += stats.blank_slots;
    use.held_slots += stats.held_slots;
    use.pages_demoted += stats.pages_demoted;
    use.demotions_failed += stats.demotions_failed;
    use.out_of_slots += stats.out_of_slots;
    use.slots_reclaimed += stats.slots_reclaimed;
  }
  return use;
}

absl::Status GpuWorker::AllocateSlots() {
  const DeviceWorkerOptions& o = device_options_;
  CRUMB_ASSIGN_OR_RETURN(pages_,
                         SlotPool::Create(device_, timelines_, "pages in device memory",
                                          geometry_.page_bytes(PageFormat::kInt2), o.pages));
  bf16_pages_ = SlotPool::CreateEmpty(device_, timelines_, "BF16 pages in device memory",
                                      geometry_.page_bytes(PageFormat::kBf16), o.bf16_pages);
  // Sinks of finished sequences stay until they are published.
  CRUMB_ASSIGN_OR_RETURN(
      sinks_, SlotPool::Create(device_, timelines_, "sinks in device memory",
                               geometry_.page_bytes(PageFormat::kBf16), 2 * o.sequences));
  CRUMB_ASSIGN_OR_RETURN(decode_rings_,
                         SlotPool::Create(device_, timelines_, "sequences in device memory",
                                          decode_ring_.bytes, o.sequences));
  CRUMB_ASSIGN_OR_RETURN(prompt_rings_,
                         SlotPool::Create(device_, timelines_, "prompts in device memory",
                                          prompt_ring_.bytes, o.prompts));
  return absl::OkStatus();
}

absl::Status GpuWorker::OpenLoader() {
  const DeviceWorkerOptions& o = device_options_;
  CRUMB_ASSIGN_OR_RETURN(
      loader_,
      PrefixLoader::Create(
          {.device = device_,
           .geometry = geometry_,
           .pages = *pages_,
           .bf16_pages = *bf16_pages_,
           .sinks = *sinks_,
           .background = *background_,
           .pinner = *pinner_,
           .provide = [this](const KeyspaceBinding& keyspace) { return ProvideFor(keyspace); },
           .damaged = [this] { NoteDamage(); },
           .unchecked = [this](const absl::Status& why) { NoteUnchecked(why); },
           .loaded = [this](const auto& keyspace,
                            auto pages) { NoteLoaded(keyspace, std::move(pages)); },
           .keeps_sums = pools_ != nullptr || o.scrub_pages_per_second > 0,
           .slots_timeout = kSlotsTimeout},
          o.loads, o.load_pages, o.load_kernel_layers));
  return absl::OkStatus();
}

absl::Status GpuWorker::Allocate() {
  const DeviceWorkerOptions& o = device_options_;
  CRUMB_ASSIGN_OR_RETURN(constants_, DeviceConstants::Upload(device_, options_));
  CRUMB_RETURN_IF_ERROR(AllocateSlots());
  CRUMB_RETURN_IF_ERROR(JoinPools());
  CRUMB_ASSIGN_OR_RETURN(
      results_, EvictResults::Create(device_, o.evict_results,
                                     std::max(kEvictWindowsMin, o.sequences), geometry_.tiles()));
  CRUMB_ASSIGN_OR_RETURN(reader_, DevicePageReader::Create(device_, *pinner_));
  CRUMB_RETURN_IF_ERROR(OpenLoader());
  CRUMB_ASSIGN_OR_RETURN(
      starter_, SequenceStarter::Create(options_, client_, *reader_, loader_.get(), pools_.get()));
  pinner_->Use();
  CRUMB_ASSIGN_OR_RETURN(
      settler_, PageSettler::Create(device_, geometry_.page_bytes(PageFormat::kBf16), *starter_,
                                    *background_));
  if (starter_->watch().enabled()) {
    CRUMB_ASSIGN_OR_RETURN(watch_, WindowWatch::Create(device_, options_, geometry_, *starter_));
  }
  if (o.scrub_pages_per_second > 0) {
    CRUMB_ASSIGN_OR_RETURN(scrubber_, PageScrubber::Create({.device = device_,
                                                            .geometry = geometry_,
                                                            .table = starter_->table(),
                                                            .pools = pools_.get(),
                                                            .client = client_,
                                                            .tally = starter_->tally()},
                                                           o.scrub_pages_per_second));
  }
  parts_.emplace(GpuWorkerParts{.device = device_,
                                .options = options_,
                                .device_options = device_options_,
                                .geometry = geometry_,
                                .decode_ring = decode_ring_,
                                .prompt_ring = prompt_ring_,
                                .constants = *constants_,
                                .starter = *starter_,
                                .timelines = *timelines_,
                                .pages = *pages_,
                                .bf16_pages = *bf16_pages_,
                                .sinks = *sinks_,
                                .decode_rings = *decode_rings_,
                                .prompt_rings = *prompt_rings_,
                                .results = *results_,
                                .settler = *settler_,
                                .watch = watch_.get(),
                                .scrubber = scrubber_.get()});
  return absl::OkStatus();
}

// Allocates the slots of BF16 history pages if sequences in this keyspace need them and they are
// not there yet. kResourceExhausted: there is no device memory.
absl::Status GpuWorker::ProvideFor(const KeyspaceBinding& keyspace) {
  if (keyspace.history_format != PageFormat::kBf16) return absl::OkStatus();
  const int count = device_options_.bf16_pages;
  absl::Status provided = bf16_pages_->Provide();
  if (count > 0 && !absl::IsResourceExhausted(provided)) return provided;
  return absl::ResourceExhaustedError(
      "sequences of " + options_.model + " store BF16 now, and there is no device memory for " +
      std::to_string(count) + " BF16 pages of " +
      std::to_string(geometry_.page_bytes(PageFormat::kBf16) * count) +
      " bytes in all (bf16_pages of DeviceWorkerOptions)");
}

// Publishes pages that crumbd has elsewhere and this device has now.
void GpuWorker::NoteLoaded(const std::shared_ptr<const KeyspaceBinding>& keyspace,
                           std::vector<std::shared_ptr<const Page>> pages) {
  if (pools_ == nullptr) return;
  std::erase_if(pages, [this](const auto& page) { return !pools_->Has(*page); });
  starter_->publisher().PublishInPlace(keyspace, std::move(pages));
}

void GpuWorker::NoteDamage() {
  starter_->tally().verify_failures.Add();
  if (client_ != nullptr) client_->Count({.verify_failures = 1});
}

void GpuWorker::NoteUnchecked(const absl::Status& why) {
  LogWarning("pages of a peer cannot be checked: {}", why.ToString());
  WorkerTally& tally = starter_->tally();
  (absl::IsDeadlineExceeded(why) ? tally.deadline_exceeded : tally.unavailable).Add();
}

absl::StatusOr<std::unique_ptr<DeviceSequence>> GpuWorker::MakeSequence(
    const SequenceOptions& options, SequenceStart start) {
  CRUMB_RETURN_IF_ERROR(ProvideFor(*start.keyspace));
  if (scrubber_ != nullptr) scrubber_->Offer(start.pages, options_.verify_every);
  return std::make_unique<GpuSequence>(*parts_, options, std::move(start));
}

absl::StatusOr<std::unique_ptr<DeviceSequence>> GpuWorker::Begin(std::span<const int32_t> tokens,
                                                                 const SequenceOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(SequenceStart start, starter_->Begin(tokens, options));
  return MakeSequence(options, std::move(start));
}

absl::StatusOr<LedDeviceSequence> GpuWorker::Lead(std::span<const int32_t> tokens,
                                                  const SequenceOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(LedStart led, starter_->Lead(tokens, options));
  CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<DeviceSequence> sequence,
                         MakeSequence(options, std::move(led.start)));
  return LedDeviceSequence{std::move(sequence), std::move(led.token)};
}

absl::StatusOr<std::unique_ptr<DeviceSequence>> GpuWorker::Follow(std::string_view token,
                                                                  std::span<const int32_t> tokens,
                                                                  const SequenceOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(SequenceStart start, starter_->Follow(token, tokens, options));
  return MakeSequence(options, std::move(start));
}

absl::StatusOr<std::unique_ptr<DeviceBatch>> GpuWorker::NewBatch(
    const DeviceBatchOptions& options) {
  return GpuBatch::Create(*parts_, options);
}

absl::Status GpuWorker::WaitPublished(Duration timeout) {
  const TimePoint deadline = Clock::Real().Now() + timeout;
  CRUMB_RETURN_IF_ERROR(background_->WaitIdle(timeout));
  if (watch_ != nullptr) {
    CRUMB_RETURN_IF_ERROR(watch_->WaitIdle(deadline - Clock::Real().Now()));
  }
  return starter_->WaitPublished(deadline - Clock::Real().Now());
}

}  // namespace crumb::client
