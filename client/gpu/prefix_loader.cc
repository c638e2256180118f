// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/prefix_loader.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::client {

using kernels::PageFormat;

namespace {

constexpr int kKernelBlocks = 8;       // saturate PCIe; of 132 multiprocessors of an H200
constexpr int kPoolBlocks = 48;        // that read other devices' memory
constexpr int kPoolKernelLayers = 12;  // that it brings where all pages are there
constexpr int kEverything = 1 << 20;   // layers, and the statuses behind them
constexpr int kGroupGrowth = 3;        // of the layers that one copy brings

bool Inside(const std::vector<std::span<const std::byte>>& ranges, const std::byte* begin,
            const std::byte* end) {
  const auto after =
      std::upper_bound(ranges.begin(), ranges.end(), begin,
                       [](const std::byte* at, const auto& range) { return at < range.data(); });
  return after != ranges.begin() && end <= std::prev(after)->data() + std::prev(after)->size();
}

}  // namespace

void PrefixLoad::NotePlaces(std::vector<int> places) {
  MutexLock lock(&mutex_);
  places_ = std::move(places);
}

void PrefixLoad::NoteEnqueued(int layers, absl::Status status) {
  MutexLock lock(&mutex_);
  enqueued_ = layers;
  status_ = std::move(status);
  changed_.NotifyAll();
}

void PrefixLoad::NoteUnchecked(int place) {
  MutexLock lock(&mutex_);
  unchecked_ = std::min(unchecked_, place);
}

bool PrefixLoad::checked(int place) const {
  MutexLock lock(&mutex_);
  return place < unchecked_;
}

absl::Status PrefixLoad::AwaitEnqueued(int layers) const {
  MutexLock lock(&mutex_);
  while (status_.ok() && enqueued_ < layers) changed_.Wait(&mutex_);
  return status_;
}

absl::Status PrefixLoad::MakeWait(DeviceStream stream, int layer) const {
  CRUMB_RETURN_IF_ERROR(AwaitEnqueued(layer + 1));
  if (done_.load()) return absl::OkStatus();
  return device_.Wait(stream, lane_.layer_done[layer].get());
}

absl::Status PrefixLoad::MakeWaitAll(DeviceStream stream) const {
  CRUMB_RETURN_IF_ERROR(AwaitEnqueued(kEverything));
  if (done_.load()) return absl::OkStatus();
  return device_.Wait(stream, lane_.all_done.get());
}

int PrefixLoad::Settle() const {
  // The lane may become another load's meanwhile, which makes the wait longer, not shorter.
  absl::Status arrived;
  if (!done_.load()) {
    arrived = AwaitEnqueued(kEverything);
    if (arrived.ok()) arrived = device_.Synchronize(lane_.all_done.get());
  }
  MutexLock lock(&mutex_);
  if (done_.load()) return damaged_;
  const auto* status = reinterpret_cast<const uint32_t*>(lane_.staging.get());
  for (size_t i = places_.size(); i-- > 0;) {
    if (!arrived.ok() || status[i] != 0 || places_[i] >= unchecked_) damaged_ = places_[i];
  }
  done_.store(true);
  return damaged_;
}

absl::StatusOr<std::unique_ptr<PrefixLoader>> PrefixLoader::Create(const Parts& parts, int loads,
                                                                   int pages_max,
                                                                   int kernel_layers) {
  std::unique_ptr<PrefixLoader> loader(new PrefixLoader(parts, pages_max, kernel_layers));
  CRUMB_ASSIGN_OR_RETURN(loader->stream_, NewUrgentStream(parts.device));
  CRUMB_ASSIGN_OR_RETURN(loader->check_stream_, NewUrgentStream(parts.device));
  for (int i = 0; i < loads; ++i) {
    auto lane = std::make_unique<LoadLane>();
    for (int layer = 0; layer < parts.geometry.layers; ++layer) {
      CRUMB_ASSIGN_OR_RETURN(OwnedEvent event, NewEvent(parts.device));
      lane->layer_done.push_back(std::move(event));
    }
    CRUMB_ASSIGN_OR_RETURN(lane->copied, NewEvent(parts.device));
    CRUMB_ASSIGN_OR_RETURN(lane->all_done, NewEvent(parts.device));
    const size_t bytes = loader->TablesAt(0, pages_max).bytes;
    CRUMB_ASSIGN_OR_RETURN(lane->tables, NewDeviceBuffer(parts.device, bytes));
    CRUMB_ASSIGN_OR_RETURN(lane->staging, NewPinnedBuffer(parts.device, bytes));
    loader->GiveBack(lane.get());
    loader->lanes_.push_back(std::move(lane));
  }
  return loader;
}

LoadLane* PrefixLoader::TakeLane() {
  MutexLock lock(&mutex_);
  if (idle_.empty()) return nullptr;
  LoadLane* lane = idle_.back();
  idle_.pop_back();
  return lane;
}

void PrefixLoader::GiveBack(LoadLane* lane) {
  MutexLock lock(&mutex_);
  idle_.push_back(lane);
}

PrefixLoader::Tables PrefixLoader::TablesAt(uint64_t base, int capacity) const {
  uint64_t at = base;
  const auto next = [&at]<typename T>(T** array, size_t count) {
    *array = reinterpret_cast<T*>(at);
    at += (sizeof(T) * count + 15) / 16 * 16;
  };
  Tables tables;
  next(&tables.status, capacity);
  next(&tables.from, capacity);
  next(&tables.to, capacity);
  next(&tables.from_stride, capacity);
  next(&tables.sums, size_t{1} * capacity * parts_.geometry.tiles());
  tables.bytes = at - base;
  return tables;
}

// A prefix, and its load as soon as a page has to be brought.
class PrefixLoader::Incoming final : public PageIntake::Prefix {
 public:
  Incoming(PrefixLoader& loader, Keyspace keyspace, int capacity)
      : loader_(loader), keyspace_(std::move(keyspace)), capacity_(capacity) {}
  ~Incoming() override {
    if (job_ != nullptr) loader_.Complete(std::move(job_));
  }

  std::vector<std::shared_ptr<Page>> Take(std::vector<std::shared_ptr<Page>> pages) override {
    const int room = capacity_ - (job_ == nullptr ? 0 : job_->pages());
    Pages missing;
    missing.reserve(std::min(pages.size(), static_cast<size_t>(std::max(room, 0))));
    for (const std::shared_ptr<Page>& page : pages) {
      if (!page->placed && static_cast<int>(missing.size()) < room) missing.push_back(page);
    }
    absl::StatusOr<Pages> loaded = missing.empty() ? Pages() : Load(missing);
    // No room is counted as a miss of its own reason.
    if (!loaded.ok() && !absl::IsResourceExhausted(loaded.status())) {
      LogWarning("a cached prefix was not loaded: {}", loaded.status().ToString());
    }
    size_t next = 0;
    for (size_t i = 0; i < pages.size(); ++i) {
      if (pages[i]->placed) continue;
      if (!loaded.ok() || next == loaded->size()) {
        pages.resize(i);
        break;
      }
      pages[i] = std::move((*loaded)[next++]);
    }
    return pages;
  }

 private:
  absl::StatusOr<Pages> Load(const Pages& missing) {
    std::shared_ptr<Job> job = job_ != nullptr ? job_ : loader_.NewJob(keyspace_, capacity_);
    if (job == nullptr) return absl::ResourceExhaustedError("too many loads are under way");
    absl::StatusOr<Pages> loaded = loader_.Add(*job, missing);
    if (job->pages() > 0) {
      job_ = std::move(job);
    } else {
      loader_.GiveBack(&job->lane());
    }
    return loaded;
  }

  PrefixLoader& loader_;
  const Keyspace keyspace_;
  const int capacity_;
  std::shared_ptr<Job> job_;
};

std::unique_ptr<PageIntake::Prefix> PrefixLoader::NewPrefix(Keyspace keyspace, int pages_max) {
  return std::make_unique<Incoming>(*this, std::move(keyspace), std::min(pages_max, pages_max_));
}

absl::StatusOr<PrefixLoader::Pages> PrefixLoader::Place(const Pages& from) {
  const bool sink = from.front()->position == 0;
  std::vector<std::shared_ptr<const SlotRef>> slots;
  if (sink) {
    CRUMB_ASSIGN_OR_RETURN(slots, parts_.sinks.Take(1, stream_.get()));
  }
  const int wanted = static_cast<int>(from.size()) - (sink ? 1 : 0);
  // Without room for a single page the sink alone is a hit.
  SlotPool& pool = from.back()->position > 0 && from.back()->format == PageFormat::kBf16
                       ? parts_.bf16_pages
                       : parts_.pages;
  auto rest = pool.TakeSome(wanted, stream_.get(), parts_.slots_timeout);
  if (rest.ok()) std::move(rest->begin(), rest->end(), std::back_inserter(slots));
  Pages to;
  to.reserve(slots.size());
  RunAllocator<DevicePage> run;
  for (size_t i = 0; i < slots.size(); ++i) {
    auto page = parts_.geometry.NewPage(from[i]->format, std::move(slots[i]), run);
    page->key = from[i]->key;
    page->generation = from[i]->generation;
    page->parent = from[i]->parent;
    page->position = from[i]->position;
    page->over_int2_prefix = from[i]->over_int2_prefix;
    to.push_back(std::move(page));
  }
  return to;
}

std::shared_ptr<PrefixLoader::Job> PrefixLoader::NewJob(const Keyspace& keyspace, int capacity) {
  LoadLane* lane = TakeLane();
  if (lane == nullptr) return nullptr;
  auto job = std::make_shared<Job>();
  job->load = std::make_shared<PrefixLoad>(parts_.device, *lane);
  job->arena = parts_.pinner.Use();
  job->keyspace = keyspace;
  job->capacity = capacity;
  for (auto* pages : {&job->from, &job->to}) pages->reserve(static_cast<size_t>(capacity));
  job->copied.reserve(static_cast<size_t>(capacity));
  return job;
}

absl::StatusOr<PrefixLoader::Pages> PrefixLoader::Add(Job& job, const Pages& from) {
  MutexLock lock(&enqueue_mutex_);
  CRUMB_ASSIGN_OR_RETURN(Pages to, Place(from));
  if (to.empty()) return to;
  const int begin = job.pages();
  for (size_t i = 0; i < to.size(); ++i) {
    static_cast<DevicePage&>(*to[i]).load = job.load;
    job.from.push_back(from[i]);
    job.to.push_back(to[i]);
  }
  LookAtSources(job, begin);
  const absl::Status queued = EnqueuePart(job, begin);
  if (queued.ok()) {
    RequestChecksums(job, begin);
    return to;
  }
  Drain(job);
  job.from.resize(static_cast<size_t>(begin));
  job.to.resize(static_cast<size_t>(begin));
  job.copied.resize(static_cast<size_t>(begin));
  return queued;
}

void PrefixLoader::RequestChecksums(Job& job, int page_begin) {
  for (int i = page_begin; i < job.pages(); ++i) {
    const std::shared_ptr<DeferredChecksums>& late = job.from[i]->deferred_checksums;
    if (late == nullptr ||
        (!job.deferred_checksums.empty() && job.deferred_checksums.back() == late))
      continue;
    job.deferred_checksums.push_back(late);
    enqueuer_.Add([late] { late->Await().IgnoreError(); });
  }
}

void PrefixLoader::Complete(std::shared_ptr<Job> job) {
  std::vector<int> places;
  places.reserve(job->to.size());
  for (const std::shared_ptr<Page>& page : job->to) {
    places.push_back(static_cast<int>(page->position));
  }
  job->load->NotePlaces(std::move(places));
  absl::Status queued;
  {
    MutexLock lock(&enqueue_mutex_);
    if (job->all_in_pools && job->kernel_layers > 0) {
      job->kernel_layers =
          std::max(job->kernel_layers, std::min(kPoolKernelLayers, parts_.geometry.layers));
    }
    const int layers =
        job->deferred_checksums.empty() ? job->kernel_layers : std::min(1, job->kernel_layers);
    queued = EnqueueKernelLayers(*job, 0, layers);
    if (!queued.ok()) Drain(*job);
  }
  if (queued.ok()) {
    enqueuer_.Add([this, job] { EnqueueRest(*job); });
  } else {
    LogWarning("a cached prefix was not loaded: {}", queued.ToString());
    job->load->NoteEnqueued(kEverything, queued);
  }
  FinishInBackground(std::move(job));
}

// Where no page of the first part can be read, no kernel is asked.
void PrefixLoader::LookAtSources(Job& job, int page_begin) const {
  const std::vector<std::span<const std::byte>> pinned = job.arena->Pinned();
  const int last = parts_.geometry.layers - 1;
  bool any_readable = false;
  for (int i = page_begin; i < job.pages(); ++i) {
    const Page& from = *job.from[i];
    const std::byte* end = from.layer(last) + parts_.geometry.layer_stride(from.format);
    const bool readable =
        kernel_layers_ > 0 &&
        (from.in_pool || (parts_.device.kernels_read_pinned() && Inside(pinned, from.tiles, end)));
    job.copied.push_back(readable ? 0 : 1);
    job.all_in_pools &= from.in_pool;
    job.any_copied |= !readable;
    any_readable |= readable;
  }
  if (page_begin > 0) return;
  job.kernel_layers = any_readable ? std::min(kernel_layers_, parts_.geometry.layers) : 0;
}

void PrefixLoader::GatherSums(const Job& job, int page_begin, int layer_begin,
                              int layer_end) const {
  const Tables tables =
      TablesAt(reinterpret_cast<uint64_t>(job.lane().staging.get()), job.capacity);
  const size_t heads = parts_.geometry.kv_heads, layer_sums = heads * job.capacity;
  for (int i = page_begin; i < job.pages(); ++i) {
    const uint32_t* from = job.from[i]->sums().data();
    for (int layer = layer_begin; layer < layer_end; ++layer) {
      std::copy_n(from + heads * layer, heads, tables.sums + layer_sums * layer + heads * i);
    }
  }
}

absl::Status PrefixLoader::SendPlaces(const Job& job, int page_begin) {
  const auto staging = reinterpret_cast<uint64_t>(job.lane().staging.get());
  const Tables tables = TablesAt(staging, job.capacity);
  for (int i = page_begin; i < job.pages(); ++i) {
    const Page& from = *job.from[i];
    const Page& to = *job.to[i];
    const bool copied = job.copied[i] != 0;
    tables.status[i] = 0;
    tables.to[i] = reinterpret_cast<uint64_t>(to.tiles);
    tables.from[i] = copied ? tables.to[i] : reinterpret_cast<uint64_t>(from.tiles);
    tables.from_stride[i] = static_cast<int64_t>(copied ? to.layer_stride : from.layer_stride);
  }
  GatherSums(job, page_begin, 0, 1);
  const size_t pages = job.to.size() - page_begin, heads = parts_.geometry.kv_heads;
  std::vector<DeviceCopy> copies;
  const auto add = [&](const void* rows, size_t bytes) {
    const uint64_t from = reinterpret_cast<uint64_t>(rows);
    copies.push_back({job.lane().tables.get() + (from - staging), from, bytes});
  };
  add(tables.status + page_begin, sizeof(uint32_t) * pages);
  add(tables.from + page_begin, sizeof(uint64_t) * pages);
  add(tables.to + page_begin, sizeof(uint64_t) * pages);
  add(tables.from_stride + page_begin, sizeof(int64_t) * pages);
  add(tables.sums + heads * page_begin, sizeof(uint32_t) * heads * pages);
  return parts_.device.ToDevice(copies, stream_.get());
}

// Of all pages, of layers behind the first.
absl::Status PrefixLoader::SendSums(const Job& job, int layer_begin, int layer_end) {
  layer_begin = std::max(layer_begin, 1);
  if (layer_begin >= layer_end) return absl::OkStatus();
  GatherSums(job, 0, layer_begin, layer_end);
  const auto staging = reinterpret_cast<uint64_t>(job.lane().staging.get());
  const Tables tables = TablesAt(staging, job.capacity);
  const size_t layer_sums = size_t{1} * parts_.geometry.kv_heads * job.capacity;
  const uint64_t from = reinterpret_cast<uint64_t>(tables.sums + layer_sums * layer_begin);
  const DeviceCopy copy{job.lane().tables.get() + (from - staging), from,
                        sizeof(uint32_t) * layer_sums * (layer_end - layer_begin)};
  return parts_.device.ToDevice({&copy, 1}, stream_.get());
}

absl::Status PrefixLoader::EnqueuePart(const Job& job, int page_begin) {
  CRUMB_RETURN_IF_ERROR(SendPlaces(job, page_begin));
  if (job.kernel_layers == 0) return absl::OkStatus();
  const int behind_sink = std::max(page_begin, job.sinks());
  CRUMB_RETURN_IF_ERROR(BringByKernel(job, page_begin, behind_sink, 0, 1));
  return BringByKernel(job, behind_sink, job.pages(), 0, 1);
}

// The first one is under way.
absl::Status PrefixLoader::EnqueueKernelLayers(const Job& job, int layer_begin, int layer_end) {
  const int sinks = job.sinks();
  CRUMB_RETURN_IF_ERROR(SendSums(job, layer_begin, layer_end));
  for (int layer = layer_begin; layer < layer_end; ++layer) {
    if (layer > 0) {
      CRUMB_RETURN_IF_ERROR(BringByKernel(job, 0, sinks, layer, layer + 1));
      CRUMB_RETURN_IF_ERROR(BringByKernel(job, sinks, job.pages(), layer, layer + 1));
    }
    CRUMB_RETURN_IF_ERROR(parts_.device.Record(job.lane().layer_done[layer].get(), stream_.get()));
  }
  job.load->NoteEnqueued(layer_end, absl::OkStatus());
  return absl::OkStatus();
}

// What does not come is as good as damaged: nothing is attended that was not looked at.
void PrefixLoader::AwaitSums(const Job& job) const {
  for (const std::shared_ptr<DeferredChecksums>& late : job.deferred_checksums) {
    absl::Status received = late->Await();
    for (const std::shared_ptr<Page>& page : job.from) {
      if (page->deferred_checksums != late) continue;
      const int index = static_cast<int>(page->position) - late->first_page();
      if (received.ok() && late->Fill(index, *page)) continue;
      if (received.ok())
        received = absl::NotFoundError("crumbd told too few sums of a peer's pages");
      job.load->NoteUnchecked(static_cast<int>(page->position));
      page->fragment_sums = {};
      page->tile_sums.assign(static_cast<size_t>(parts_.geometry.tiles()), 0);
    }
    if (!received.ok()) parts_.unchecked(received);
  }
}

absl::Status PrefixLoader::EnqueueBehindSums(const Job& job) {
  if (job.deferred_checksums.empty()) return absl::OkStatus();
  AwaitSums(job);
  MutexLock lock(&enqueue_mutex_);
  return EnqueueKernelLayers(job, std::min(1, job.kernel_layers), job.kernel_layers);
}

void PrefixLoader::EnqueueRest(const Job& job) {
  absl::Status queued = EnqueueBehindSums(job);
  if (queued.ok()) queued = EnqueueGroups(job);
  if (queued.ok()) queued = EnqueueEnd(job);
  if (!queued.ok()) {
    LogWarning("a cached prefix was not loaded: {}", queued.ToString());
    MutexLock lock(&enqueue_mutex_);
    Drain(job);
  }
  job.load->NoteEnqueued(kEverything, queued);
}

// A copy costs by the piece: each group is larger than all before it. Meanwhile the next load may
// bring its first layers.
absl::Status PrefixLoader::EnqueueGroups(const Job& job) {
  const int layers = parts_.geometry.layers;
  for (int begin = job.kernel_layers; begin < layers;) {
    const int end = std::min(layers, kGroupGrowth * begin + 1);
    MutexLock lock(&enqueue_mutex_);
    CRUMB_RETURN_IF_ERROR(BringByCopies(job, begin, end));
    CRUMB_RETURN_IF_ERROR(SendSums(job, begin, end));
    CRUMB_RETURN_IF_ERROR(BringByKernel(job, 0, job.sinks(), begin, end));
    CRUMB_RETURN_IF_ERROR(FollowCopies(job));
    CRUMB_RETURN_IF_ERROR(Fetch(job, Check::kInPlace, job.sinks(), job.pages(), begin, end));
    for (; begin < end; ++begin) {
      CRUMB_RETURN_IF_ERROR(
          parts_.device.Record(job.lane().layer_done[begin].get(), check_stream_.get()));
    }
    job.load->NoteEnqueued(end, absl::OkStatus());
  }
  return absl::OkStatus();
}

absl::Status PrefixLoader::EnqueueEnd(const Job& job) {
  MutexLock lock(&enqueue_mutex_);
  CRUMB_RETURN_IF_ERROR(FollowCopies(job));
  const DeviceCopy status{reinterpret_cast<uint64_t>(job.lane().staging.get()),
                          job.lane().tables.get(), sizeof(uint32_t) * job.to.size()};
  CRUMB_RETURN_IF_ERROR(parts_.device.ToHost({&status, 1}, check_stream_.get()));
  return parts_.device.Record(job.lane().all_done.get(), check_stream_.get());
}

// Makes the stream of checks wait for what was enqueued on the other.
absl::Status PrefixLoader::FollowCopies(const Job& job) {
  CRUMB_RETURN_IF_ERROR(parts_.device.Record(job.lane().copied.get(), stream_.get()));
  return parts_.device.Wait(check_stream_.get(), job.lane().copied.get());
}

// Part of what was enqueued may be on its way to slots that are given back now.
void PrefixLoader::Drain(const Job& job) {
  FollowCopies(job).IgnoreError();
  parts_.device.Record(job.lane().all_done.get(), check_stream_.get()).IgnoreError();
  parts_.device.Synchronize(job.lane().all_done.get()).IgnoreError();
}

// What it cannot read is copied before.
absl::Status PrefixLoader::BringByKernel(const Job& job, int page_begin, int page_end,
                                         int layer_begin, int layer_end) {
  if (page_begin == page_end || layer_begin == layer_end) return absl::OkStatus();
  std::vector<DeviceCopy> copies;
  for (int i = page_begin; i < page_end && job.any_copied; ++i) {
    if (job.copied[i] == 0) continue;
    for (int layer = layer_begin; layer < layer_end; ++layer) {
      copies.push_back({reinterpret_cast<uint64_t>(job.to[i]->layer(layer)),
                        reinterpret_cast<uint64_t>(job.from[i]->layer(layer)),
                        job.to[i]->layer_stride});
    }
  }
  if (!copies.empty()) {
    CRUMB_RETURN_IF_ERROR(parts_.device.ToDevice(job.arena->CutToDevice(copies), stream_.get()));
  }
  return Fetch(job, Check::kOnTheWay, page_begin, page_end, layer_begin, layer_end);
}

absl::Status PrefixLoader::BringByCopies(const Job& job, int layer_begin, int layer_end) {
  std::vector<DeviceCopy> copies;
  copies.reserve(job.to.size());
  for (int i = job.sinks(); i < job.pages(); ++i) {
    const Page& from = *job.from[i];
    const Page& to = *job.to[i];
    // Of a fragment with more heads, a layer is a piece.
    const int layers = from.layer_stride == to.layer_stride ? layer_end - layer_begin : 1;
    for (int layer = layer_begin; layer < layer_end; layer += layers) {
      copies.push_back({reinterpret_cast<uint64_t>(to.layer(layer)),
                        reinterpret_cast<uint64_t>(from.layer(layer)), to.layer_stride * layers});
    }
  }
  if (copies.empty()) return absl::OkStatus();
  return parts_.device.ToDevice(job.arena->CutToDevice(copies), stream_.get());
}

absl::Status PrefixLoader::Fetch(const Job& job, Check check, int page_begin, int page_end,
                                 int layer_begin, int layer_end) {
  if (page_begin == page_end) return absl::OkStatus();
  const DeviceGeometry& g = parts_.geometry;
  const bool in_place = check == Check::kInPlace;
  const Tables tables = TablesAt(job.lane().tables.get(), job.capacity);
  const Page& shape = *job.to[page_begin];
  kernels::cuda::FetchParams params;
  params.tile_bytes = shape.tile_bytes;
  params.pages = page_end - page_begin;
  params.tiles_per_layer = g.kv_heads;
  params.layer_begin = layer_begin;
  params.layer_end = layer_end;
  params.from = in_place ? nullptr : tables.from + page_begin;
  params.from_layer_stride = tables.from_stride + page_begin;
  params.to = tables.to + page_begin;
  params.to_layer_stride = static_cast<int64_t>(shape.layer_stride);
  params.checksums = tables.sums + int64_t{1} * page_begin * g.kv_heads;
  params.checksums_layer_stride = int64_t{1} * g.kv_heads * job.capacity;
  params.status = tables.status + page_begin;
  params.blocks = in_place ? 0 : job.from[page_begin]->in_pool ? kPoolBlocks : kKernelBlocks;
  return parts_.device.kernels().Fetch(params, in_place ? check_stream_.get() : stream_.get());
}

// Crumbd's memory is held until the copies are done, and so are the slots.
void PrefixLoader::FinishInBackground(std::shared_ptr<const Job> job) {
  parts_.background.Add([this, job = std::move(job)] {
    const int damaged = job->load->Settle();
    if (damaged >= 0 && job->load->checked(damaged)) parts_.damaged();
    std::vector<std::shared_ptr<const Page>> sound;
    for (const std::shared_ptr<Page>& page : job->to) {
      if (damaged >= 0 && static_cast<int>(page->position) >= damaged) break;
      sound.push_back(page);
    }
    if (parts_.keeps_sums) {
      for (size_t i = 0; i < sound.size(); ++i) {
        const std::span<const uint32_t> sums = job->from[i]->sums();
        job->to[i]->tile_sums.assign(sums.begin(), sums.end());
        OnDevice(*job->to[i]).has_sums.Set();
      }
    }
    GiveBack(&job->lane());
    parts_.loaded(job->keyspace, std::move(sound));
  });
}

}  // namespace crumb::client
