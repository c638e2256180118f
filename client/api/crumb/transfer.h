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
#include "crumb/client.h"
#include "crumb/counters.h"
#include "crumb/worker_options.h"

namespace crumb::client {

// The K or V rows of one layer in an engine's paged KV cache: BF16, in this process's memory.
// Element i of the row of token t in block b and KV head h is
//   base[b * block_stride + h * head_stride + t * token_stride + i * element_stride];
// heads count from 0 at this rank's first. Strides are elements, so that token-major (NHD),
// head-major (HND), K and V interleaved in one row, and transposed planes are all of this form.
struct PagedRows {
  kernels::Bf16* base = nullptr;
  int64_t block_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t element_stride = 1;
};

// An engine's KV cache. Blocks have `block_tokens` tokens each, which need not be a page's 64.
struct PagedCache {
  struct Layer {
    PagedRows k;
    PagedRows v;
  };
  std::vector<Layer> layers;  // this rank's
  int64_t blocks = 0;
  int block_tokens = 0;
};

// A prefix that crumbd keeps for the processes of one engine.
struct TransferPrefix {
  int pages = 0;                               // leading pages of the requested keys that are held
  std::vector<Tier> tiers;                     // of these pages
  MissReason miss_reason = MissReason::kNone;  // of the first page that is not
  // Names the prefix to Transfer::StartLoad of other processes of the same engine. They must begin
  // to load while `lease` is held.
  std::string token;
  std::shared_ptr<const Lease> lease;  // null if pages is 0
};

// Pages on their way from crumbd into the engine's cache. One thread at a time. Must not outlive
// its Transfer.
class PageLoad {
 public:
  virtual ~PageLoad() = default;
  // Leading pages of the request that crumbd holds for this process, and that passed their checks.
  virtual int pages() const = 0;
  // Writes the rows of these pages for layers [begin, end) of this rank into the cache. INT2 rows
  // are dequantized and rotated back to the model's basis. kOutOfRange: no such layers.
  virtual absl::Status LoadLayers(int begin, int end) = 0;
};

// Pages on their way from the engine's cache to crumbd. One thread at a time. Must not outlive its
// Transfer. Pages of which a layer was not stored when it is destroyed are not published.
class PageStore {
 public:
  virtual ~PageStore() = default;
  // Reads the rows of layers [begin, end) of this rank and quantizes them. The engine may overwrite
  // them when this returns. kOutOfRange: no such layers.
  virtual absl::Status StoreLayers(int begin, int end) = 0;
  // Queues the pages for publishing; they become visible to others in the background.
  // kFailedPrecondition: a layer was not stored. A page with a row that is not finite is left out
  // and counted.
  virtual absl::Status Finish() = 0;
};

// Copies pages between crumbd and the paged KV cache of an engine that computes attention itself.
// Every page but the first of a sequence is quantized to INT2 on its way out (or stays BF16, with
// WorkerOptions::history_format) and dequantized on its way in.
//
// One process of an engine, its scheduler, looks prefixes up and leases them: Keyspace, Keys,
// Acquire. Its workers, which have a cache each, move the bytes: StartLoad, StartStore. All of
// them open a Transfer with the same WorkerOptions (but the rank's part and what is private) over
// clients with the same ClientOptions::engine. Tokens pass from one to the other as bytes.
//
// Thread-safe.
class Transfer {
 public:
  // `client` is borrowed. kInvalidArgument: WorkerOptions::Validate, or a v_basis other than
  // "model": an engine's cache has the model's rows.
  static absl::StatusOr<std::unique_ptr<Transfer>> Open(const WorkerOptions& options,
                                                        Client* client);
  virtual ~Transfer() = default;

  // Sets the cache for loads and stores that begin later. REQUIRES: one layer for each of this
  // rank's; the memory stays valid until the Transfer is destroyed. kInvalidArgument.
  virtual absl::Status UseCache(PagedCache cache) = 0;

  // Names the keyspace for requests that begin now: see KeyspaceBinder. It changes when crumbd is
  // restarted or the keyspace is dropped; a request keeps the one that it began with.
  virtual std::string Keyspace(Duration timeout) = 0;

  // Keys of the full pages of a sequence. `extra` has digests of what else leading pages depend on
  // (cache salt, LoRA adapter, images), zeros for nothing; it may be shorter than the pages.
  // kDataLoss, kFailedPrecondition, kInvalidArgument: `keyspace` is not a token of Keyspace.
  virtual absl::StatusOr<std::vector<PageKey>> Keys(std::string_view keyspace,
                                                    std::span<const int32_t> tokens,
                                                    std::span<const Digest> extra) = 0;

  // Leases the longest prefix of `keys` that crumbd has for all layers and KV heads, in any tier;
  // pages on SSD and other nodes are brought to host memory within `timeout`. Without crumbd the
  // prefix is empty.
  virtual absl::StatusOr<TransferPrefix> Acquire(std::string_view keyspace,
                                                 std::span<const PageKey> keys,
                                                 Duration timeout) = 0;

  // Begins to load pages [first_page, end_page) of the prefix that `token` names. `keys` are those
  // of pages [0, end_page); `blocks` is the sequence's block table, from its first token on.
  virtual absl::StatusOr<std::unique_ptr<PageLoad>> StartLoad(std::string_view token,
                                                              std::span<const PageKey> keys,
                                                              int first_page, int end_page,
                                                              std::span<const int64_t> blocks,
                                                              Duration timeout) = 0;

  struct StoreRequest {
    std::string_view keyspace;      // of Keyspace
    std::span<const PageKey> keys;  // of pages first_page, first_page + 1, ...
    PageKey parent;                 // of the page before them; zeros if first_page is 0
    int first_page = 0;
    std::span<const int64_t> blocks;  // the sequence's block table, from its first token on
    bool over_int2_prefix = false;    // rows were computed over a prefix that was loaded as INT2
  };
  // kResourceExhausted: WorkerOptions::page_bytes_max is in use by pages still to be published.
  virtual absl::StatusOr<std::unique_ptr<PageStore>> StartStore(const StoreRequest& request) = 0;

  // Waits until the pages queued so far were published or dropped. kDeadlineExceeded.
  virtual absl::Status WaitPublished(Duration timeout) = 0;
  virtual WorkerCounters counters() const = 0;
};

}  // namespace crumb::client
