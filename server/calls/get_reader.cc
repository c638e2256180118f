// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/get_reader.h"

#include <algorithm>
#include <utility>

#include "server/base/wire_enums.h"
#include "server/calls/cluster_acquire.h"
#include "server/calls/field_bounds.h"
#include "server/calls/store_request.h"

namespace crumb::server {

void GetReader::Open(const CallContext& context, const v1::GetRequest& request, TimePoint deadline,
                     Opened opened) {
  const absl::Status fits = CheckFields(context.limits, request);
  if (!fits.ok()) return opened(fits);
  const auto keyspace = FindKeyspace(context, request.keyspace());
  if (!keyspace.ok()) return opened(keyspace.status());
  auto wanted = MakeStoreRequest(context, **keyspace, request, request.wait_ms(), deadline);
  if (!wanted.ok()) return opened(wanted.status());
  if ((*keyspace)->quality_off()) {
    return opened(std::unique_ptr<GetReader>(new GetReader(context, {}, v1::MISS_REASON_QUALITY)));
  }
  if ((*keyspace)->unsynced()) {
    return opened(
        std::unique_ptr<GetReader>(new GetReader(context, {}, v1::MISS_REASON_GENERATION)));
  }
  AcquireAnywhere(
      context, MakeClusterRequest(*keyspace, *std::move(wanted), request),
      [context, opened = std::move(opened)](absl::StatusOr<storage::AcquireResult> result) {
        if (!result.ok()) return opened(result.status());
        if (result->part_full) {
          context.metrics.Reject(Rejection::kHeldMemory, TenantBudget::Taken::kPartFull);
        }
        const v1::MissReason reason = ToProto(result->miss_reason);
        opened(std::unique_ptr<GetReader>(new GetReader(context, *std::move(result), reason)));
      });
}

GetReader::~GetReader() {
  if (result_.lease != 0) context_.store.Release(result_.lease);
}

bool GetReader::Next(Part& part) {
  part.message.Clear();
  part.tiles = {};
  if (fragment_ == result_.fragments.size()) {
    if (finished_ || miss_reason_ == v1::MISS_REASON_UNSPECIFIED) return false;
    part.message.set_page(result_.hit_pages);
    part.message.set_miss_reason(miss_reason_);
    finished_ = true;
    return true;
  }
  const storage::FragmentRef& fragment = result_.fragments[fragment_];
  const std::span<const std::byte> bytes = context_.store.Bytes(fragment);
  part.message.set_page(fragment.page);
  part.message.set_tier(ToProto(result_.page_tiers[fragment.page]));
  if (sent_ == 0) {
    const auto header = bytes.subspan(fragment.tiles_bytes);
    part.message.set_header(header.data(), header.size());
  }
  const size_t count =
      std::min<size_t>(fragment.tiles_bytes - sent_, context_.limits.chunk_bytes.value);
  part.tiles = bytes.subspan(sent_, count);
  context_.metrics.grpc_bytes_out.Add(count);
  sent_ += count;
  if (sent_ == fragment.tiles_bytes) {
    ++fragment_;
    sent_ = 0;
  }
  return true;
}

}  // namespace crumb::server
