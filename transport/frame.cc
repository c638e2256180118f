// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/frame.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "common/crc32c.h"
#include "common/little_endian.h"

namespace crumb::transport {
namespace {

constexpr uint32_t kMagic = 0x46544243;  // "CBTF"
constexpr size_t kHeaderSumOffset = kFrameHeaderBytes - 4;
constexpr size_t kHelloBytes = 16;
constexpr size_t kFetchFixedBytes = 72;
constexpr size_t kFetchPageBytes = 48;
constexpr size_t kResponseFixedBytes = 8;
constexpr size_t kResponsePageBytes = 4;
constexpr size_t kResponseFragmentBytes = 4;

static_assert(kFetchFixedBytes + kFetchPagesMax * kFetchPageBytes <= kControlBodyMax);
static_assert(kResponseFixedBytes + kResponsePageBytes + kResponseFragmentBytes +
                  FragmentHeaderBytes(kFragmentTilesMax) <=
              kControlBodyMax);

absl::Status Malformed(const char* what) {
  return absl::DataLossError(std::string("malformed frame: ") + what);
}

template <typename Id>
void StoreId(std::byte* to, const Id& bytes) {
  std::memcpy(to, bytes.data(), bytes.size());
}

template <typename Id>
void LoadId(const std::byte* from, Id& bytes) {
  std::memcpy(bytes.data(), from, bytes.size());
}

void StoreRange(std::byte* to, const TileRange& range) {
  StoreLittle(to, range.layers.begin);
  StoreLittle(to + 2, range.layers.end);
  StoreLittle(to + 4, range.heads.begin);
  StoreLittle(to + 6, range.heads.end);
}

TileRange LoadRange(const std::byte* from) {
  return {{LoadLittle<uint16_t>(from), LoadLittle<uint16_t>(from + 2)},
          {LoadLittle<uint16_t>(from + 4), LoadLittle<uint16_t>(from + 6)}};
}

// Returns the next fragment header of a response and advances `at`.
absl::StatusOr<std::span<const std::byte>> NextHeader(std::span<const std::byte> body, size_t& at) {
  if (body.size() - at < kResponseFragmentBytes) return Malformed("response ends early");
  const size_t size = LoadLittle<uint32_t>(body.data() + at);
  at += kResponseFragmentBytes;
  if (size > body.size() - at) return Malformed("response ends early");
  const auto header = body.subspan(at, size);
  at += size;
  return header;
}

}  // namespace

FrameHeaderBytes EncodeFrameHeader(const FrameHeader& header) {
  FrameHeaderBytes bytes{};
  std::byte* to = bytes.data();
  StoreLittle(to, kMagic);
  StoreLittle(to + 4, header.version);
  StoreLittle(to + 6, static_cast<uint8_t>(header.type));
  StoreLittle(to + 8, header.connection);
  StoreLittle(to + 16, header.fetch);
  StoreLittle(to + 24, header.body_sum);
  StoreLittle(to + 28, header.page);
  StoreLittle(to + 32, header.fragment);
  StoreLittle(to + 36, header.first);
  StoreLittle(to + 40, header.count);
  StoreLittle(to + kHeaderSumOffset, Crc32c(std::span(bytes).first(kHeaderSumOffset)));
  return bytes;
}

absl::StatusOr<FrameHeader> DecodeFrameHeader(std::span<const std::byte> bytes) {
  if (bytes.size() != kFrameHeaderBytes) return Malformed("header of another size");
  const std::byte* from = bytes.data();
  if (LoadLittle<uint32_t>(from) != kMagic) return Malformed("wrong magic");
  if (LoadLittle<uint32_t>(from + kHeaderSumOffset) != Crc32c(bytes.first(kHeaderSumOffset))) {
    return Malformed("header sum differs");
  }
  FrameHeader header;
  header.version = LoadLittle<uint16_t>(from + 4);
  header.type = static_cast<FrameType>(LoadLittle<uint8_t>(from + 6));
  if (header.type < FrameType::kHello || header.type > FrameType::kCancel) {
    return Malformed("unknown type");
  }
  header.connection = LoadLittle<uint64_t>(from + 8);
  header.fetch = LoadLittle<uint64_t>(from + 16);
  header.body_sum = LoadLittle<uint32_t>(from + 24);
  header.page = LoadLittle<uint32_t>(from + 28);
  header.fragment = LoadLittle<uint16_t>(from + 32);
  header.first = LoadLittle<uint32_t>(from + 36);
  header.count = LoadLittle<uint32_t>(from + 40);
  return header;
}

absl::Status CheckBody(const FrameHeader& header, std::span<const std::byte> body) {
  if (body.size() > kControlBodyMax) return Malformed("body too long");
  if (Crc32c(body) != header.body_sum) return Malformed("body sum differs");
  return absl::OkStatus();
}

std::vector<std::byte> EncodeHello(const Hello& hello) {
  std::vector<std::byte> body(kHelloBytes);
  StoreLittle(body.data(), hello.version_min);
  StoreLittle(body.data() + 2, hello.version_max);
  StoreLittle(body.data() + 8, hello.connection);
  return body;
}

absl::StatusOr<Hello> DecodeHello(std::span<const std::byte> body) {
  // Longer is a later version's.
  if (body.size() < kHelloBytes) return Malformed("hello too short");
  return Hello{LoadLittle<uint16_t>(body.data()), LoadLittle<uint16_t>(body.data() + 2),
               LoadLittle<uint64_t>(body.data() + 8)};
}

absl::StatusOr<uint16_t> CommonVersion(const Hello& ours, const Hello& theirs) {
  const uint16_t version = std::min(ours.version_max, theirs.version_max);
  if (version >= std::max(ours.version_min, theirs.version_min)) return version;
  return absl::FailedPreconditionError(
      "peer supports versions " + std::to_string(theirs.version_min) + " to " +
      std::to_string(theirs.version_max) + " of the transport, this node " +
      std::to_string(ours.version_min) + " to " + std::to_string(ours.version_max) +
      "; upgrade the older one");
}

std::vector<std::byte> EncodeFetch(const FetchBody& fetch) {
  std::vector<std::byte> body(kFetchFixedBytes + fetch.pages.size() * kFetchPageBytes);
  std::byte* to = body.data();
  StoreId(to, fetch.session);
  StoreId(to + 16, fetch.keyspace.bytes);
  StoreLittle(to + 48, fetch.generation);
  StoreLittle(to + 56, fetch.time_left_us);
  StoreLittle(to + 64, static_cast<uint32_t>(fetch.pages.size()));
  to += kFetchFixedBytes;
  for (const FetchBody::Page& page : fetch.pages) {
    StoreId(to, page.key.bytes);
    StoreRange(to + 32, page.range);
    StoreLittle(to + 40, page.tile_bytes);
    to += kFetchPageBytes;
  }
  return body;
}

absl::StatusOr<FetchBody> DecodeFetch(std::span<const std::byte> body) {
  if (body.size() < kFetchFixedBytes) return Malformed("fetch too short");
  const std::byte* from = body.data();
  FetchBody fetch;
  LoadId(from, fetch.session);
  LoadId(from + 16, fetch.keyspace.bytes);
  fetch.generation = LoadLittle<uint64_t>(from + 48);
  fetch.time_left_us = LoadLittle<uint64_t>(from + 56);
  const size_t pages = LoadLittle<uint32_t>(from + 64);
  if (pages == 0 || pages > kFetchPagesMax ||
      body.size() != kFetchFixedBytes + pages * kFetchPageBytes) {
    return Malformed("fetch of another size than its page count");
  }
  from += kFetchFixedBytes;
  fetch.pages.resize(pages);
  for (FetchBody::Page& page : fetch.pages) {
    LoadId(from, page.key.bytes);
    page.range = LoadRange(from + 32);
    page.tile_bytes = LoadLittle<uint32_t>(from + 40);
    if (!IsTileRange(page.range)) return Malformed("fetch of no tiles, or too many");
    from += kFetchPageBytes;
  }
  return fetch;
}

size_t ResponsePageBytes(const ResponseBody::Page& page) {
  size_t bytes = kResponsePageBytes;
  for (const auto header : page.headers) bytes += kResponseFragmentBytes + header.size();
  return bytes;
}

std::vector<std::byte> EncodeResponse(const ResponseBody& response) {
  size_t size = kResponseFixedBytes;
  for (const ResponseBody::Page& page : response.pages) size += ResponsePageBytes(page);
  std::vector<std::byte> body(size);
  std::byte* to = body.data();
  StoreLittle(to, response.first_page);
  StoreLittle(to + 4, static_cast<uint32_t>(response.pages.size()));
  to += kResponseFixedBytes;
  for (const ResponseBody::Page& page : response.pages) {
    StoreLittle(to, static_cast<uint8_t>(page.status));
    StoreLittle(to + 2, static_cast<uint16_t>(page.headers.size()));
    to += kResponsePageBytes;
    for (const auto header : page.headers) {
      StoreLittle(to, static_cast<uint32_t>(header.size()));
      std::memcpy(to + kResponseFragmentBytes, header.data(), header.size());
      to += kResponseFragmentBytes + header.size();
    }
  }
  return body;
}

absl::StatusOr<ResponseBody> DecodeResponse(std::span<const std::byte> body) {
  if (body.size() < kResponseFixedBytes) return Malformed("response too short");
  ResponseBody response;
  response.first_page = LoadLittle<uint32_t>(body.data());
  const size_t pages = LoadLittle<uint32_t>(body.data() + 4);
  if (pages > kFetchPagesMax) return Malformed("response of too many pages");
  size_t at = kResponseFixedBytes;
  for (size_t i = 0; i < pages; ++i) {
    if (body.size() - at < kResponsePageBytes) return Malformed("response ends early");
    ResponseBody::Page page;
    page.status = static_cast<PageStatus>(LoadLittle<uint8_t>(body.data() + at));
    const size_t fragments = LoadLittle<uint16_t>(body.data() + at + 2);
    at += kResponsePageBytes;
    if (static_cast<int>(page.status) >= kPageStatusCount ||
        (page.status == PageStatus::kHit) != (fragments > 0)) {
      return Malformed("response of an unknown status");
    }
    for (size_t f = 0; f < fragments; ++f) {
      absl::StatusOr<std::span<const std::byte>> header = NextHeader(body, at);
      if (!header.ok()) return header.status();
      page.headers.push_back(*header);
    }
    response.pages.push_back(std::move(page));
  }
  if (at != body.size()) return Malformed("bytes behind the response");
  return response;
}

}  // namespace crumb::transport
