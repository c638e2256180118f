// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/fragment_set.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "common/crc32c.h"
#include "common/sha256.h"

namespace crumb::bench {

FragmentSet::FragmentSet(std::string name, size_t fragment_bytes, size_t bodies_bytes,
                         size_t sequence_pages)
    : name_(std::move(name)),
      tiles_(static_cast<int>(std::max<size_t>(1, (fragment_bytes + kTileBytes / 2) / kTileBytes))),
      sequence_pages_(sequence_pages) {
  std::mt19937_64 random(fragment_bytes);
  bodies_.resize(std::max<size_t>(2, bodies_bytes / tiles_bytes()));
  for (auto& body : bodies_) {
    body.resize(tiles_bytes());
    for (size_t at = 0; at < body.size(); at += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(body.data() + at, &word, sizeof(word));
    }
    auto& sums = sums_.emplace_back();
    for (size_t at = 0; at < body.size(); at += kTileBytes) {
      sums.push_back(Crc32c(std::span(body).subspan(at, kTileBytes)));
    }
  }
}

void FragmentSet::BindKeyspace(const KeyspaceId& keyspace, uint64_t generation) {
  keyspace_ = keyspace;
  generation_ = generation;
}

client::KeyspaceSpec FragmentSet::Spec() const {
  client::KeyspaceSpec spec;
  spec.fields = {{"model", "crumb-bench"},  {"weights", name_},
                 {"weight_format", "bf16"}, {"format", "int2"},
                 {"method", "oscar"},       {"rotation", "identity"},
                 {"v_basis", "model"},      {"layout", "1"},
                 {"prefill_block", "8192"}, {"page_tokens", std::to_string(kPageTokens)}};
  spec.layers = tiles_;
  spec.kv_heads = 1;
  spec.head_dim = 128;
  spec.group_size = 128;
  return spec;
}

PageKey FragmentSet::Key(size_t page) const {
  PageKey key;
  key.bytes = Sha256(name_ + "/" + std::to_string(page));
  return key;
}

std::span<const std::byte> FragmentSet::Tiles(size_t page) const {
  return bodies_[page % bodies_.size()];
}

FragmentHeader FragmentSet::Header(size_t page) const {
  FragmentHeader header;
  header.tile_bytes = kTileBytes;
  header.generation = generation_;
  header.keyspace = keyspace_;
  header.key = Key(page);
  if (page % sequence_pages_ > 0) header.parent = Key(page - 1);
  header.position = static_cast<uint32_t>(page % sequence_pages_) + 1;
  header.range = range();
  header.tile_sums = sums_[page % sums_.size()];
  return header;
}

}  // namespace crumb::bench
