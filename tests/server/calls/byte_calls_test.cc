// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Put and Get below gRPC.
#include "gmock/gmock.h"
#include "server/calls/get_reader.h"
#include "server/calls/put_assembler.h"
#include "tests/server/call_fixture.h"

namespace crumb::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Limits SmallChunks() {
  Limits limits;
  limits.chunk_bytes = ByteSize{4096};
  limits.put_fragments_max = 4;
  return limits;
}

class ByteCallsTest : public CallFixture {
 protected:
  ByteCallsTest() : CallFixture(SmallChunks()) {}

  v1::PutRequest Header(const std::vector<std::byte>& fragment) const {
    v1::PutRequest request;
    request.set_keyspace(std::string(keyspace_->id.view()));
    request.set_header(fragment.data() + tiles_bytes(), fragment.size() - tiles_bytes());
    return request;
  }
  v1::PutRequest Tiles(const std::vector<std::byte>& fragment, size_t from, size_t to) const {
    v1::PutRequest request;
    request.set_tiles(fragment.data() + from, to - from);
    return request;
  }
  // The messages of one Get, tiles copied in; the error when there is one.
  absl::StatusOr<std::vector<v1::GetResponse>> Read(const std::string& keys) {
    v1::GetRequest request;
    request.set_keyspace(std::string(keyspace_->id.view()));
    request.set_keys(keys);
    absl::StatusOr<std::unique_ptr<GetReader>> reader = absl::UnknownError("no response");
    GetReader::Open(
        context_, request, TimePoint::max(),
        [&](absl::StatusOr<std::unique_ptr<GetReader>> opened) { reader = std::move(opened); });
    if (!reader.ok()) return reader.status();
    std::vector<v1::GetResponse> messages;
    GetReader::Part part;
    while ((*reader)->Next(part)) {
      EXPECT_LE(part.tiles.size(), 4096u);
      part.message.set_tiles(part.tiles.data(), part.tiles.size());
      messages.push_back(part.message);
    }
    return messages;
  }
};

TEST_F(ByteCallsTest, WhatIsPutInPiecesIsGotInPieces) {
  PutAssembler put(context_);
  const std::vector<std::byte> fragment = Fragment(Key(1), 7);
  ASSERT_FALSE(*put.Add(Header(fragment)));
  for (size_t at = 0; at < tiles_bytes(); at += 1000) {
    const size_t end = std::min<size_t>(at + 1000, tiles_bytes());
    ASSERT_EQ(*put.Add(Tiles(fragment, at, end)), end == tiles_bytes());
  }
  put.Commit();
  EXPECT_THAT(put.Finish().outcomes(), ElementsAre(v1::COMMIT_OUTCOME_STORED));
  const auto messages = Read(Keys(1, 2)).value();
  ASSERT_GT(messages.size(), 2u);
  std::string bytes;
  for (const v1::GetResponse& message : messages) bytes += message.tiles();
  bytes += messages.front().header();
  EXPECT_EQ(bytes, std::string(reinterpret_cast<const char*>(fragment.data()), fragment.size()));
  EXPECT_EQ(messages.back().miss_reason(), v1::MISS_REASON_ABSENT);
  EXPECT_EQ(messages.back().page(), 1u);
  EXPECT_EQ(store_.Stats().leases, 0u);
  EXPECT_EQ(metrics_.grpc_bytes_in.value(), tiles_bytes());
  EXPECT_EQ(metrics_.grpc_bytes_out.value(), tiles_bytes());
}

TEST_F(ByteCallsTest, OneWrongFragmentDoesNotSpoilTheOthers) {
  PutAssembler put(context_);
  const std::vector<std::byte> good = Fragment(Key(1));
  v1::PutRequest garbage = Header(good);
  garbage.set_header("garbage");
  garbage.set_tiles("tiles of it");
  EXPECT_FALSE(*put.Add(garbage));
  EXPECT_FALSE(*put.Add(Tiles(good, 0, 500)));  // still of the refused one
  EXPECT_FALSE(*put.Add(Header(good)));
  EXPECT_FALSE(*put.Add(Tiles(good, 0, 500)));  // incomplete
  EXPECT_FALSE(*put.Add(Header(good)));
  v1::PutRequest long_tiles;
  long_tiles.set_tiles(std::string(tiles_bytes() + 1, 'x'));
  EXPECT_FALSE(*put.Add(long_tiles));
  EXPECT_FALSE(*put.Add(Header(good)));
  EXPECT_TRUE(*put.Add(Tiles(good, 0, tiles_bytes())));
  put.Commit();
  const v1::PutResponse response = put.Finish();
  EXPECT_THAT(response.outcomes(),
              ElementsAre(v1::COMMIT_OUTCOME_REFUSED, v1::COMMIT_OUTCOME_REFUSED,
                          v1::COMMIT_OUTCOME_REFUSED, v1::COMMIT_OUTCOME_STORED));
  EXPECT_THAT(response.first_error(), HasSubstr("DATA_LOSS"));
}

TEST_F(ByteCallsTest, AStreamThatEndsEarlyIsRefused) {
  PutAssembler put(context_);
  const std::vector<std::byte> fragment = Fragment(Key(1));
  ASSERT_TRUE(put.Add(Header(fragment)).ok());
  ASSERT_TRUE(put.Add(Tiles(fragment, 0, 100)).ok());
  const v1::PutResponse response = put.Finish();
  EXPECT_THAT(response.outcomes(), ElementsAre(v1::COMMIT_OUTCOME_REFUSED));
  EXPECT_THAT(response.first_error(), HasSubstr("after 100 of"));
}

TEST_F(ByteCallsTest, ErrorsThatEndAPut) {
  PutAssembler none(context_);
  EXPECT_EQ(none.Add(v1::PutRequest()).status().code(), absl::StatusCode::kInvalidArgument);
  PutAssembler put(context_);
  const std::vector<std::byte> fragment = Fragment(Key(1));
  ASSERT_TRUE(put.Add(Header(fragment)).ok());
  v1::PutRequest other = Header(fragment);
  other.set_keyspace(std::string(32, 'o'));
  EXPECT_EQ(put.Add(other).status().code(), absl::StatusCode::kInvalidArgument);
  PutAssembler many(context_);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(many.Add(Header(fragment)).ok());
  EXPECT_THAT(many.Add(Header(fragment)).status().ToString(), HasSubstr("put_fragments_max"));
}

TEST_F(ByteCallsTest, GetChecksItsInput) {
  EXPECT_EQ(Read("x").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Read(std::string(32 * 20'000, 'x')).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto nothing = Read(Keys(5, 1)).value();
  ASSERT_EQ(nothing.size(), 1u);
  EXPECT_EQ(nothing[0].miss_reason(), v1::MISS_REASON_ABSENT);
}

}  // namespace
}  // namespace crumb::server
