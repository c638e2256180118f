// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A takeover by a successor: the image, and memory with the pages that the image names. An
// image that decodes is taken over by a store, which then serves, evicts and moves its pages.
#include <fcntl.h>

#include "common/crc32c.h"
#include "common/fragment_header.h"
#include "common/little_endian.h"
#include "common/mapping.h"
#include "storage/host_image.h"
#include "storage/tiered_store.h"
#include "tests/common/fake_clock.h"
#include "tests/fuzz/fuzz_target.h"

namespace crumb::fuzz {
namespace {

using namespace storage;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kMemoryMax = 4 * kMiB;
constexpr size_t kPagesMax = 64;

// Length and sum as they should be: an image with others ends at the first check.
std::string Corrected(std::string bytes) {
  constexpr size_t kLengthOffset = 16;  // docs/formats/host-image.md
  if (bytes.size() < 28) return bytes;
  auto* data = reinterpret_cast<std::byte*>(bytes.data());
  StoreLittle(data + kLengthOffset, static_cast<uint64_t>(bytes.size()));
  const size_t content = bytes.size() - 4;
  StoreLittle(data + content, Crc32c(BytesOf(bytes).first(content)));
  return bytes;
}

// Puts a fragment with the header that the image says into its slot, where there can be one.
void Fill(const HostImage::Page& page, const HostImage::Fragment& fragment,
          std::span<std::byte> slab) {
  const auto tiles = static_cast<uint32_t>(fragment.range.tiles());
  const uint32_t tile_bytes = fragment.tiles_bytes / tiles;
  if (tile_bytes * tiles != fragment.tiles_bytes || tile_bytes > kTileBytesMax ||
      fragment.bytes != FragmentBytes(fragment.range.tiles(), tile_bytes)) {
    return;
  }
  FragmentHeader header;
  header.keyspace = page.keyspace;
  header.key = page.key;
  header.parent = page.parent;
  header.generation = page.generation;
  header.tile_bytes = tile_bytes;
  header.range = fragment.range;
  header.tile_sums.assign(tiles, 0);
  EncodeFragmentHeader(header, slab.subspan(fragment.slot.offset + fragment.tiles_bytes,
                                            FragmentHeaderBytes(fragment.range.tiles())));
}

std::unique_ptr<HandedOverMemory> MemoryOf(const HostImage& image) {
  auto memory = std::make_unique<HandedOverMemory>();
  memory->image = image;
  for (uint32_t slab = 0; slab < image.slabs; ++slab) {
    UniqueFd fd = CreateMemfd("fuzz", image.slab_bytes).value();
    {
      const Mapping mapping =
          Mapping::Of(fd.get(), image.slab_bytes, Mapping::Access::kReadWrite).value();
      for (const HostImage::Page& page : image.pages) {
        for (const HostImage::Fragment& fragment : page.fragments) {
          if (fragment.slot.region == slab) Fill(page, fragment, mapping.bytes());
        }
      }
    }
    Check(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE) == 0);
    memory->slabs.push_back(std::move(fd));
  }
  return memory;
}

void TakeOver(const HostImage& image) {
  StoreOptions options;
  options.host.bytes_max = ByteSize{kMemoryMax};
  options.host.slab_bytes = ByteSize{kMiB};
  FakeClock clock;
  StoreStart start;
  start.host_bytes = 0;
  start.handed_over = MemoryOf(image);
  auto opened = TieredStore::Open(options, clock, {}, std::move(start));
  Check(opened.ok());
  TieredStore& store = **opened;
  Check(store.Stats().host.pages <= image.pages.size());
  for (const HostImage::Page& page : image.pages) {
    AcquireRequest request;
    request.keyspace = page.keyspace;
    request.generation = page.generation;
    request.keys = {page.key};
    request.range = page.fragments[0].range;
    request.deadline = TimePoint::min();
    store.Acquire(request, [&](absl::StatusOr<AcquireResult> result) {
      if (!result.ok()) return;
      for (const FragmentRef& fragment : result->fragments) {
        Check(store.Bytes(fragment).size() >= fragment.tiles_bytes);
      }
      if (result->lease != 0) Check(store.Release(result->lease));
    });
  }
  for (int round = 0; round < 4; ++round) store.GrowHost(kMemoryMax).status().IgnoreError();
  clock.Advance(std::chrono::seconds(1));
  for (const HostImage::Page& page : image.pages) {
    store.Delete(page.keyspace, std::span(&page.key, 1)).IgnoreError();
  }
  Check(store.Stats().host.pages == 0);
  Check(store.Stop(Duration::zero()).ok());
}

void Run(std::span<const std::byte> input) {
  const auto image = DecodeHostImage(BytesOf(Corrected(TextOf(input))));
  if (!image.ok()) return;
  const auto again = DecodeHostImage(BytesOf(EncodeHostImage(*image)));
  Check(again.ok() && *again == *image);
  const bool small = image->slabs > 0 && image->slab_bytes > 0 && image->slab_bytes % 4096 == 0 &&
                     image->slab_bytes <= kMemoryMax / image->slabs;
  if (small && image->pages.size() <= kPagesMax) TakeOver(*image);
}

std::vector<std::string> Seeds() {
  HostImage image;
  image.slab_bytes = kMiB;
  image.slabs = 2;
  image.generations = {{KeyspaceId(), 1}};
  image.records = {{"node-id", "abc"}};
  for (uint8_t i = 1; i <= 3; ++i) {
    HostImage::Page page;
    page.key.bytes.fill(i);
    page.generation = 1;
    page.added = page.used = TimePoint(std::chrono::nanoseconds(1000 + i));
    for (uint16_t part = 0; part <= i % 2; ++part) {
      HostImage::Fragment fragment;
      fragment.range = {{part, static_cast<uint16_t>(part + 1)}, {0, 2}};
      fragment.tiles_bytes = 2 * 4608;
      fragment.bytes = static_cast<uint32_t>(FragmentBytes(2, 4608));
      fragment.logical_tile_bytes = 32768;
      fragment.slot = {
          .region = i % 2u, .bytes = 9728, .offset = (i * 2u + part) * 9728u, .chunk_order = 0};
      page.fragments.push_back(fragment);
    }
    image.pages.push_back(page);
  }
  HostImage of_tenants = image;
  of_tenants.tenants = {"one", ""};
  return {EncodeHostImage({}), EncodeHostImage(image), EncodeHostImage(of_tenants)};
}

}  // namespace

const FuzzTarget kHostImageTarget = {"host_image", Run, Seeds};

}  // namespace crumb::fuzz
