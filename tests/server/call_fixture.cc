// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/server/call_fixture.h"

#include <cstring>

#include "common/crc32c.h"
#include "common/fragment_header.h"

namespace crumb::server {

CallFixture::CallFixture(Limits limits, SessionLimits session_limits)
    : limits_(std::move(limits)),
      events_({4, 16}, metrics_),
      store_(256, 32 << 10,
             {[this](const KeyspaceId& keyspace, const PageKey& key) {
                events_.SettleWaits(keyspace, key);
              },
              [this](const storage::PageEvent& event) {
                events_.Publish(event);
                if (on_page_) on_page_(event);
              }}),
      keyspaces_(
          KeyspaceRegistry::Open(store_, "a secret of the test", metrics_.tokens, 8).value()),
      sessions_(session_limits, store_, metrics_),
      commits_({"commits", 1, static_cast<size_t>(limits_.commit_queue)}),
      control_({"control", 1, static_cast<size_t>(limits_.control_queue)}),
      prefetches_({static_cast<size_t>(limits_.prefetches_max),
                   static_cast<size_t>(limits_.tenant_prefetches_max)}),
      context_{limits_,  Clock::Real(), store_,  *keyspaces_, sessions_, events_, metrics_,
               commits_, control_,      nullptr, nullptr,     {},        nullptr, &prefetches_},
      keyspace_(keyspaces_->OpenKeyspace({{{"model", "tiny"}}, kGeometry, ""}).value()) {
  events_.SetStore(&store_);
}

CallFixture::~CallFixture() {
  commits_.Stop();
  control_.Stop();
}

std::vector<std::byte> CallFixture::Fragment(const PageKey& key, uint8_t fill) const {
  FragmentHeader header;
  header.tile_bytes = kGeometry.int2_tile_bytes();
  header.generation = keyspace_->generation.load();
  header.keyspace = keyspace_->id;
  header.key = key;
  header.range = kGeometry.all_tiles();
  std::vector<std::byte> fragment(fragment_bytes(), std::byte{fill});
  const auto tiles = std::span(fragment).subspan(0, tiles_bytes());
  for (int tile = 0; tile < header.range.tiles(); ++tile) {
    header.tile_sums.push_back(
        Crc32c(tiles.subspan(static_cast<size_t>(tile) * header.tile_bytes, header.tile_bytes)));
  }
  EncodeFragmentHeader(header, std::span(fragment).subspan(tiles_bytes()));
  return fragment;
}

PageKey CallFixture::Key(int number) {
  PageKey key;
  std::memcpy(key.bytes.data(), &number, sizeof(number));
  key.bytes[31] = 1;  // never all zeros
  return key;
}

std::string CallFixture::Keys(int first, int count) {
  std::string keys;
  for (int i = first; i < first + count; ++i) keys += Key(i).view();
  return keys;
}

void CallFixture::Store(const PageKey& key) {
  const std::vector<std::byte> fragment = Fragment(key);
  storage::CommitRequest request;
  request.header = *DecodeFragmentHeader(std::span(fragment).subspan(tiles_bytes()));
  request.tiles = std::span(fragment).first(tiles_bytes());
  ASSERT_TRUE(store_.Commit(request).ok());
}

std::shared_ptr<Session> CallFixture::OpenSession(uint64_t staging_bytes,
                                                  const std::string& engine) {
  return sessions_.Open({"test", engine, 0, staging_bytes, ""}).value();
}

}  // namespace crumb::server
