// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/histories/model.h"

#include <algorithm>
#include <cstring>

#include "common/crc32c.h"
#include "tests/histories/failure.h"

namespace crumb::histories {
namespace {

// The first content's number; numbers are unlike anything that memory happens to hold.
constexpr uint64_t kFirstNumber = 0x6372756d62000001;
constexpr size_t kWordBytes = sizeof(uint64_t);

uint64_t NextWord(uint64_t word) { return word * 6364136223846793005u + 1442695040888963407u; }

uint64_t WordAt(std::span<const std::byte> bytes, size_t offset) {
  uint64_t word;
  std::memcpy(&word, bytes.data() + offset, kWordBytes);
  return word;
}

uint64_t PlaceWord(int layer, int head) {
  return (static_cast<uint64_t>(layer) << 32) | static_cast<uint64_t>(head);
}

void FillTile(std::span<std::byte> tile, uint64_t number, int layer, int head) {
  const uint64_t place = PlaceWord(layer, head);
  std::memcpy(tile.data(), &number, kWordBytes);
  std::memcpy(tile.data() + kWordBytes, &place, kWordBytes);
  uint64_t word = NextWord(number ^ (place + 1));
  for (size_t at = 2 * kWordBytes; at < tile.size(); at += kWordBytes) {
    std::memcpy(tile.data() + at, &word, kWordBytes);
    word = NextWord(word);
  }
}

bool IsTile(std::span<const std::byte> tile, uint64_t number, int layer, int head) {
  const uint64_t place = PlaceWord(layer, head);
  if (WordAt(tile, 0) != number || WordAt(tile, kWordBytes) != place) return false;
  uint64_t word = NextWord(number ^ (place + 1));
  for (size_t at = 2 * kWordBytes; at < tile.size(); at += kWordBytes) {
    if (WordAt(tile, at) != word) return false;
    word = NextWord(word);
  }
  return true;
}

PageKey OwnKey(int keyspace, int page) {
  return PageKey{Sha256(fmt::format("keyspace {} page {}", keyspace, page))};
}

}  // namespace

PageKey Model::KeyOf(int keyspace, int key) const {
  if (key < kPages) return OwnKey(keyspace, key);
  return OwnKey((keyspace + 2) % kKeyspaces, key - kPages);
}

PageKey Model::ParentOf(int keyspace, int key) const {
  return key % kSequencePages == 0 ? PageKey() : KeyOf(keyspace, key - 1);
}

uint64_t Model::Add(const Content& content) {
  const uint64_t number = kFirstNumber + contents_.size();
  contents_[number].content = content;
  return number;
}

FragmentHeader Model::HeaderOf(uint64_t number) const {
  const Content& content = at(number);
  FragmentHeader header;
  header.tile_bytes = kTileBytes;
  header.generation = content.generation;
  header.keyspace = IdOf(content.keyspace);
  header.key = content.key;
  header.range = content.range;
  for (int key = 0; key < kKeys; ++key) {
    if (KeyOf(content.keyspace, key) == content.key) {
      header.parent = ParentOf(content.keyspace, key);
    }
  }
  std::vector<std::byte> tile(kTileBytes);
  for (int layer = content.range.layers.begin; layer < content.range.layers.end; ++layer) {
    for (int head = content.range.heads.begin; head < content.range.heads.end; ++head) {
      FillTile(tile, number, layer, head);
      header.tile_sums.push_back(Crc32c(tile));
    }
  }
  return header;
}

std::vector<std::byte> Model::FragmentOf(uint64_t number, bool damage) const {
  const FragmentHeader header = HeaderOf(number);
  const TileRange& range = header.range;
  std::vector<std::byte> bytes(FragmentBytes(range.tiles(), kTileBytes));
  std::span<std::byte> rest(bytes);
  for (int layer = range.layers.begin; layer < range.layers.end; ++layer) {
    for (int head = range.heads.begin; head < range.heads.end; ++head) {
      FillTile(rest.first(kTileBytes), number, layer, head);
      rest = rest.subspan(kTileBytes);
    }
  }
  EncodeFragmentHeader(header, rest);
  if (damage) bytes[kTileBytes / 2] ^= std::byte{4};
  return bytes;
}

Model::CommitId Model::BeginCommit(uint64_t content, bool durable) {
  Entry& entry = contents_.at(content);
  Commit commit;
  commit.durable = durable;
  commit.losses = disk_.losses(NameOf(entry.content));
  for (const auto& [number, one] : deletes_under_way_) {
    const bool named =
        std::find(one.keys.begin(), one.keys.end(), entry.content.key) != one.keys.end();
    commit.being_deleted |= named && one.keyspace == entry.content.keyspace;
  }
  entry.commits.push_back(commit);
  return {content, entry.commits.size() - 1};
}

void Model::EndCommit(const CommitId& id, bool stored) {
  Commit& commit = contents_.at(id.content).commits[id.index];
  commit.ended = Tick();
  commit.stored = stored;
}

void Model::NodeDied() {
  const uint64_t now = Tick();
  for (auto& [number, entry] : contents_) {
    const auto drops = drops_under_way_.find(entry.content.keyspace);
    const bool being_dropped = drops != drops_under_way_.end() && drops->second > 0;
    for (Commit& commit : entry.commits) {
      if (commit.ended == 0) commit.ended = now;
      // A drop that was not acknowledged may have happened or not, as a deletion may.
      commit.being_deleted |= being_dropped;
      if (!commit.promised) commit.stored = false;  // it may be lost
    }
  }
  drops_under_way_.clear();
  deletes_under_way_.clear();
}

Model::DeleteId Model::BeginDelete(int keyspace, const std::vector<PageKey>& keys) {
  DeleteId id;
  id.number = Tick();
  deletes_under_way_[id.number] = {keyspace, keys};
  std::vector<CommitId>& deleted = id.commits;
  for (auto& [number, entry] : contents_) {
    if (entry.content.keyspace != keyspace) continue;
    if (std::find(keys.begin(), keys.end(), entry.content.key) == keys.end()) continue;
    for (size_t i = 0; i < entry.commits.size(); ++i) {
      entry.commits[i].being_deleted = true;
      if (entry.commits[i].ended != 0) deleted.push_back({number, i});
    }
  }
  return id;
}

void Model::EndDelete(const DeleteId& deletion, bool acknowledged) {
  deletes_under_way_.erase(deletion.number);
  if (!acknowledged) return;
  const uint64_t now = Tick();
  for (const CommitId& id : deletion.commits) {
    Commit& commit = contents_.at(id.content).commits[id.index];
    if (commit.deleted == 0) commit.deleted = now;
  }
}

void Model::EndDrop(int keyspace, uint64_t generation) {
  --drops_under_way_[keyspace];
  generations_[keyspace] = std::max(generations_[keyspace], generation);
}

uint64_t Model::acknowledged_generation(int keyspace) const {
  const auto found = generations_.find(keyspace);
  return found == generations_.end() ? 0 : found->second;
}

bool Model::IsGone(const Entry& entry, const Commit& commit) const {
  const int keyspace = entry.content.keyspace;
  const auto drops = drops_under_way_.find(keyspace);
  const bool being_dropped = drops != drops_under_way_.end() && drops->second > 0;
  return commit.deleted != 0 || commit.being_deleted || being_dropped ||
         entry.content.generation < acknowledged_generation(keyspace) ||
         disk_.losses(NameOf(entry.content)) > commit.losses;
}

std::vector<Model::CommitId> Model::BeginFlush(int tenant) const {
  std::vector<CommitId> commits;
  for (const auto& [number, entry] : contents_) {
    if (TenantOf(entry.content.keyspace) != tenant) continue;
    for (size_t i = 0; i < entry.commits.size(); ++i) {
      const Commit& commit = entry.commits[i];
      if (commit.durable && commit.stored && !IsGone(entry, commit)) commits.push_back({number, i});
    }
  }
  return commits;
}

void Model::EndFlush(const std::vector<CommitId>& commits) {
  for (const CommitId& id : commits) {
    Entry& entry = contents_.at(id.content);
    Commit& commit = entry.commits[id.index];
    if (IsGone(entry, commit) || !commit.stored) continue;  // or its loss was reported meanwhile
    if (!disk_.Covers(NameOf(entry.content), entry.content.generation, entry.content.range)) {
      Fail("flush-is-durable", "Flush succeeded, and the disk does not have {}",
           Describe(id.content));
    }
    commit.promised = true;
  }
}

void Model::LossReported(int tenant) {
  for (auto& [number, entry] : contents_) {
    const Content& content = entry.content;
    if (TenantOf(content.keyspace) != tenant) continue;
    if (disk_.Covers(NameOf(content), content.generation, content.range)) continue;
    for (Commit& commit : entry.commits) commit.stored = false;
  }
}

void Model::Durable(const KeyspaceId& keyspace, const PageKey& key) {
  if (!disk_.WasWritten({keyspace, key})) {
    Fail("notices-are-true", "a page that was never written is said to be durable: key {}",
         key.ToHex().substr(0, 8));
  }
  // A notice names the page and not the fragment: one of those that were committed is on disk.
  bool any_there = false;
  bool any_gone = false;
  bool any_stored = false;
  for (auto& [number, entry] : contents_) {
    if (IdOf(entry.content.keyspace) != keyspace || entry.content.key != key) continue;
    const Content& content = entry.content;
    const bool there = disk_.Covers(NameOf(content), content.generation, content.range);
    any_there |= there;
    for (Commit& commit : entry.commits) {
      if (commit.durable && commit.stored && there) commit.promised = true;
      any_stored |= commit.durable && commit.stored;
      any_gone |= IsGone(entry, commit) || !commit.stored;
    }
  }
  if (any_stored && !any_there && !any_gone) {
    Fail("notices-are-true", "a page that was said to be durable is not on disk: key {}",
         key.ToHex().substr(0, 8));
  }
}

std::vector<Model::Content> Model::DurablePages() const {
  std::vector<Content> pages;
  for (const auto& [number, entry] : contents_) {
    const bool promised =
        std::any_of(entry.commits.begin(), entry.commits.end(),
                    [&](const Commit& one) { return one.promised && !IsGone(entry, one); });
    if (promised) pages.push_back(entry.content);
  }
  return pages;
}

std::string Model::Describe(uint64_t number) const {
  const Content& content = at(number);
  return fmt::format(
      "content {} (keyspace {} of tenant {}, generation {}, key {}, layers {} to {}, heads {} to "
      "{}{})",
      number - kFirstNumber, content.keyspace, TenantOf(content.keyspace), content.generation,
      content.key.ToHex().substr(0, 8), content.range.layers.begin, content.range.layers.end,
      content.range.heads.begin, content.range.heads.end, content.valid ? "" : ", damaged");
}

bool Model::MayBeServed(const Entry& entry, const Since& since) const {
  return std::any_of(entry.commits.begin(), entry.commits.end(), [&](const Commit& commit) {
    return commit.deleted == 0 || commit.deleted >= since.tick;
  });
}

void Model::CheckContent(uint64_t number, int keyspace, const PageKey& key,
                         const Since& since) const {
  const auto found = contents_.find(number);
  if (found == contents_.end()) {
    Fail("bytes-are-committed", "a hit of keyspace {} has bytes that were never committed",
         keyspace);
  }
  const Content& content = found->second.content;
  if (TenantOf(content.keyspace) != TenantOf(keyspace)) {
    Fail("tenants-apart", "a hit of tenant {} is {}", TenantOf(keyspace), Describe(number));
  }
  if (content.keyspace != keyspace || content.key != key || !content.valid) {
    Fail("bytes-are-committed", "a hit of keyspace {}, key {} is {}", keyspace,
         key.ToHex().substr(0, 8), Describe(number));
  }
  if (content.generation < since.generation) {
    Fail("drops-stay", "a hit is {}, and generation {} was acknowledged before", Describe(number),
         since.generation);
  }
  if (!MayBeServed(found->second, since)) {
    Fail("deletes-stay", "a hit is {}, whose deletion was acknowledged before", Describe(number));
  }
}

uint64_t Model::CheckTile(std::span<const std::byte> tile, int keyspace, const PageKey& key,
                          int layer, int head, const Since& since) const {
  const uint64_t number = WordAt(tile, 0);
  CheckContent(number, keyspace, key, since);
  if (!IsTile(tile, number, layer, head)) {
    Fail("bytes-are-committed", "layer {}, head {} of {} has other bytes", layer, head,
         Describe(number));
  }
  return number;
}

void Model::CheckMemory(std::span<const std::byte> memory, int tenant) const {
  // Fragments begin at multiples of 512 bytes, and so do tiles of 9,216.
  constexpr size_t kStep = 512;
  for (size_t at = 0; at + kStep <= memory.size(); at += kStep) {
    const auto found = contents_.find(WordAt(memory, at));
    if (found == contents_.end() || TenantOf(found->second.content.keyspace) == tenant) continue;
    Fail("tenants-apart", "memory that tenant {} can read has {}", tenant, Describe(found->first));
  }
}

}  // namespace crumb::histories
