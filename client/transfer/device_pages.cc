// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/transfer/device_pages.h"

#include <utility>

#include "common/logging.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Pages with copies that may be in flight. Its destruction waits for these before it releases the
// pages' memory.
class PagesInFlight {
 public:
  static absl::StatusOr<std::shared_ptr<PagesInFlight>> Create(
      std::shared_ptr<DeviceCache> cache, std::vector<std::shared_ptr<Page>> pages) {
    auto made = std::make_shared<PagesInFlight>();
    made->cache = std::move(cache);
    made->pages = std::move(pages);
    CRUMB_ASSIGN_OR_RETURN(made->done, NewEvent(made->cache->device()));
    return made;
  }
  ~PagesInFlight() { Wait().IgnoreError(); }

  absl::Status Wait() {
    return enqueued ? cache->device().Synchronize(done.get()) : absl::OkStatus();
  }

  std::shared_ptr<DeviceCache> cache;
  std::vector<std::shared_ptr<Page>> pages;
  OwnedEvent done;        // stands for the latest work
  bool enqueued = false;  // there was some
};

class DevicePageLoad final : public PageLoad {
 public:
  DevicePageLoad(const TransferParts& parts, std::shared_ptr<PagesInFlight> flight,
                 std::shared_ptr<const PinnedArena> arena, std::span<const int64_t> blocks)
      : parts_(parts),
        arena_(std::move(arena)),
        flight_(std::move(flight)),
        blocks_(blocks.begin(), blocks.end()) {}

  int pages() const override { return static_cast<int>(flight_->pages.size()); }

  absl::Status LoadLayers(int begin, int end, DeviceStream stream) override {
    CRUMB_RETURN_IF_ERROR(CheckLayers(parts_.options, begin, end));
    flight_->enqueued = true;
    return flight_->cache->Load(
        {.pages = flight_->pages, .blocks = blocks_, .layer_begin = begin, .layer_end = end},
        *arena_, stream, flight_->done.get());
  }
  absl::StatusOr<bool> Done() override {
    if (!flight_->enqueued) return true;
    return flight_->cache->device().Done(flight_->done.get());
  }
  absl::Status Wait() override { return flight_->Wait(); }

 private:
  const TransferParts parts_;
  const std::shared_ptr<const PinnedArena> arena_;  // outlives the copies from it
  const std::shared_ptr<PagesInFlight> flight_;
  const std::vector<int64_t> blocks_;
};

class DevicePageStore final : public PageStore {
 public:
  DevicePageStore(const TransferParts& parts, std::shared_ptr<PagesInFlight> flight,
                  KeyspaceBinder::Binding keyspace, std::span<const int64_t> blocks)
      : parts_(parts),
        flight_(std::move(flight)),
        keyspace_(std::move(keyspace)),
        blocks_(blocks.begin(), blocks.end()),
        stored_(parts.options.own_layers()) {}

  absl::Status StoreLayers(int begin, int end, DeviceStream stream) override {
    CRUMB_RETURN_IF_ERROR(CheckLayers(parts_.options, begin, end));
    if (flight_ == nullptr) {
      return absl::FailedPreconditionError("layers are stored after Finish");
    }
    flight_->enqueued = true;
    CRUMB_RETURN_IF_ERROR(flight_->cache->Store(
        {.pages = flight_->pages, .blocks = blocks_, .layer_begin = begin, .layer_end = end},
        stream, flight_->done.get()));
    stored_.Add(begin, end);
    return absl::OkStatus();
  }
  absl::Status Wait() override { return flight_ == nullptr ? absl::OkStatus() : flight_->Wait(); }

  absl::Status Finish() override {
    CRUMB_RETURN_IF_ERROR(stored_.CheckAll());
    if (flight_ == nullptr) return absl::OkStatus();
    parts_.settler.Add(
        [parts = parts_, keyspace = keyspace_, flight = std::exchange(flight_, nullptr)] {
          Settle(parts, keyspace, *flight);
        });
    return absl::OkStatus();
  }

 private:
  // Publishes the pages when their copies are done.
  static void Settle(const TransferParts& parts, const KeyspaceBinder::Binding& keyspace,
                     PagesInFlight& flight) {
    const absl::Status copied = flight.Wait();
    if (!copied.ok()) {
      LogWarning("{} pages did not reach the host and are not published: {}", flight.pages.size(),
                 copied.ToString());
      parts.tally.publish_dropped_unavailable.Add(flight.pages.size());
      return;
    }
    std::vector<uint32_t> status;
    for (const std::shared_ptr<Page>& page : flight.pages) {
      status.push_back(flight.cache->StatusOf(*page));
    }
    PublishPages(parts, keyspace, std::exchange(flight.pages, {}), status);
  }

  const TransferParts parts_;
  std::shared_ptr<PagesInFlight> flight_;  // null after Finish
  const KeyspaceBinder::Binding keyspace_;
  const std::vector<int64_t> blocks_;
  LayersStored stored_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PageLoad>> NewDevicePageLoad(
    const TransferParts& parts, std::shared_ptr<DeviceCache> cache,
    std::shared_ptr<const PinnedArena> arena, std::span<const int64_t> blocks,
    std::vector<std::shared_ptr<Page>> pages) {
  CRUMB_ASSIGN_OR_RETURN(auto flight, PagesInFlight::Create(std::move(cache), std::move(pages)));
  return std::make_unique<DevicePageLoad>(parts, std::move(flight), std::move(arena), blocks);
}

absl::StatusOr<std::unique_ptr<PageStore>> NewDevicePageStore(
    const TransferParts& parts, std::shared_ptr<DeviceCache> cache,
    KeyspaceBinder::Binding keyspace, std::span<const int64_t> blocks,
    std::vector<std::shared_ptr<Page>> pages) {
  CRUMB_ASSIGN_OR_RETURN(auto flight, PagesInFlight::Create(std::move(cache), std::move(pages)));
  return std::make_unique<DevicePageStore>(parts, std::move(flight), std::move(keyspace), blocks);
}

}  // namespace crumb::client
