// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/put_assembler.h"

#include <cstring>
#include <span>

#include "common/status_macros.h"
#include "fmt/format.h"
#include "server/calls/field_bounds.h"
#include "server/calls/staging_calls.h"

namespace crumb::server {

absl::StatusOr<bool> PutAssembler::Add(const v1::PutRequest& request) {
  CRUMB_RETURN_IF_ERROR(CheckFields(context_.limits, request));
  if (keyspace_ == nullptr) {
    CRUMB_ASSIGN_OR_RETURN(keyspace_, FindKeyspace(context_, request.keyspace()));
  } else if (!request.keyspace().empty() && request.keyspace() != keyspace_->id.view()) {
    return absl::InvalidArgumentError("keyspace differs from the stream's first message");
  }
  if (!request.header().empty()) CRUMB_RETURN_IF_ERROR(Begin(request.header()));
  const std::string& tiles = request.tiles();
  if (tiles.empty() || tiles_bytes_ == 0) return false;  // the fragment was refused already
  if (tiles.size() > tiles_bytes_ - received_) {
    Refuse(fmt::format("more than the {} tile bytes that the header says", tiles_bytes_));
    return false;
  }
  std::memcpy(fragment_.data() + received_, tiles.data(), tiles.size());
  received_ += tiles.size();
  context_.metrics.grpc_bytes_in.Add(tiles.size());
  return received_ == tiles_bytes_;
}

absl::Status PutAssembler::Begin(const std::string& bytes) {
  EndIncomplete();
  if (response_.outcomes_size() >= context_.limits.put_fragments_max) {
    return absl::InvalidArgumentError(fmt::format(
        "more fragments than limits.put_fragments_max, {}", context_.limits.put_fragments_max));
  }
  const auto header_bytes = std::as_bytes(std::span(bytes));
  const absl::StatusOr<FragmentHeader> header = DecodeFragmentHeader(header_bytes);
  const absl::Status belongs = header.ok() ? keyspace_->CheckHeader(*header) : header.status();
  if (!belongs.ok()) {
    Refuse(belongs.ToString());
    return absl::OkStatus();
  }
  const size_t tiles = FragmentTilesBytes(header->range.tiles(), header->tile_bytes);
  const size_t total = tiles + FragmentHeaderBytes(header->range.tiles());
  if (total > context_.limits.fragment_bytes_max.value) {
    Refuse(fmt::format("the fragment has {} bytes, limits.fragment_bytes_max allows {}", total,
                       context_.limits.fragment_bytes_max.value));
    return absl::OkStatus();
  }
  fragment_.resize(total);
  std::memcpy(fragment_.data() + tiles, bytes.data(), total - tiles);
  tiles_bytes_ = tiles;
  received_ = 0;
  return absl::OkStatus();
}

void PutAssembler::Commit() {
  if (response_.flush_mark() == 0) {
    response_.set_flush_mark(context_.store.FlushMark(FlushScopeOf(context_)));
  }
  std::string why;
  response_.add_outcomes(CommitFragment(context_, *keyspace_, fragment_,
                                        static_cast<uint32_t>(tiles_bytes_), nullptr, &why));
  if (!why.empty() && response_.first_error().empty()) response_.set_first_error(why);
  tiles_bytes_ = 0;
}

void PutAssembler::Refuse(const std::string& why) {
  response_.add_outcomes(v1::COMMIT_OUTCOME_REFUSED);
  if (response_.first_error().empty()) response_.set_first_error(why);
  context_.metrics.Refuse(Refusal::kInvalid);
  tiles_bytes_ = 0;
}

void PutAssembler::EndIncomplete() {
  if (tiles_bytes_ == 0) return;
  Refuse(fmt::format("the fragment ends after {} of {} tile bytes", received_, tiles_bytes_));
}

v1::PutResponse PutAssembler::Finish() {
  EndIncomplete();
  return std::move(response_);
}

}  // namespace crumb::server
