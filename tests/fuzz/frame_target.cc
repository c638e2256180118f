// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Frames between crumbds: docs/formats/transport.md. The first byte says which one, and whether the
// header's sum is made right, as a peer that lies would.
#include "transport/frame.h"

#include <algorithm>

#include "common/crc32c.h"
#include "common/fragment_header.h"
#include "common/little_endian.h"
#include "tests/fuzz/fuzz_target.h"

namespace crumb::fuzz {
namespace {

using namespace transport;

enum class Kind : unsigned char { kHeader, kHeaderWithSum, kHello, kFetch, kResponse, kKinds };

std::string Seed(Kind kind, const std::string& bytes) {
  return std::string(1, static_cast<char>(kind)) + bytes;
}

void RunHeader(std::string bytes, bool right_sum) {
  constexpr size_t kSummed = kFrameHeaderBytes - 4;
  if (right_sum && bytes.size() >= kFrameHeaderBytes) {
    StoreLittle(reinterpret_cast<std::byte*>(bytes.data()) + kSummed,
                Crc32c(BytesOf(bytes).first(kSummed)));
  }
  const auto header = DecodeFrameHeader(BytesOf(bytes));
  if (!header.ok()) return;
  const FrameHeaderBytes again = EncodeFrameHeader(*header);
  const auto decoded = DecodeFrameHeader(again);
  Check(decoded.ok() && EncodeFrameHeader(*decoded) == again);
  CheckBody(*header, BytesOf(bytes)).IgnoreError();
}

void RunHello(std::span<const std::byte> body) {
  const auto hello = DecodeHello(body);
  if (!hello.ok()) return;
  Check(DecodeHello(EncodeHello(*hello)).ok());
  const auto version = CommonVersion({}, *hello);
  Check(!version.ok() || (*version >= kVersionMin && *version <= kVersionMax));
}

void RunFetch(std::span<const std::byte> body) {
  const auto fetch = DecodeFetch(body);
  if (!fetch.ok()) return;
  Check(fetch->pages.size() <= kFetchPagesMax);
  for (const FetchBody::Page& page : fetch->pages) {
    Check(page.range.layers.begin < page.range.layers.end);
    Check(page.range.heads.begin < page.range.heads.end);
    Check(page.range.tiles() <= kFragmentTilesMax);
  }
  const std::vector<std::byte> again = EncodeFetch(*fetch);
  const auto decoded = DecodeFetch(again);
  Check(decoded.ok() && EncodeFetch(*decoded) == again);
}

void RunResponse(std::span<const std::byte> body) {
  const auto response = DecodeResponse(body);
  if (!response.ok()) return;
  for (const ResponseBody::Page& page : response->pages) {
    for (const std::span<const std::byte> header : page.headers) {
      Check(header.data() >= body.data() &&
            header.data() + header.size() <= body.data() + body.size());
      DecodeFragmentHeader(header).status().IgnoreError();
    }
  }
  const std::vector<std::byte> again = EncodeResponse(*response);
  const auto decoded = DecodeResponse(again);
  Check(decoded.ok() && EncodeResponse(*decoded) == again);
}

void Run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const auto body = input.subspan(1);
  switch (
      static_cast<Kind>(static_cast<unsigned>(input[0]) % static_cast<unsigned>(Kind::kKinds))) {
    case Kind::kHeader:
      return RunHeader(TextOf(body), false);
    case Kind::kHeaderWithSum:
      return RunHeader(TextOf(body), true);
    case Kind::kHello:
      return RunHello(body);
    case Kind::kFetch:
      return RunFetch(body);
    default:
      return RunResponse(body);
  }
}

std::vector<std::string> Seeds() {
  PageKey key;
  key.bytes.fill(7);
  FrameHeader header;
  header.type = FrameType::kData;
  header.connection = 12;
  header.fetch = 9;
  header.count = 55;
  FetchBody fetch;
  fetch.generation = 5;
  fetch.time_left_us = 250000;
  fetch.pages = {{key, {{0, 36}, {0, 8}}, 4608}, {key, {{4, 5}, {7, 8}}, 32768}};
  FragmentHeader fragment;
  fragment.tile_bytes = 4608;
  fragment.key = key;
  fragment.range = {{0, 2}, {1, 3}};
  fragment.tile_sums = {1, 2, 3, 4};
  std::vector<std::byte> encoded(FragmentHeaderBytes(4));
  EncodeFragmentHeader(fragment, encoded);
  ResponseBody response;
  response.first_page = 3;
  response.pages.resize(2);
  response.pages[0].status = PageStatus::kHit;
  response.pages[0].headers = {encoded, encoded};
  return {Seed(Kind::kHeader, TextOf(EncodeFrameHeader(header))),
          Seed(Kind::kHeaderWithSum, TextOf(EncodeFrameHeader(header))),
          Seed(Kind::kHello, TextOf(EncodeHello({1, 3, 77}))),
          Seed(Kind::kFetch, TextOf(EncodeFetch(fetch))),
          Seed(Kind::kResponse, TextOf(EncodeResponse(response)))};
}

}  // namespace

const FuzzTarget kFrameTarget = {"frame", Run, Seeds};

}  // namespace crumb::fuzz
