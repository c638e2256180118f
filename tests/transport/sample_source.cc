// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/transport/sample_source.h"

#include "common/crc32c.h"

namespace crumb::transport {
namespace {

template <typename Id>
Id NumberedId(int number, uint8_t salt) {
  Id id;
  for (size_t i = 0; i < id.bytes.size(); ++i) {
    id.bytes[i] = static_cast<uint8_t>((number >> (8 * (i % 4))) + salt + i);
  }
  return id;
}

}  // namespace

KeyspaceId SampleKeyspace() { return NumberedId<KeyspaceId>(1, 99); }
PageKey SampleKey(int page) { return NumberedId<PageKey>(page, 7); }

std::byte SampleByte(int page, int layer, int head, size_t offset) {
  return static_cast<std::byte>(page * 131 + layer * 31 + head * 7 + offset * 13 + offset / 256);
}

void SampleSource::Add(int page, const std::vector<TileRange>& fragments, uint32_t tile_bytes,
                       Flaw flaw) {
  auto added = std::make_shared<Page>();
  for (const TileRange& range : fragments) {
    FragmentHeader header;
    header.tile_bytes = tile_bytes;
    header.generation = kSampleGeneration;
    header.keyspace = SampleKeyspace();
    if (flaw == Flaw::kOtherKeyspace) header.keyspace.bytes[31] ^= 1;
    header.key = SampleKey(flaw == Flaw::kOtherKey ? page + 1000000 : page);
    header.range = range;
    std::vector<std::byte>& bytes =
        added->bytes.emplace_back(FragmentBytes(range.tiles(), tile_bytes));
    std::byte* to = bytes.data();
    for (int layer = range.layers.begin; layer < range.layers.end; ++layer) {
      for (int head = range.heads.begin; head < range.heads.end; ++head, to += tile_bytes) {
        for (size_t i = 0; i < tile_bytes; ++i) to[i] = SampleByte(page, layer, head, i);
        header.tile_sums.push_back(Crc32c({to, tile_bytes}));
      }
    }
    EncodeFragmentHeader(header, {to, FragmentHeaderBytes(range.tiles())});
    if (flaw == Flaw::kTileFlipped) to[-1] ^= std::byte{1};
    if (flaw == Flaw::kHeaderFlipped) to[20] ^= std::byte{1};
  }
  for (size_t i = 0; i < fragments.size(); ++i) {
    added->fragments.push_back({added->bytes[i], fragments[i], tile_bytes});
  }
  MutexLock lock(&mutex_);
  pages_[SampleKey(page)] = std::move(added);
}

void SampleSource::Hold() {
  MutexLock lock(&mutex_);
  hold_ = true;
}

void SampleSource::ReplyAll() {
  std::vector<std::pair<SourceRequest, Reply>> waiting;
  {
    MutexLock lock(&mutex_);
    hold_ = false;
    waiting.swap(waiting_);
  }
  for (auto& [request, reply] : waiting) reply(Respond(request));
}

SourcePage SampleSource::Find(const SourceRequest& request, const SourceRequest::Page& wanted) {
  if (request.session != kSampleSession || request.keyspace != SampleKeyspace()) {
    return {PageStatus::kRefused, {}};
  }
  if (request.generation != kSampleGeneration) return {PageStatus::kStale, {}};
  MutexLock lock(&mutex_);
  const auto found = pages_.find(wanted.key);
  if (found == pages_.end()) return {PageStatus::kAbsent, {}};
  SourcePage page{PageStatus::kHit, {}};
  int covered = 0;
  for (const SourceFragment& fragment : found->second->fragments) {
    const int tiles = Intersect(fragment.range, wanted.range).tiles();
    covered += tiles;
    if (tiles > 0) page.fragments.push_back(fragment);
  }
  if (covered != wanted.range.tiles()) return {PageStatus::kNotCovered, {}};
  return page;
}

SourceResponse SampleSource::Respond(const SourceRequest& request) {
  SourceResponse response;
  for (const SourceRequest::Page& wanted : request.pages) {
    response.pages.push_back(Find(request, wanted));
  }
  leases_->fetch_add(1);
  response.lease =
      std::shared_ptr<const void>(this, [leases = leases_](const void*) { leases->fetch_sub(1); });
  return response;
}

void SampleSource::Acquire(SourceRequest request, Reply reply) {
  requests_.fetch_add(1);
  {
    MutexLock lock(&mutex_);
    if (hold_) {
      waiting_.emplace_back(std::move(request), std::move(reply));
      return;
    }
  }
  reply(Respond(request));
}

}  // namespace crumb::transport
