// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/host_image.h"

#include <algorithm>
#include <concepts>
#include <cstring>
#include <string_view>

#include "common/crc32c.h"
#include "common/little_endian.h"
#include "common/status_macros.h"

namespace crumb::storage {
namespace {

constexpr std::string_view kMagic = "CRMBHOST";
// Magic, version, reader, 4 bytes of zeros, length.
constexpr size_t kHeadBytes = 24;
constexpr size_t kLengthOffset = 16;
constexpr size_t kSumBytes = 4;
constexpr uint16_t kReaderVersion = 4;
constexpr size_t kVersionOffset = 8;
constexpr size_t kReaderVersionOffset = 10;

constexpr uint16_t kVersionWithTenants = 2;
constexpr uint16_t kVersionWithLosses = 3;
constexpr uint16_t kVersionWithRevoked = 4;
// Marks are nanoseconds since 1970 and counts of pages: their sum never overflows below this.
constexpr uint64_t kMarkMax = uint64_t{1} << 62;
constexpr uint32_t kSlabsMax = 1 << 16;
constexpr uint32_t kFragmentsMax = kFragmentTilesMax;
// The least that one of them takes.
constexpr size_t kPageBytesMin = 32 * 3 + 8 + 1 + 3 * 8 + 4;
constexpr size_t kFragmentBytes = 8 + 3 * 4 + 4 + 4 + 8 + 1;

class Writer {
 public:
  template <std::integral T>
  void Add(T value) {
    char bytes[sizeof(T)];
    StoreLittle(reinterpret_cast<std::byte*>(bytes), value);
    out_.append(bytes, sizeof(T));
  }
  void AddBytes(std::string_view bytes) { out_.append(bytes); }
  void AddText(std::string_view text) {
    Add(static_cast<uint32_t>(text.size()));
    out_.append(text);
  }
  void AddTime(TimePoint time) { Add(static_cast<int64_t>(time.time_since_epoch().count())); }
  std::string& out() { return out_; }

 private:
  std::string out_;
};

// Reads beyond the end give zeros and make it bad for good.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <std::integral T>
  T Take() {
    if (!Has(sizeof(T))) return 0;
    const T value = LoadLittle<T>(bytes_.data());
    bytes_ = bytes_.subspan(sizeof(T));
    return value;
  }
  template <typename Id>
  Id TakeId() {
    Id id;
    if (!Has(id.bytes.size())) return id;
    std::memcpy(id.bytes.data(), bytes_.data(), id.bytes.size());
    bytes_ = bytes_.subspan(id.bytes.size());
    return id;
  }
  std::string TakeText() {
    const auto size = Take<uint32_t>();
    if (!Has(size)) return "";
    std::string text(reinterpret_cast<const char*>(bytes_.data()), size);
    bytes_ = bytes_.subspan(size);
    return text;
  }
  TimePoint TakeTime() { return TimePoint(TimePoint::duration(Take<int64_t>())); }
  // A count of things of at least `each` bytes; 0 when so many cannot be there.
  template <std::integral T = uint64_t>
  T TakeCount(size_t each) {
    const T count = Take<T>();
    if (count <= bytes_.size() / each) return count;
    Spoil();
    return 0;
  }
  bool good() const { return good_; }
  bool at_end() const { return bytes_.empty(); }

 private:
  bool Has(size_t bytes) {
    if (bytes <= bytes_.size()) return true;
    Spoil();
    return false;
  }
  void Spoil() {
    good_ = false;
    bytes_ = {};
  }

  std::span<const std::byte> bytes_;
  bool good_ = true;
};

void AddFragment(Writer& writer, const HostImage::Fragment& fragment) {
  writer.Add(fragment.range.layers.begin);
  writer.Add(fragment.range.layers.end);
  writer.Add(fragment.range.heads.begin);
  writer.Add(fragment.range.heads.end);
  writer.Add(fragment.tiles_bytes);
  writer.Add(fragment.bytes);
  writer.Add(fragment.logical_tile_bytes);
  writer.Add(fragment.slot.region);
  writer.Add(fragment.slot.bytes);
  writer.Add(fragment.slot.offset);
  writer.Add(fragment.slot.chunk_order);
}

HostImage::Fragment TakeFragment(Reader& reader) {
  HostImage::Fragment fragment;
  fragment.range.layers.begin = reader.Take<uint16_t>();
  fragment.range.layers.end = reader.Take<uint16_t>();
  fragment.range.heads.begin = reader.Take<uint16_t>();
  fragment.range.heads.end = reader.Take<uint16_t>();
  fragment.tiles_bytes = reader.Take<uint32_t>();
  fragment.bytes = reader.Take<uint32_t>();
  fragment.logical_tile_bytes = reader.Take<uint32_t>();
  fragment.slot.region = reader.Take<uint32_t>();
  fragment.slot.bytes = reader.Take<uint32_t>();
  fragment.slot.offset = reader.Take<uint64_t>();
  fragment.slot.chunk_order = reader.Take<uint8_t>();
  return fragment;
}

void AddLosses(Writer& writer, const LossLedger::Losses& losses) {
  writer.Add(losses.pages);
  writer.Add(losses.reported);
}

LossLedger::Losses TakeLosses(Reader& reader) {
  LossLedger::Losses losses;
  losses.pages = reader.Take<uint64_t>();
  losses.reported = reader.Take<uint64_t>();
  return losses;
}

void AddLedger(Writer& writer, const LossLedger::State& ledger) {
  writer.Add(ledger.mark_base);
  AddLosses(writer, ledger.all);
  writer.Add(static_cast<uint64_t>(ledger.tenants.size()));
  for (const auto& [tenant, losses] : ledger.tenants) {
    writer.AddText(tenant);
    AddLosses(writer, losses);
  }
  writer.Add(static_cast<uint64_t>(ledger.no_owner.size()));
  for (const auto& [keyspace, pages] : ledger.no_owner) {
    writer.AddBytes(keyspace.view());
    writer.Add(pages);
  }
}

LossLedger::State TakeLedger(Reader& reader) {
  LossLedger::State ledger;
  ledger.mark_base = reader.Take<uint64_t>();
  ledger.all = TakeLosses(reader);
  for (uint64_t left = reader.TakeCount(20); left > 0 && reader.good(); --left) {
    std::string tenant = reader.TakeText();
    ledger.tenants[std::move(tenant)] = TakeLosses(reader);
  }
  for (uint64_t left = reader.TakeCount(40); left > 0; --left) {
    const auto keyspace = reader.TakeId<KeyspaceId>();
    ledger.no_owner[keyspace] = reader.Take<uint64_t>();
  }
  return ledger;
}

void TakeDeleted(Reader& reader, std::vector<HostImage::Deleted>* to) {
  for (uint64_t left = reader.TakeCount(32 + 1 + 8); left > 0 && reader.good(); --left) {
    HostImage::Deleted& deleted = to->emplace_back();
    deleted.keyspace = reader.TakeId<KeyspaceId>();
    deleted.all = reader.Take<uint8_t>() != 0;
    for (uint64_t keys = reader.TakeCount(32); keys > 0; --keys) {
      deleted.keys.push_back(reader.TakeId<PageKey>());
    }
  }
}

// No count is above the count of all, and none was reported more often than it happened.
bool IsPossible(const LossLedger::State& ledger) {
  const uint64_t most = ledger.all.pages;
  const auto fits = [most](const LossLedger::Losses& losses) {
    return losses.pages <= most && losses.reported <= losses.pages;
  };
  return ledger.mark_base <= kMarkMax && most <= kMarkMax && fits(ledger.all) &&
         std::all_of(ledger.tenants.begin(), ledger.tenants.end(),
                     [&](const auto& tenant) { return fits(tenant.second); }) &&
         std::all_of(ledger.no_owner.begin(), ledger.no_owner.end(),
                     [&](const auto& keyspace) { return keyspace.second <= most; });
}

bool IsPossible(const HostImage& image, const HostImage::Fragment& fragment) {
  const Slot& slot = fragment.slot;
  return fragment.range.layers.begin < fragment.range.layers.end &&
         fragment.range.heads.begin < fragment.range.heads.end &&
         fragment.range.tiles() <= kFragmentTilesMax && fragment.tiles_bytes > 0 &&
         fragment.tiles_bytes < fragment.bytes && fragment.bytes <= slot.bytes &&
         slot.region < image.slabs && slot.offset <= image.slab_bytes &&
         slot.bytes <= image.slab_bytes - slot.offset;
}

absl::Status Damaged(const char* what) {
  return absl::DataLossError(std::string("image of host memory: ") + what);
}

// The lists between the slabs and the pages.
absl::Status TakeLists(Reader& reader, uint16_t version, HostImage* image) {
  if (version >= kVersionWithTenants) {
    for (auto left = reader.TakeCount<uint32_t>(4); left > 0 && reader.good(); --left) {
      image->tenants.push_back(reader.TakeText());
    }
    if (!image->tenants.empty() && image->tenants.size() != image->slabs) {
      return Damaged("it names another number of tenants than of slabs");
    }
  }
  for (uint64_t left = reader.TakeCount(40); left > 0; --left) {
    const auto keyspace = reader.TakeId<KeyspaceId>();
    image->generations.emplace_back(keyspace, reader.Take<uint64_t>());
  }
  for (uint64_t left = reader.TakeCount(8); left > 0 && reader.good(); --left) {
    std::string name = reader.TakeText();
    image->records.emplace_back(std::move(name), reader.TakeText());
  }
  if (version >= kVersionWithLosses) TakeDeleted(reader, &image->deleted);
  if (version >= kVersionWithRevoked) {
    for (uint64_t left = reader.TakeCount(4 + 8); left > 0 && reader.good(); --left) {
      std::string tenant = reader.TakeText();
      const auto slabs = reader.Take<uint64_t>();
      if (slabs > kSlabsMax) return Damaged("impossible numbers of revoked slabs");
      image->revoked[std::move(tenant)] = slabs;
    }
  }
  if (version >= kVersionWithLosses && reader.Take<uint8_t>() != 0) {
    image->losses = TakeLedger(reader);
    if (!IsPossible(*image->losses)) return Damaged("impossible numbers of lost pages");
  }
  return absl::OkStatus();
}

absl::Status TakePages(Reader& reader, HostImage* image) {
  const uint64_t pages = reader.TakeCount(kPageBytesMin);
  image->pages.reserve(pages);
  for (uint64_t left = pages; left > 0 && reader.good(); --left) {
    HostImage::Page& page = image->pages.emplace_back();
    page.keyspace = reader.TakeId<KeyspaceId>();
    page.key = reader.TakeId<PageKey>();
    page.parent = reader.TakeId<PageKey>();
    page.generation = reader.Take<uint64_t>();
    page.was_hit = reader.Take<uint8_t>() != 0;
    page.added = reader.TakeTime();
    page.used = reader.TakeTime();
    page.pinned_until = reader.TakeTime();
    const auto fragments = reader.TakeCount<uint32_t>(kFragmentBytes);
    if (fragments == 0 || fragments > kFragmentsMax) return Damaged("a page without fragments");
    page.fragments.reserve(fragments);
    for (uint32_t i = 0; i < fragments; ++i) {
      page.fragments.push_back(TakeFragment(reader));
      if (!IsPossible(*image, page.fragments.back())) return Damaged("an impossible fragment");
    }
  }
  return absl::OkStatus();
}

// Checks head and checksum, and returns the content between them.
absl::StatusOr<std::span<const std::byte>> CheckedContent(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeadBytes + kSumBytes) return Damaged("it is truncated");
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) return Damaged("it is none");
  if (LoadLittle<uint16_t>(bytes.data() + kReaderVersionOffset) > kHostImageVersion) {
    return absl::FailedPreconditionError("image of host memory: it needs a newer reader");
  }
  if (LoadLittle<uint64_t>(bytes.data() + kLengthOffset) != bytes.size()) {
    return Damaged("its length differs");
  }
  const auto content = bytes.first(bytes.size() - kSumBytes);
  if (LoadLittle<uint32_t>(bytes.data() + content.size()) != Crc32c(content)) {
    return Damaged("its checksum differs");
  }
  return content.subspan(kHeadBytes);
}

}  // namespace

std::string EncodeHostImage(const HostImage& image) {
  Writer writer;
  writer.AddBytes(kMagic);
  writer.Add(kHostImageVersion);
  writer.Add(kReaderVersion);
  writer.Add(uint32_t{0});
  writer.Add(uint64_t{0});  // the length, below
  writer.Add(image.slab_bytes);
  writer.Add(image.slabs);
  writer.Add(static_cast<uint32_t>(image.tenants.size()));
  for (const std::string& tenant : image.tenants) writer.AddText(tenant);
  writer.Add(static_cast<uint64_t>(image.generations.size()));
  for (const auto& [keyspace, generation] : image.generations) {
    writer.AddBytes(keyspace.view());
    writer.Add(generation);
  }
  writer.Add(static_cast<uint64_t>(image.records.size()));
  for (const auto& [name, value] : image.records) {
    writer.AddText(name);
    writer.AddText(value);
  }
  writer.Add(static_cast<uint64_t>(image.deleted.size()));
  for (const HostImage::Deleted& deleted : image.deleted) {
    writer.AddBytes(deleted.keyspace.view());
    writer.Add(static_cast<uint8_t>(deleted.all));
    writer.Add(static_cast<uint64_t>(deleted.keys.size()));
    for (const PageKey& key : deleted.keys) writer.AddBytes(key.view());
  }
  writer.Add(static_cast<uint64_t>(image.revoked.size()));
  for (const auto& [tenant, slabs] : image.revoked) {
    writer.AddText(tenant);
    writer.Add(slabs);
  }
  writer.Add(static_cast<uint8_t>(image.losses.has_value()));
  if (image.losses.has_value()) AddLedger(writer, *image.losses);
  writer.Add(static_cast<uint64_t>(image.pages.size()));
  for (const HostImage::Page& page : image.pages) {
    writer.AddBytes(page.keyspace.view());
    writer.AddBytes(page.key.view());
    writer.AddBytes(page.parent.view());
    writer.Add(page.generation);
    writer.Add(static_cast<uint8_t>(page.was_hit));
    writer.AddTime(page.added);
    writer.AddTime(page.used);
    writer.AddTime(page.pinned_until);
    writer.Add(static_cast<uint32_t>(page.fragments.size()));
    for (const HostImage::Fragment& fragment : page.fragments) AddFragment(writer, fragment);
  }
  std::string& out = writer.out();
  StoreLittle(reinterpret_cast<std::byte*>(out.data()) + kLengthOffset,
              static_cast<uint64_t>(out.size() + kSumBytes));
  writer.Add(Crc32c(std::as_bytes(std::span(out))));
  return std::move(out);
}

absl::StatusOr<HostImage> DecodeHostImage(std::span<const std::byte> bytes) {
  CRUMB_ASSIGN_OR_RETURN(const auto content, CheckedContent(bytes));
  const auto version = LoadLittle<uint16_t>(bytes.data() + kVersionOffset);
  Reader reader(content);
  HostImage image;
  image.slab_bytes = reader.Take<uint64_t>();
  image.slabs = reader.Take<uint32_t>();
  if (image.slabs > kSlabsMax) return Damaged("too many slabs");
  CRUMB_RETURN_IF_ERROR(TakeLists(reader, version, &image));
  CRUMB_RETURN_IF_ERROR(TakePages(reader, &image));
  if (!reader.good() || !reader.at_end()) return Damaged("its parts do not add up");
  return image;
}

}  // namespace crumb::storage
