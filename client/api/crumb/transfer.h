// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/page_key.h"
#include "common/sha256.h"
#include "crumb/acquire.h"
#include "crumb/block_attention.h"
#include "crumb/client.h"
#include "crumb/counters.h"
#include "crumb/device_options.h"
#include "crumb/worker_options.h"

namespace crumb::client {

class Device;

// RowElement is the type of the elements of an engine's rows. An FP8 element (E4M3) stands for its
// value times PagedRows::scale. Rows of pages are BF16: FP8 elements are rounded to BF16 once when
// they are read, and BF16 elements divided by the scale to FP8 when they are written. With pages in
// BF16 an element that was read from FP8 is written as it was.
enum class RowElement : uint8_t { kBf16 = 0, kFp8E4m3 = 1 };

// PagedRows describes the K or V rows of one layer in an engine's paged KV cache, in this process's
// memory or in that of a device. Element i of the row of token t in block b and KV head h is
//     base[b * block_stride + h * head_stride + t * token_stride + i * element_stride]
// where heads count from 0 at this rank's first. Strides are in elements, so that token-major
// (NHD), head-major (HND), interleaved K and V, and transposed planes can all be described.
struct PagedRows {
  void* base = nullptr;
  int64_t block_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t element_stride = 1;
  float scale = 1.0f;  // factor of FP8 elements
};

// PagedCache is an engine's KV cache. Its blocks have `block_tokens` tokens each, which need not be
// a page's 64.
struct PagedCache {
  struct Layer {
    PagedRows k;
    PagedRows v;
  };
  std::vector<Layer> layers;  // the layers of this rank
  int64_t blocks = 0;
  int block_tokens = 0;
  RowElement element = RowElement::kBf16;
};

// BlockCache is the cache of an engine that attends INT2 blocks of its own pool
// (crumb/block_attention.h), in this process's memory. The first page of a sequence is in its sink
// blocks, each other page in a history block, whose tiles are copied as they are.
struct BlockCache {
  std::vector<BlockPool> layers;  // the layers of this rank; `recent` is not used
};

// DeviceCacheOptions size the memory that a Transfer allocates for a cache in device memory, beside
// 128 MiB (or the rows of one page, if they are more) and the constants of the rotation.
struct DeviceCacheOptions {
  // Device memory of each of four lanes, through which pages pass; at least a BF16 page.
  size_t lane_bytes = size_t{32} << 20;
  // Pinned host memory for stored pages until they are published. It bounds the pages that wait:
  // see StartStore.
  size_t staging_bytes = size_t{2} << 30;
  // Launches of each direction that may be queued before a call blocks. 64 launches of stores are
  // some 900 pages of a model with 36 layers and 8 KV heads, more than a prefill step computes.
  int launches_max = 64;
};

// TransferPrefix is a prefix that crumbd holds for the processes of one engine.
struct TransferPrefix {
  int pages = 0;            // number of leading pages of the requested keys that are held
  std::vector<Tier> tiers;  // one per held page
  MissReason miss_reason = MissReason::kNone;  // why the first page behind them is not held
  // Names the prefix to Transfer::StartLoad of other processes of the same engine, which must start
  // to load while `lease` is held.
  std::string token;
  std::shared_ptr<const Lease> lease;  // null if pages is 0
};

// PageLoad copies pages from crumbd into the engine's cache. Used by one thread at a time. It must
// not outlive its Transfer.
class PageLoad {
 public:
  virtual ~PageLoad() = default;
  // Number of leading pages of the request that crumbd holds for this process and that passed their
  // checks.
  virtual int pages() const = 0;
  // Writes the rows of these pages for layers [begin, end) of this rank into the cache. INT2 rows
  // are dequantized and inverse-rotated to the model's basis. With a cache in device memory the
  // writes are enqueued on `stream`, a stream of that device (null: its default stream); otherwise
  // they are done on return. kOutOfRange: there are no such layers.
  virtual absl::Status LoadLayers(int begin, int end, DeviceStream stream) = 0;
  absl::Status LoadLayers(int begin, int end) { return LoadLayers(begin, end, nullptr); }
  // Returns whether the enqueued writes are done.
  virtual absl::StatusOr<bool> Done() = 0;
  // Blocks until they are. So does the destructor.
  virtual absl::Status Wait() = 0;
};

// PageStore copies pages from the engine's cache to crumbd. Used by one thread at a time. It must
// not outlive its Transfer. If it is destroyed before all layers of a page were stored, the page is
// not published.
class PageStore {
 public:
  virtual ~PageStore() = default;
  // Reads and quantizes the rows of layers [begin, end) of this rank. The engine may overwrite them
  // when the call returns; with a cache in device memory, in work on `stream` (null: the default
  // stream) behind the call, or after Wait. kOutOfRange: there are no such layers.
  virtual absl::Status StoreLayers(int begin, int end, DeviceStream stream) = 0;
  absl::Status StoreLayers(int begin, int end) { return StoreLayers(begin, end, nullptr); }
  // Blocks until the enqueued reads are done. The destructor does so too, unless Finish was called.
  virtual absl::Status Wait() = 0;
  // Queues the pages for publishing; they become visible to other processes in the background. A
  // page with a non-finite row is left out and counted. kFailedPrecondition: a layer was not
  // stored.
  virtual absl::Status Finish() = 0;
};

// Transfer copies pages between crumbd and the paged KV cache of an engine that computes attention
// itself. Every page except the first of a sequence is quantized to INT2 on its way out (or stays
// BF16, with WorkerOptions::history_format) and dequantized on its way in.
//
// One process of an engine, its scheduler, looks up and leases prefixes: Keyspace, Keys, Acquire.
// Its workers, each with a cache of its own, copy the bytes: StartLoad, StartStore. All of them
// open a Transfer with the same WorkerOptions (except for the rank's part and private fields) and a
// client with the same ClientOptions::engine. Tokens pass from one process to another as bytes.
//
// Thread-safe.
//
//     scheduler                              workers (one per rank)
//     Keyspace -> token K                    UseCache / UseBlocks / UseDeviceCache, once
//     Keys(K, tokens) -> keys
//     Acquire(K, keys) -> token P, lease --> StartLoad(P, keys, ...) -> LoadLayers
//                                            StartStore({K, keys, ...}) -> StoreLayers -> Finish
//
// Layers may be loaded and stored while the engine computes others. Publishing happens on the
// worker's crumb-publish thread and never blocks a store.
class Transfer {
 public:
  // `client` is borrowed. kInvalidArgument: WorkerOptions::Validate fails, or v_basis is not
  // "model", which is the basis of the rows in an engine's cache. The client must outlive the
  // transfer.
  static absl::StatusOr<std::unique_ptr<Transfer>> Open(const WorkerOptions& options,
                                                        Client* client);
  virtual ~Transfer() = default;

  // Sets the cache for loads and stores that start later. REQUIRES: it has one layer for each layer
  // of this rank, and its memory stays valid until the Transfer is destroyed. kInvalidArgument: the
  // layers or strides are wrong.
  virtual absl::Status UseCache(PagedCache cache) = 0;

  // Does the same for blocks. The block table of a sequence then has its sink blocks and behind
  // them its history blocks, one for each page, of which that of page 0 is not used. Pages whose
  // rows were computed over INT2 history are marked so. kInvalidArgument: a layer lacks memory, or
  // the options are none that BlockAttention serves.
  virtual absl::Status UseBlocks(BlockCache cache) = 0;

  // Does the same for a cache in the memory of `device`. K and V of all layers have the same
  // strides, the elements of a row are adjacent, rows are aligned to 16 bytes, and a block has at
  // most 128 tokens; otherwise kInvalidArgument. kResourceExhausted: there is not enough device
  // memory or pinned memory. Blocks while memory is pinned, some seconds.
  virtual absl::Status UseDeviceCache(PagedCache cache, std::shared_ptr<Device> device,
                                      const DeviceCacheOptions& options) = 0;

  // Returns a token that names the keyspace for requests that begin now (see KeyspaceBinder). It
  // changes when crumbd restarts or the keyspace is dropped; a request keeps the token that it
  // began with. If crumbd has to be contacted for that, it takes `timeout` at most; without crumbd
  // the token names a keyspace that crumbd does not know: prefixes are empty, and stored pages are
  // dropped and counted.
  virtual std::string Keyspace(Duration timeout) = 0;

  // Returns the keys of the full pages of a sequence. extra[i] is a digest of everything else that
  // page i depends on (cache salt, LoRA adapter, images), zeros for nothing; `extra` may be shorter
  // than the pages. kDataLoss, kFailedPrecondition, kInvalidArgument: `keyspace` is not a token of
  // Keyspace.
  absl::StatusOr<std::vector<PageKey>> Keys(std::string_view keyspace,
                                            std::span<const int32_t> tokens,
                                            std::span<const Digest> extra) {
    return NextKeys(keyspace, PageKey{}, tokens, extra);
  }
  // Returns the same for pages that continue a sequence: `tokens` and `extra` start behind the page
  // of key `parent`, or with the sequence if that is zero.
  virtual absl::StatusOr<std::vector<PageKey>> NextKeys(std::string_view keyspace,
                                                        const PageKey& parent,
                                                        std::span<const int32_t> tokens,
                                                        std::span<const Digest> extra) = 0;

  // Leases the longest prefix of `keys` that crumbd has for all layers and KV heads, in any tier.
  // Pages on SSD and other nodes are brought to host memory within `timeout`. Without crumbd the
  // prefix is empty. If the call to crumbd fails, the prefix is empty and counters() counts the
  // failure. kInvalidArgument: the token is that of a Transfer with other options.
  virtual absl::StatusOr<TransferPrefix> Acquire(std::string_view keyspace,
                                                 std::span<const PageKey> keys,
                                                 Duration timeout) = 0;

  // Starts to load pages [first_page, end_page) of the prefix that `token` names. `keys` are those
  // of pages [0, end_page); `blocks` is the sequence's block table, starting with its first token.
  // The load may have fewer pages than requested, or none if the lease has ended or the client is
  // connected to another crumbd: PageLoad::pages says how many, and the engine computes the rest.
  // kInvalidArgument: the range is empty or reaches beyond the prefix, the number of keys is not
  // end_page, the block table is too short, or the token is that of a Transfer with other options;
  // kFailedPrecondition: no cache was set.
  virtual absl::StatusOr<std::unique_ptr<PageLoad>> StartLoad(std::string_view token,
                                                              std::span<const PageKey> keys,
                                                              int first_page, int end_page,
                                                              std::span<const int64_t> blocks,
                                                              Duration timeout) = 0;

  // A request to store pages.
  struct StoreRequest {
    std::string_view keyspace;      // a token that Keyspace returned
    std::span<const PageKey> keys;  // keys of pages first_page, first_page + 1, ...
    PageKey parent;                 // key of the page in front of them; zeros if first_page is 0
    int first_page = 0;
    std::span<const int64_t> blocks;  // the sequence's block table, starting with its first token
    bool over_int2_prefix = false;  // the rows were computed over a prefix that was loaded as INT2
  };
  // Starts to store pages. kFailedPrecondition: no cache was set, or INT2 pages are switched off
  // and the cache has no others. kResourceExhausted: pages that wait to be published use up
  // WorkerOptions::page_bytes_max, or DeviceCacheOptions::staging_bytes.
  virtual absl::StatusOr<std::unique_ptr<PageStore>> StartStore(const StoreRequest& request) = 0;

  // Blocks until the pages queued so far were published or dropped. kDeadlineExceeded: not within
  // `timeout`.
  virtual absl::Status WaitPublished(Duration timeout) = 0;
  virtual WorkerCounters counters() const = 0;
};

}  // namespace crumb::client
