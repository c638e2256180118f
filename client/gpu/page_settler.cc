// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/page_settler.h"

#include <utility>

#include "client/cpu/cpu_backend.h"
#include "client/gpu/prefix_loader.h"
#include "common/crc32c.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "kernels/quantize.h"

namespace crumb::client {

absl::StatusOr<std::unique_ptr<PageSettler>> PageSettler::Create(Device& device, size_t sink_bytes,
                                                                 SequenceStarter& starter,
                                                                 Background& background) {
  std::unique_ptr<PageSettler> settler(new PageSettler(device, starter, background));
  CRUMB_ASSIGN_OR_RETURN(settler->stream_, NewStream(device));
  CRUMB_ASSIGN_OR_RETURN(settler->copied_, NewEvent(device));
  CRUMB_ASSIGN_OR_RETURN(settler->sink_, NewPinnedBuffer(device, sink_bytes));
  return settler;
}

void PageSettler::Settle(const PassRef& moment, EvictResults::Table results,
                         std::vector<UnsettledPage> pages) {
  background_.Add([this, moment, results = std::move(results), pages = std::move(pages)] {
    const absl::Status done = moment.timeline->Synchronize(moment.pass);
    if (!done.ok()) return LogWarning("evicted pages were lost: {}", done.ToString());
    for (size_t i = 0; i < pages.size(); ++i) {
      DevicePage& page = *pages[i].page;
      const size_t tiles = page.bytes / page.tile_bytes;
      const uint32_t* sums = results->sums + i * tiles;
      page.tile_sums.assign(sums, sums + tiles);
      page.has_sums.Set();
      page.finite = (results->status[i] & kernels::kStatusNonFinite) == 0;
      if ((results->status[i] & kernels::kStatusSaturated) != 0) {
        starter_.tally().windows_saturated.Add();
      }
      Finish(pages[i]);
    }
  });
}

void PageSettler::SettleSink(const PassRef& moment, UnsettledPage page) {
  background_.Add([this, moment, page = std::move(page)] {
    const absl::Status looked = CheckSink(moment, page);
    if (!looked.ok()) return LogWarning("a sink page was lost: {}", looked.ToString());
    Finish(page);
  });
}

absl::Status PageSettler::CheckSink(const PassRef& moment, const UnsettledPage& unsettled) {
  CRUMB_RETURN_IF_ERROR(moment.timeline->Synchronize(moment.pass));
  DevicePage& page = *unsettled.page;
  const DeviceCopy copy{reinterpret_cast<uint64_t>(sink_.get()), page.address(), page.bytes};
  CRUMB_RETURN_IF_ERROR(device_.ToHost({&copy, 1}, stream_.get()));
  CRUMB_RETURN_IF_ERROR(device_.Record(copied_.get(), stream_.get()));
  CRUMB_RETURN_IF_ERROR(device_.Synchronize(copied_.get()));
  page.finite = AllFinite(reinterpret_cast<const kernels::Bf16*>(sink_.get()),
                          page.bytes / sizeof(kernels::Bf16));
  page.tile_sums.clear();
  for (size_t at = 0; at < page.bytes; at += page.tile_bytes) {
    page.tile_sums.push_back(Crc32c({sink_.get() + at, page.tile_bytes}));
  }
  page.has_sums.Set();
  return absl::OkStatus();
}

void PageSettler::Finish(const UnsettledPage& unsettled) {
  const int index = static_cast<int>(unsettled.page->position);
  starter_.tally().windows_evicted.Add();
  if (!unsettled.page->finite) {
    starter_.publisher().NoteRefusedWindow();
    unsettled.line->Damage(index);
  }
  for (const std::shared_ptr<const PrefixLoad>& load : unsettled.loads) {
    if (load->Settle() >= 0) unsettled.line->Damage(0);
  }
  if (unsettled.line->Withholds(index)) return;
  starter_.table().Insert(unsettled.wrapped);
  if (unsettled.publish) starter_.publisher().Publish(unsettled.keyspace, unsettled.wrapped);
}

}  // namespace crumb::client
