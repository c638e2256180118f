// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "transport/fragment_source.h"

namespace crumb::transport {

inline constexpr SessionToken kSampleSession = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline constexpr uint64_t kSampleGeneration = 7;

KeyspaceId SampleKeyspace();
PageKey SampleKey(int page);
// The byte of tile (layer, head) of a page at `offset`.
std::byte SampleByte(int page, int layer, int head, size_t offset);

// A source of pages whose bytes follow from their number. Thread-safe.
class SampleSource final : public FragmentSource {
 public:
  enum class Flaw { kNone, kTileFlipped, kHeaderFlipped, kOtherKey, kOtherKeyspace };

  void Add(int page, const std::vector<TileRange>& fragments, uint32_t tile_bytes,
           Flaw flaw = Flaw::kNone);

  // Holds later replies until ReplyAll.
  void Hold();
  // Sends the held replies, and later ones at once.
  void ReplyAll();

  void Acquire(SourceRequest request, Reply reply) override;

  int requests() const { return requests_; }
  int leases() const { return *leases_; }

 private:
  struct Page {
    std::vector<std::vector<std::byte>> bytes;
    std::vector<SourceFragment> fragments;
  };

  SourceResponse Respond(const SourceRequest& request);
  SourcePage Find(const SourceRequest& request, const SourceRequest::Page& wanted);

  Mutex mutex_;
  bool hold_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::pair<SourceRequest, Reply>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::map<PageKey, std::shared_ptr<Page>> pages_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> requests_{0};
  const std::shared_ptr<std::atomic<int>> leases_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace crumb::transport
