// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/fragment_stream.h"

#include <algorithm>
#include <utility>

#include "client/rpc/fragment_reader.h"
#include "client/rpc/wire.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

constexpr size_t kChunkBytes = 2 << 20;

}  // namespace

absl::Status FragmentAssembler::Begin(const v1::GetResponse& message) {
  if (open_.has_value()) return absl::DataLossError("a fragment begins inside another");
  if (message.page() >= keys_.size())
    return absl::DataLossError("crumbd sent a page that was not requested");
  FragmentBytes fragment;
  fragment.page = static_cast<int>(message.page());
  fragment.tier = static_cast<Tier>(message.tier());
  CRUMB_ASSIGN_OR_RETURN(fragment.header,
                         DecodeFragmentHeader(std::as_bytes(std::span(message.header()))));
  if (CheckIdentity(fragment.header, keyspace_, keys_[message.page()]) != MissReason::kNone) {
    return absl::DataLossError("a fragment of another page or keyspace");
  }
  open_bytes_ = FragmentTilesBytes(fragment.header.range.tiles(), fragment.header.tile_bytes);
  open_ = std::move(fragment);
  return absl::OkStatus();
}

absl::Status FragmentAssembler::Add(v1::GetResponse& message) {
  if (message.miss_reason() != v1::MISS_REASON_UNSPECIFIED) {
    miss_reason_ = static_cast<MissReason>(message.miss_reason());
  }
  if (!message.header().empty()) CRUMB_RETURN_IF_ERROR(Begin(message));
  if (message.tiles().empty()) return absl::OkStatus();
  if (!open_.has_value() || open_->tiles.size() + message.tiles().size() > open_bytes_) {
    return absl::DataLossError("more bytes than the fragment's header announces");
  }
  if (message.tiles().size() == open_bytes_) {
    open_->tiles = std::move(*message.mutable_tiles());
  } else {
    if (open_->tiles.empty()) open_->tiles.reserve(open_bytes_);
    open_->tiles += message.tiles();
  }
  return open_->tiles.size() == open_bytes_ ? Deliver() : absl::OkStatus();
}

absl::Status FragmentAssembler::Deliver() {
  FragmentBytes fragment = *std::exchange(open_, std::nullopt);
  CRUMB_RETURN_IF_ERROR(VerifyTileSums(fragment.header, std::as_bytes(std::span(fragment.tiles))));
  return receiver_(std::move(fragment));
}

absl::StatusOr<MissReason> FragmentAssembler::End() const {
  if (open_.has_value()) return absl::DataLossError("the stream ended inside a fragment");
  return miss_reason_;
}

bool FragmentSplitter::Next(v1::PutRequest* message) {
  if (fragment_ == fragments_.size()) return false;
  const FragmentBytes& fragment = fragments_[fragment_];
  if (std::exchange(first_, false)) message->set_keyspace(ToBytes(keyspace_));
  if (sent_ == 0) {
    std::string header(FragmentHeaderBytes(fragment.header.range.tiles()), '\0');
    EncodeFragmentHeader(fragment.header, std::as_writable_bytes(std::span(header)));
    message->set_header(std::move(header));
  }
  const size_t size = std::min(kChunkBytes, fragment.tiles.size() - sent_);
  // Reuses the memory of the message before.
  message->mutable_tiles()->assign(fragment.tiles, sent_, size);
  sent_ += size;
  if (sent_ == fragment.tiles.size()) {
    sent_ = 0;
    ++fragment_;
  }
  return true;
}

}  // namespace crumb::client
