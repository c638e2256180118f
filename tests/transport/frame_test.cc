// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/frame.h"

#include <gtest/gtest.h>

#include <random>

#include "common/crc32c.h"
#include "common/hex.h"
#include "tests/transport/sample_source.h"

namespace crumb::transport {
namespace {

std::string Hex(std::span<const std::byte> bytes) {
  return HexEncode({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}

FrameHeader SampleHeader() {
  FrameHeader header;
  header.type = FrameType::kData;
  header.connection = 0x1122334455667788;
  header.fetch = 9;
  header.page = 3;
  header.fragment = 2;
  header.first = 56;
  header.count = 55;
  return header;
}

FetchBody SampleFetch() {
  FetchBody fetch;
  fetch.session = kSampleSession;
  fetch.keyspace = SampleKeyspace();
  fetch.generation = 5;
  fetch.time_left_us = 250000;
  fetch.pages = {{SampleKey(1), {{0, 36}, {0, 8}}, 4608}, {SampleKey(2), {{4, 5}, {7, 8}}, 32768}};
  return fetch;
}

// These are the bytes of docs/formats/transport.md.
TEST(FrameTest, GoldenHeader) {
  const FrameHeaderBytes bytes = EncodeFrameHeader(SampleHeader());
  EXPECT_EQ(Hex(std::span(bytes).first(44)),
            "4342544601000400887766554433221109000000000000000000000003000000020000003800000037000"
            "000");
  EXPECT_EQ(Hex(std::span(bytes).subspan(44)), "a3e9b695");
}

TEST(FrameTest, GoldenHello) {
  EXPECT_EQ(Hex(EncodeHello({1, 3, 0x0807060504030201})), "01000300000000000102030405060708");
}

TEST(FrameTest, HeaderRoundTripAndEveryFlippedBitIsRefused) {
  const FrameHeaderBytes bytes = EncodeFrameHeader(SampleHeader());
  const auto decoded = DecodeFrameHeader(bytes);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(EncodeFrameHeader(*decoded), bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    FrameHeaderBytes flipped = bytes;
    flipped[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_EQ(DecodeFrameHeader(flipped).status().code(), absl::StatusCode::kDataLoss) << bit;
  }
  EXPECT_FALSE(DecodeFrameHeader(std::span(bytes).first(47)).ok());
  EXPECT_FALSE(DecodeFrameHeader({}).ok());
}

TEST(FrameTest, FetchRoundTripAndEveryTruncationIsRefused) {
  const std::vector<std::byte> body = EncodeFetch(SampleFetch());
  const auto decoded = DecodeFetch(body);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(EncodeFetch(*decoded), body);
  EXPECT_EQ(decoded->pages[1].range, SampleFetch().pages[1].range);
  for (size_t size = 0; size < body.size(); ++size) {
    EXPECT_FALSE(DecodeFetch(std::span(body).first(size)).ok()) << size;
  }
}

TEST(FrameTest, RefusesFetchesOfNoTiles) {
  FetchBody fetch = SampleFetch();
  fetch.pages[0].range.heads = {8, 8};
  EXPECT_FALSE(DecodeFetch(EncodeFetch(fetch)).ok());
  fetch.pages[0].range.heads = {8, 2};
  EXPECT_FALSE(DecodeFetch(EncodeFetch(fetch)).ok());
  fetch.pages[0].range = {{0, 65535}, {0, 65535}};
  EXPECT_FALSE(DecodeFetch(EncodeFetch(fetch)).ok());
  fetch.pages.clear();
  EXPECT_FALSE(DecodeFetch(EncodeFetch(fetch)).ok());
}

TEST(FrameTest, ResponseRoundTripAndEveryTruncationIsRefused) {
  const std::vector<std::byte> header(200, std::byte{7});
  ResponseBody response;
  response.first_page = 4;
  response.pages = {{PageStatus::kHit, {header, header}}, {PageStatus::kStale, {}}};
  const std::vector<std::byte> body = EncodeResponse(response);
  const auto decoded = DecodeResponse(body);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(EncodeResponse(*decoded), body);
  for (size_t size = 0; size < body.size(); ++size) {
    EXPECT_FALSE(DecodeResponse(std::span(body).first(size)).ok()) << size;
  }
  response.pages[1].status = static_cast<PageStatus>(kPageStatusCount);
  EXPECT_FALSE(DecodeResponse(EncodeResponse(response)).ok());
  response.pages[1] = {PageStatus::kHit, {}};
  EXPECT_FALSE(DecodeResponse(EncodeResponse(response)).ok());
  response.pages[1] = {PageStatus::kAbsent, {header}};
  EXPECT_FALSE(DecodeResponse(EncodeResponse(response)).ok());
}

TEST(FrameTest, DecodersTakeRandomBytes) {
  std::mt19937 random(20);
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::byte> bytes(random() % 300);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 4);
    (void)DecodeFetch(bytes);
    (void)DecodeResponse(bytes);
    (void)DecodeHello(bytes);
    EXPECT_FALSE(DecodeFrameHeader(bytes).ok());
  }
}

TEST(FrameTest, VersionsMeetInTheHighestCommonOne) {
  EXPECT_EQ(*CommonVersion({1, 3, 0}, {2, 5, 0}), 3);
  EXPECT_EQ(*CommonVersion({1, 5, 0}, {2, 2, 0}), 2);
  EXPECT_EQ(CommonVersion({1, 1, 0}, {2, 5, 0}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(CommonVersion({3, 4, 0}, {1, 2, 0}).ok());
}

// The values are part of the wire format and frozen.
TEST(FrameTest, ValuesAreFrozen) {
  EXPECT_EQ(static_cast<int>(FrameType::kHello), 1);
  EXPECT_EQ(static_cast<int>(FrameType::kFetch), 2);
  EXPECT_EQ(static_cast<int>(FrameType::kResponse), 3);
  EXPECT_EQ(static_cast<int>(FrameType::kData), 4);
  EXPECT_EQ(static_cast<int>(FrameType::kCancel), 5);
  const PageStatus in_order[] = {PageStatus::kHit,        PageStatus::kAbsent,
                                 PageStatus::kNotCovered, PageStatus::kStale,
                                 PageStatus::kRefused,    PageStatus::kBusy,
                                 PageStatus::kCorrupt,    PageStatus::kDeadline,
                                 PageStatus::kCancelled,  PageStatus::kUnavailable};
  for (int i = 0; i < kPageStatusCount; ++i) EXPECT_EQ(static_cast<int>(in_order[i]), i);
}

}  // namespace
}  // namespace crumb::transport
