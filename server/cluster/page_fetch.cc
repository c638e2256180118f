// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/page_fetch.h"

#include <algorithm>
#include <utility>

#include "common/limited_log.h"
#include "common/status_macros.h"

namespace crumb::server {
namespace {

using transport::PageStatus;

MissReason ReasonOf(PageStatus status) {
  switch (status) {
    case PageStatus::kHit:
      return MissReason::kNone;
    case PageStatus::kNotCovered:
      return MissReason::kNotCovered;
    case PageStatus::kStale:
      return MissReason::kGeneration;
    case PageStatus::kBusy:
      return MissReason::kBusy;
    case PageStatus::kCorrupt:
      return MissReason::kCorrupt;
    case PageStatus::kDeadline:
    case PageStatus::kCancelled:
      return MissReason::kDeadline;
    case PageStatus::kAbsent:
    case PageStatus::kRefused:
    case PageStatus::kUnavailable:
      return MissReason::kAbsent;
  }
  return MissReason::kAbsent;
}

// The header of a fragment that holds exactly `range`, put together from those of the parts.
absl::StatusOr<FragmentHeader> JoinHeaders(const std::vector<transport::FetchedFragment>& parts,
                                           const TileRange& range) {
  if (parts.empty()) return absl::DataLossError("a hit without fragments");
  FragmentHeader joined = parts.front().header;
  joined.range = range;
  joined.tile_sums.assign(static_cast<size_t>(range.tiles()), 0);
  for (const transport::FetchedFragment& part : parts) {
    const FragmentHeader& header = part.header;
    if (header.format != joined.format || header.tile_bytes != joined.tile_bytes ||
        header.layout_id != joined.layout_id) {
      return absl::DataLossError("fragments of one page differ in format");
    }
    joined.over_int2_prefix |= header.over_int2_prefix;
    const TileRange delivered = Intersect(part.delivered, Intersect(range, header.range));
    for (int layer = delivered.layers.begin; layer < delivered.layers.end; ++layer) {
      for (int head = delivered.heads.begin; head < delivered.heads.end; ++head) {
        const auto index = [&](const TileRange& whole) {
          return static_cast<size_t>((layer - whole.layers.begin) * whole.heads.size() + head -
                                     whole.heads.begin);
        };
        joined.tile_sums[index(range)] = header.tile_sums[index(header.range)];
      }
    }
  }
  return joined;
}

// One transport::FetchRequest and the outcome of its pages.
class Fetching : public std::enable_shared_from_this<Fetching> {
 public:
  using Slots = std::vector<std::shared_ptr<storage::IncomingSlot>>;

  Fetching(const PullContext& context, PageFetch fetch, std::shared_ptr<const void> held,
           PageSettled settled)
      : context_(context),
        fetch_(std::move(fetch)),
        held_(std::move(held)),
        settled_(std::move(settled)),
        slots_(std::make_shared<Slots>()) {}

  void Start() {
    transport::FetchRequest request;
    request.session = fetch_.session;
    request.keyspace = fetch_.keyspace->id;
    request.generation = fetch_.keyspace->generation.load();
    request.deadline = fetch_.deadline;
    for (size_t i = 0; i < fetch_.keys.size(); ++i) AddPage(i, request);
    request.memory = slots_;
    if (request.pages.empty()) return;
    fetch_.from->Fetch(
        std::move(request), [self = shared_from_this()](transport::FetchResponse response) {
          auto shared = std::make_shared<transport::FetchResponse>(std::move(response));
          const bool queued = self->context_.steps.Submit([self, shared] { self->Land(*shared); });
          if (!queued) self->FailAll(MissReason::kBusy);
        });
  }

 private:
  void AddPage(size_t page, transport::FetchRequest& request) {
    const Geometry& geometry = fetch_.keyspace->geometry;
    const uint32_t tile_bytes = fetch_.tile_bytes[page];
    if (tile_bytes != geometry.int2_tile_bytes() && tile_bytes != geometry.bf16_tile_bytes()) {
      return settled_(fetch_.names[page], MissReason::kCorrupt);
    }
    auto slot = context_.store.ReserveIncoming(fetch_.keyspace->id,
                                               FragmentBytes(fetch_.range.tiles(), tile_bytes));
    if (!slot.ok()) return settled_(fetch_.names[page], MissReason::kBusy);
    transport::RequestedPage& wish = request.pages.emplace_back();
    wish.key = fetch_.keys[page];
    wish.range = fetch_.range;
    wish.tile_bytes = tile_bytes;
    wish.places.first = (*slot)->memory().data();
    slots_->push_back(*std::move(slot));
    fetched_.push_back(page);
  }

  void FailAll(MissReason reason) {
    context_.metrics.pull_failed_pages.Add(fetched_.size());
    for (const size_t page : fetched_) settled_(fetch_.names[page], reason);
  }

  void Land(const transport::FetchResponse& response) {
    if (!response.detail.ok()) {
      LogWarningLimited("fetching {} pages from node {}: {}", fetched_.size(), fetch_.from->id(),
                        response.detail.ToString());
    }
    NoteBreaker(response);
    for (size_t i = 0; i < fetched_.size(); ++i) {
      MissReason reason = MissReason::kAbsent;
      if (i < response.pages.size()) {
        reason = ReasonOf(response.pages[i].status);
        if (reason == MissReason::kNone) reason = Publish(fetched_[i], i, response.pages[i]);
      }
      if (reason != MissReason::kNone) context_.metrics.pull_failed_pages.Add();
      if (reason == MissReason::kCorrupt) context_.metrics.pull_corrupt_pages.Add();
      settled_(fetch_.names[fetched_[i]], reason);
    }
  }

  // A miss that the peer reports is no failure, nor are pages that come late behind others that
  // came in time: the deadline is too short for all. Silence is a failure, and so is a connection
  // that breaks.
  void NoteBreaker(const transport::FetchResponse& response) {
    const auto ended = [&](PageStatus status) {
      return std::count_if(response.pages.begin(), response.pages.end(),
                           [&](const auto& page) { return page.status == status; });
    };
    const auto late = static_cast<size_t>(ended(PageStatus::kDeadline));
    const bool silent = ended(PageStatus::kUnavailable) > 0 || late == response.pages.size();
    Breaker& breaker = fetch_.from->breaker();
    silent ? breaker.Fail(Breaker::Of::kBytes) : breaker.Succeed(Breaker::Of::kBytes);
  }

  MissReason Publish(size_t page, size_t slot, const transport::PageResponse& response) {
    const absl::StatusOr<FragmentHeader> header = JoinHeaders(response.fragments, fetch_.range);
    if (!header.ok() || header->key != fetch_.keys[page] ||
        !fetch_.keyspace->CheckHeader(*header).ok()) {
      return MissReason::kCorrupt;
    }
    const auto published = context_.store.PublishIncoming(
        (*slots_)[slot], *header, fetch_.keyspace->geometry.bf16_tile_bytes(), fetch_.received);
    if (!published.ok()) return MissReason::kBusy;
    context_.metrics.pulled_pages.Add();
    context_.metrics.pulled_bytes.Add(
        FragmentTilesBytes(header->range.tiles(), header->tile_bytes));
    if (context_.pulled && fetch_.received == storage::Received::kCopy) {
      context_.pulled(*header, fetch_.runs.empty() ? PageKey() : fetch_.runs[page]);
    }
    return MissReason::kNone;
  }

  const PullContext& context_;
  const PageFetch fetch_;
  const std::shared_ptr<const void> held_;
  const PageSettled settled_;
  // The transport owns them too, as long as it may write there.
  const std::shared_ptr<Slots> slots_;
  std::vector<size_t> fetched_;  // page of each slot
};

}  // namespace

void StartPageFetch(const PullContext& context, const PageFetch& fetch,
                    const std::shared_ptr<const void>& held, const PageSettled& settled) {
  // In as many requests as the transport's bound takes.
  const size_t pages = fetch.keys.size();
  for (size_t begin = 0; begin < pages; begin += context.fetch_pages_max) {
    const size_t end = std::min(pages, begin + context.fetch_pages_max);
    PageFetch part = fetch;
    part.keys.assign(fetch.keys.begin() + static_cast<std::ptrdiff_t>(begin),
                     fetch.keys.begin() + static_cast<std::ptrdiff_t>(end));
    part.tile_bytes.assign(fetch.tile_bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                           fetch.tile_bytes.begin() + static_cast<std::ptrdiff_t>(end));
    part.names.assign(fetch.names.begin() + static_cast<std::ptrdiff_t>(begin),
                      fetch.names.begin() + static_cast<std::ptrdiff_t>(end));
    if (!fetch.runs.empty()) {
      part.runs.assign(fetch.runs.begin() + static_cast<std::ptrdiff_t>(begin),
                       fetch.runs.begin() + static_cast<std::ptrdiff_t>(end));
    }
    std::make_shared<Fetching>(context, std::move(part), held, settled)->Start();
  }
}

}  // namespace crumb::server
