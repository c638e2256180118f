// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/transfer/host_pages.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>

#include "common/page_key.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Number of tiles passed to WorkerOptions::parallel_for at once, whose count is an int.
constexpr int kTilesAtOnce = 1 << 20;

void ForEachTile(const WorkerOptions& options, size_t pages, int layer_begin, int layer_end,
                 const std::function<void(size_t page, int layer, int head)>& body) {
  const int heads = options.own_kv_heads();
  const int tiles = (layer_end - layer_begin) * heads;
  if (tiles == 0) return;
  const size_t pages_at_once = static_cast<size_t>(std::max(1, kTilesAtOnce / tiles));
  for (size_t first = 0; first < pages; first += pages_at_once) {
    const int count = static_cast<int>(std::min(pages_at_once, pages - first)) * tiles;
    const auto run = [&](int task) {
      const int tile = task % tiles;
      body(first + static_cast<size_t>(task / tiles), layer_begin + tile / heads, tile % heads);
    };
    if (options.parallel_for && count > 1) {
      options.parallel_for(count, run);
    } else {
      for (int task = 0; task < count; ++task) run(task);
    }
  }
}

class HostPageLoad final : public PageLoad {
 public:
  HostPageLoad(const TransferParts& parts, std::shared_ptr<const HostCache> cache,
               std::span<const int64_t> blocks, std::vector<std::shared_ptr<Page>> pages)
      : parts_(parts),
        cache_(std::move(cache)),
        blocks_(blocks.begin(), blocks.end()),
        pages_(std::move(pages)) {}

  int pages() const override { return static_cast<int>(pages_.size()); }

  absl::Status LoadLayers(int begin, int end, DeviceStream) override {
    CRUMB_RETURN_IF_ERROR(CheckLayers(parts_.options, begin, end));
    ForEachTile(parts_.options, pages_.size(), begin, end,
                [this](size_t page, int layer, int head) {
                  cache_->LoadTile(*pages_[page], layer, head, blocks_);
                });
    return absl::OkStatus();
  }
  absl::StatusOr<bool> Done() override { return true; }
  absl::Status Wait() override { return absl::OkStatus(); }

 private:
  const TransferParts parts_;
  const std::shared_ptr<const HostCache> cache_;
  const std::vector<int64_t> blocks_;
  const std::vector<std::shared_ptr<Page>> pages_;
};

class HostPageStore final : public PageStore {
 public:
  HostPageStore(const TransferParts& parts, std::shared_ptr<const HostCache> cache,
                KeyspaceBinder::Binding keyspace, std::span<const int64_t> blocks,
                std::vector<std::shared_ptr<Page>> pages)
      : parts_(parts),
        cache_(std::move(cache)),
        keyspace_(std::move(keyspace)),
        blocks_(blocks.begin(), blocks.end()),
        pages_(std::move(pages)),
        status_(pages_.size()),
        stored_(parts.options.own_layers()) {}

  absl::Status StoreLayers(int begin, int end, DeviceStream) override {
    CRUMB_RETURN_IF_ERROR(CheckLayers(parts_.options, begin, end));
    ForEachTile(parts_.options, pages_.size(), begin, end,
                [this](size_t page, int layer, int head) {
                  status_[page].fetch_or(cache_->StoreTile(blocks_, layer, head, *pages_[page]));
                });
    stored_.Add(begin, end);
    return absl::OkStatus();
  }
  absl::Status Wait() override { return absl::OkStatus(); }

  absl::Status Finish() override {
    CRUMB_RETURN_IF_ERROR(stored_.CheckAll());
    const std::vector<uint32_t> status(status_.begin(), status_.end());
    PublishPages(parts_, keyspace_, std::exchange(pages_, {}), status);
    return absl::OkStatus();
  }

 private:
  const TransferParts parts_;
  const std::shared_ptr<const HostCache> cache_;
  const KeyspaceBinder::Binding keyspace_;
  const std::vector<int64_t> blocks_;
  std::vector<std::shared_ptr<Page>> pages_;
  std::vector<std::atomic<uint32_t>> status_;  // per page: kernels::kStatus bits of its tiles
  LayersStored stored_;
};

}  // namespace

std::unique_ptr<PageLoad> NewHostPageLoad(const TransferParts& parts,
                                          std::shared_ptr<const HostCache> cache,
                                          std::span<const int64_t> blocks,
                                          std::vector<std::shared_ptr<Page>> pages) {
  return std::make_unique<HostPageLoad>(parts, std::move(cache), blocks, std::move(pages));
}

std::unique_ptr<PageStore> NewHostPageStore(const TransferParts& parts,
                                            std::shared_ptr<const HostCache> cache,
                                            KeyspaceBinder::Binding keyspace,
                                            std::span<const int64_t> blocks,
                                            std::vector<std::shared_ptr<Page>> pages) {
  return std::make_unique<HostPageStore>(parts, std::move(cache), std::move(keyspace), blocks,
                                         std::move(pages));
}

}  // namespace crumb::client
