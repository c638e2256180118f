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

// Thread blocks of the fetch kernel. 8 saturate PCIe 5 x16 and leave an H200's other 124 SMs to the
// engine (docs/kernels/fetch.md).
constexpr int kKernelBlocks = 8;
constexpr int kPoolBlocks = 48;        // the same if it reads other devices' memory
constexpr int kPoolKernelLayers = 12;  // layers that it copies if all pages lie there
constexpr int kGroupGrowth = 3;        // factor of layers from one group of copies to the next

bool Inside(const std::vector<std::span<const std::byte>>& ranges, const std::byte* begin,
            const std::byte* end) {
  const auto after =
      std::upper_bound(ranges.begin(), ranges.end(), begin,
                       [](const std::byte* at, const auto& range) { return at < range.data(); });
  return after != ranges.begin() && end <= std::prev(after)->data() + std::prev(after)->size();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PrefixLoader>> PrefixLoader::Create(const Parts& parts, int loads,
                                                                   int pages_max,
                                                                   int kernel_layers) {
  std::unique_ptr<PrefixLoader> loader(new PrefixLoader(parts, pages_max, kernel_layers));
  CRUMB_ASSIGN_OR_RETURN(loader->stream_, NewUrgentStream(parts.device));
  CRUMB_ASSIGN_OR_RETURN(loader->check_stream_, NewUrgentStream(parts.device));
  for (int i = 0; i < loads; ++i) {
    CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<LoadLane> lane,
                           LoadLane::Create(parts.device, parts.geometry.layers,
                                            loader->TablesAt(0, pages_max).bytes));
    loader->GiveBack(lane.get());
    loader->lanes_.push_back(std::move(lane));
  }
  return loader;
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

// A prefix, and its load once a page has to be copied.
class PrefixLoader::Incoming final : public Prefix {
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
    // Lack of room is counted as a miss with a reason of its own.
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

std::unique_ptr<PageIntake::Prefix> PrefixLoader::NewPrefix(const Keyspace& keyspace,
                                                            int pages_max) {
  // If there is no memory for its pages, the sequence cannot begin either.
  const int most = parts_.provide(*keyspace).ok() ? std::min(pages_max, pages_max_) : 0;
  return std::make_unique<Incoming>(*this, keyspace, most);
}

absl::StatusOr<PrefixLoader::Pages> PrefixLoader::AssignSlots(const Pages& from) {
  const bool sink = from.front()->position == 0;
  std::vector<std::shared_ptr<const SlotRef>> slots;
  if (sink) {
    CRUMB_ASSIGN_OR_RETURN(slots, parts_.sinks.Take(1, stream_.get()));
  }
  const int wanted = static_cast<int>(from.size()) - (sink ? 1 : 0);
  // If there is no room for a single history page, the sink alone is a hit.
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
  LoadLane* lane = nullptr;
  {
    MutexLock lock(&mutex_);
    if (idle_.empty()) return nullptr;
    lane = idle_.back();
    idle_.pop_back();
  }
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
  CRUMB_ASSIGN_OR_RETURN(Pages to, AssignSlots(from));
  if (to.empty()) return to;
  const int begin = job.pages();
  for (size_t i = 0; i < to.size(); ++i) {
    static_cast<DevicePage&>(*to[i]).load = job.load;
    job.from.push_back(from[i]);
    job.to.push_back(to[i]);
  }
  FindCopiedSources(job, begin);
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
  job->load->NoteIndices(std::move(places));
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
    job->load->NoteEnqueued(PrefixLoad::kAllLayers, queued);
  }
  FinishInBackground(std::move(job));
}

// Decides which pages the kernel can read in place. If it can read none of the first part, it is
// not used.
void PrefixLoader::FindCopiedSources(Job& job, int page_begin) const {
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

void PrefixLoader::GatherChecksums(const Job& job, int page_begin, int layer_begin,
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

absl::Status PrefixLoader::SendTables(const Job& job, int page_begin) {
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
  GatherChecksums(job, page_begin, 0, 1);
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

// Copies the checksums of all pages, of layers behind the first, to the device.
absl::Status PrefixLoader::SendChecksums(const Job& job, int layer_begin, int layer_end) {
  layer_begin = std::max(layer_begin, 1);
  if (layer_begin >= layer_end) return absl::OkStatus();
  GatherChecksums(job, 0, layer_begin, layer_end);
  const auto staging = reinterpret_cast<uint64_t>(job.lane().staging.get());
  const Tables tables = TablesAt(staging, job.capacity);
  const size_t layer_sums = size_t{1} * parts_.geometry.kv_heads * job.capacity;
  const uint64_t from = reinterpret_cast<uint64_t>(tables.sums + layer_sums * layer_begin);
  const DeviceCopy copy{job.lane().tables.get() + (from - staging), from,
                        sizeof(uint32_t) * layer_sums * (layer_end - layer_begin)};
  return parts_.device.ToDevice({&copy, 1}, stream_.get());
}

absl::Status PrefixLoader::EnqueuePart(const Job& job, int page_begin) {
  CRUMB_RETURN_IF_ERROR(SendTables(job, page_begin));
  if (job.kernel_layers == 0) return absl::OkStatus();
  const int behind_sink = std::max(page_begin, job.sinks());
  CRUMB_RETURN_IF_ERROR(CopyByKernel(job, page_begin, behind_sink, 0, 1));
  return CopyByKernel(job, behind_sink, job.pages(), 0, 1);
}

// Enqueues layers behind the first, which is enqueued already.
absl::Status PrefixLoader::EnqueueKernelLayers(const Job& job, int layer_begin, int layer_end) {
  const int sinks = job.sinks();
  CRUMB_RETURN_IF_ERROR(SendChecksums(job, layer_begin, layer_end));
  for (int layer = layer_begin; layer < layer_end; ++layer) {
    if (layer > 0) {
      CRUMB_RETURN_IF_ERROR(CopyByKernel(job, 0, sinks, layer, layer + 1));
      CRUMB_RETURN_IF_ERROR(CopyByKernel(job, sinks, job.pages(), layer, layer + 1));
    }
    CRUMB_RETURN_IF_ERROR(parts_.device.Record(job.lane().layer_done[layer].get(), stream_.get()));
  }
  job.load->NoteEnqueued(layer_end, absl::OkStatus());
  return absl::OkStatus();
}

// Pages whose checksums do not arrive are treated as damaged, because unchecked pages are never
// attended.
void PrefixLoader::AwaitChecksums(const Job& job) const {
  for (const std::shared_ptr<DeferredChecksums>& late : job.deferred_checksums) {
    absl::Status received = late->Await();
    for (const std::shared_ptr<Page>& page : job.from) {
      if (page->deferred_checksums != late) continue;
      const int index = static_cast<int>(page->position) - late->first_page();
      if (received.ok() && late->Fill(index, *page)) continue;
      if (received.ok())
        received = absl::NotFoundError("crumbd sent too few checksums of a peer's pages");
      job.load->NoteUnchecked(static_cast<int>(page->position));
      page->fragment_sums = {};
      page->tile_sums.assign(static_cast<size_t>(parts_.geometry.tiles()), 0);
    }
    if (!received.ok()) parts_.unchecked(received);
  }
}

absl::Status PrefixLoader::EnqueueBehindChecksums(const Job& job) {
  if (job.deferred_checksums.empty()) return absl::OkStatus();
  AwaitChecksums(job);
  MutexLock lock(&enqueue_mutex_);
  return EnqueueKernelLayers(job, std::min(1, job.kernel_layers), job.kernel_layers);
}

void PrefixLoader::EnqueueRest(const Job& job) {
  absl::Status queued = EnqueueBehindChecksums(job);
  if (queued.ok()) queued = EnqueueGroups(job);
  if (queued.ok()) queued = EnqueueEnd(job);
  if (!queued.ok()) {
    LogWarning("a cached prefix was not loaded: {}", queued.ToString());
    MutexLock lock(&enqueue_mutex_);
    Drain(job);
  }
  job.load->NoteEnqueued(PrefixLoad::kAllLayers, queued);
}

// Enqueues the copies in growing groups, because each copy has a fixed cost. The next load may
// enqueue its first layers in between.
absl::Status PrefixLoader::EnqueueGroups(const Job& job) {
  const int layers = parts_.geometry.layers;
  for (int begin = job.kernel_layers; begin < layers;) {
    const int end = std::min(layers, kGroupGrowth * begin + 1);
    MutexLock lock(&enqueue_mutex_);
    CRUMB_RETURN_IF_ERROR(CopyByEngine(job, begin, end));
    CRUMB_RETURN_IF_ERROR(SendChecksums(job, begin, end));
    CRUMB_RETURN_IF_ERROR(CopyByKernel(job, 0, job.sinks(), begin, end));
    CRUMB_RETURN_IF_ERROR(WaitForCopies(job));
    CRUMB_RETURN_IF_ERROR(Fetch(job, Check::kAfterCopying, job.sinks(), job.pages(), begin, end));
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
  CRUMB_RETURN_IF_ERROR(WaitForCopies(job));
  const DeviceCopy status{reinterpret_cast<uint64_t>(job.lane().staging.get()),
                          job.lane().tables.get(), sizeof(uint32_t) * job.to.size()};
  CRUMB_RETURN_IF_ERROR(parts_.device.ToHost({&status, 1}, check_stream_.get()));
  return parts_.device.Record(job.lane().all_done.get(), check_stream_.get());
}

// Makes the checking stream wait for the copies enqueued so far.
absl::Status PrefixLoader::WaitForCopies(const Job& job) {
  CRUMB_RETURN_IF_ERROR(parts_.device.Record(job.lane().copied.get(), stream_.get()));
  return parts_.device.Wait(check_stream_.get(), job.lane().copied.get());
}

// Blocks until copies to slots that are about to be released are done.
void PrefixLoader::Drain(const Job& job) {
  WaitForCopies(job).IgnoreError();
  parts_.device.Record(job.lane().all_done.get(), check_stream_.get()).IgnoreError();
  parts_.device.Synchronize(job.lane().all_done.get()).IgnoreError();
}

// Copies with the kernel; pages that it cannot read are copied to the device first.
absl::Status PrefixLoader::CopyByKernel(const Job& job, int page_begin, int page_end,
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
  return Fetch(job, Check::kWhileCopying, page_begin, page_end, layer_begin, layer_end);
}

absl::Status PrefixLoader::CopyByEngine(const Job& job, int layer_begin, int layer_end) {
  std::vector<DeviceCopy> copies;
  copies.reserve(job.to.size());
  for (int i = job.sinks(); i < job.pages(); ++i) {
    const Page& from = *job.from[i];
    const Page& to = *job.to[i];
    // In a fragment with more heads than this rank's, each layer is a separate piece.
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
  const bool in_place = check == Check::kAfterCopying;
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

// Holds crumbd's memory and the slots until the copies are done.
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
