// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/arena_pinner.h"
#include "client/gpu/device/owned.h"
#include "client/gpu/device_constants.h"
#include "client/gpu/device_geometry.h"
#include "client/transfer/launch_tables.h"
#include "client/transfer/pinned_heap.h"
#include "client/worker/page.h"
#include "common/mutex.h"
#include "crumb/transfer.h"
#include "kernels/cuda/pages/paged_kv_call.h"

namespace crumb::client {

// Pages of one sequence, in order, and the layers of them that a call copies.
struct DeviceCopyWork {
  std::span<const std::shared_ptr<Page>> pages;
  std::span<const int64_t> blocks;  // the sequence's block table, starting with its first token
  int layer_begin = 0;
  int layer_end = 0;
};

// DeviceCache copies pages between host memory and an engine's paged cache in device memory.
//
// A store gathers and quantizes rows on the engine's stream into a lane, a piece of device memory
// with room for a few pages, and a copy stream brings the lane to pinned host memory. A load goes
// the other way: a copy stream fills a lane with tiles, and a kernel on the caller's stream writes
// their rows. Work uses the lanes in turn, and events order the two streams, so that copies and
// kernels overlap and the host waits for neither. Thread-safe.
//
// Each direction has a lock, held while work is enqueued, its own copy stream, lanes and tables.
// Device memory is allocated by Create; host memory of stored pages comes from one pinned heap,
// which bounds the pages that wait to be published.
class DeviceCache {
 public:
  // `client` is borrowed. REQUIRES: CheckCache has passed for `cache`. kInvalidArgument: the
  // kernels do not support the cache's layout or the model's shape; kResourceExhausted: there is
  // not enough device memory or pinned memory.
  static absl::StatusOr<std::shared_ptr<DeviceCache>> Create(std::shared_ptr<Device> device,
                                                             const WorkerOptions& options,
                                                             const PagedCache& cache,
                                                             const DeviceCacheOptions& sizes,
                                                             Client& client);

  // Returns memory for a page that is stored: its tiles, and behind them a status word per layer,
  // zeros, which Store overwrites. kResourceExhausted.
  absl::StatusOr<std::shared_ptr<std::byte>> AllocatePage(size_t tiles_bytes);
  // Returns the page's status bits. REQUIRES: its Store is done, and AllocatePage allocated it.
  uint32_t StatusOf(const Page& page) const;

  // Enqueues the work: the cache is read on `stream`, and `done` is recorded when the tiles and
  // status words are in the pages' memory. `done` is recorded after an error too, because copies
  // that were enqueued before may be in flight.
  absl::Status Store(const DeviceCopyWork& work, DeviceStream stream, DeviceEvent done);
  // Enqueues the work: the cache is written on `stream`, where `done` is recorded. Blocks for
  // copies from memory that is not pinned. REQUIRES: `arena` and the pages are kept until `done`.
  absl::Status Load(const DeviceCopyWork& work, const PinnedArena& arena, DeviceStream stream,
                    DeviceEvent done);
  // Returns crumbd's memory, in which pages that are loaded lie.
  std::shared_ptr<const PinnedArena> Arena() { return pinner_.Use(); }

  Device& device() { return *device_; }

 private:
  using PageFormat = kernels::PageFormat;
  // A number of pages of one format.
  using Pages = std::span<const std::shared_ptr<Page>>;

  // A piece of device memory between the cache's rows and host memory, and the events that order
  // its uses.
  struct Lane {
    DeviceBuffer tiles;
    OwnedEvent filled;   // the tiles are in the lane
    OwnedEvent emptied;  // they have been read
    bool used = false;
  };
  // The lanes of one direction, and the stream between them and host memory.
  struct Lanes {
    Mutex mutex;  // held while work is enqueued
    std::vector<Lane> lanes;
    size_t next = 0;
    std::unique_ptr<LaunchTables> tables;
    OwnedStream copies;
  };
  // Means in the model's basis, [layers, kv_heads, position_blocks, head_dim]; empty: zero.
  struct ModelMeans {
    DeviceBuffer k;
    DeviceBuffer v;
  };

  DeviceCache(std::shared_ptr<Device> device, const WorkerOptions& options, Client& client);
  // Allocates everything for the cache, and loads the kernels.
  absl::Status Allocate(const PagedCache& cache, const DeviceCacheOptions& sizes);
  // Allocates the lanes, tables and stream of one direction.
  absl::Status AllocateLanes(int block_tokens, int launches_max, Lanes& lanes);
  // Copy constants to the device, once: the addresses and FP8 factors of the cache's layers, and
  // the means. Send blocks until the copy is done.
  absl::Status SendAddresses(const PagedCache& cache);
  absl::Status SendMeans();
  // Returns the factors of the layers from `layer` on; null: elements are BF16.
  const float* Scales(bool value, int layer) const;
  absl::Status Send(const void* from, size_t bytes, DeviceBuffer* to);
  // Launches every kernel of stores and loads for no page: the device loads a kernel's code with
  // its first launch, and a request would wait for that.
  absl::Status LoadKernels();

  // Returns the pages at the front of `rest` that one launch takes.
  Pages TakeChunk(Pages* rest, int pages_max) const;
  // Return the pages of one format that one launch takes: as many as fit into a lane, and for
  // stores into the workspace.
  int StorePagesMax(PageFormat format) const;
  int LoadPagesMax(PageFormat format) const;
  // Returns the index of the block of positions whose means the page's keys lack.
  int PositionBlock(const Page& page) const;
  // Fills in the tables of a launch for pages whose tiles are in a lane.
  void FillTables(const DeviceCopyWork& work, Pages pages, const Lane& lane,
                  const LaunchTable& table) const;
  // Returns the cache's layout for a launch over some layers, with the launch's block table.
  kernels::cuda::PagedKv KvOf(const DeviceCopyWork& work, Pages pages,
                              const LaunchTable& table) const;
  // Returns the bytes of one page's tiles of the layers that the call copies.
  size_t ChunkPageBytes(const DeviceCopyWork& work, PageFormat format) const;

  // Enqueues the store of pages that fit into one lane: Quantize on the engine's stream, and
  // CopyOut on the copy stream behind it.
  absl::Status StoreChunk(const DeviceCopyWork& work, Pages pages, DeviceStream stream);
  absl::Status Quantize(const DeviceCopyWork& work, Pages pages, const LaunchTable& table,
                        DeviceStream stream);
  // Returns the constants of the layers from `layer` on.
  kernels::cuda::EvictTransform FromLayer(const kernels::cuda::EvictTransform& all,
                                          int layer) const;
  absl::Status CopyOut(const DeviceCopyWork& work, Pages pages, const Lane& lane,
                       const LaunchTable& table);
  // Enqueues the load of pages that fit into one lane: CopyIn on the copy stream, and Dequantize on
  // the caller's stream behind it.
  absl::Status LoadChunk(const DeviceCopyWork& work, Pages pages, const PinnedArena& arena,
                         DeviceStream stream);
  absl::Status CopyIn(const DeviceCopyWork& work, Pages pages, const PinnedArena& arena,
                      const Lane& lane);
  absl::Status Dequantize(const DeviceCopyWork& work, Pages pages, const LaunchTable& table,
                          DeviceStream stream);

  const std::shared_ptr<Device> device_;
  const WorkerOptions& options_;
  const DeviceGeometry geometry_;
  ArenaPinner pinner_;
  std::unique_ptr<DeviceConstants> constants_;
  ModelMeans means_;
  DeviceBuffer addresses_;     // [2, layers] of K and of V
  DeviceBuffer scales_;        // [2, layers] factors of FP8 elements of K and of V; null: BF16
  kernels::cuda::PagedKv kv_;  // its block table is empty
  size_t lane_bytes_ = 0;
  size_t workspace_bytes_ = 0;
  DeviceBuffer workspace_;  // used by one Quantize after the other
  OwnedEvent workspace_used_;
  std::unique_ptr<PinnedHeap> heap_;
  OwnedStream setup_;
  OwnedEvent setup_done_;
  Lanes stores_;
  Lanes loads_;
};

}  // namespace crumb::client
