// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/fragment_stream.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "client/rpc/wire.h"
#include "common/crc32c.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb::client {
namespace {

using testing::HasSubstr;

// Fragments of 3 MiB of tiles take two messages of a Put each.
constexpr uint32_t kTileBytes = 512 << 10;

FragmentBytes Fragment(uint8_t key) {
  FragmentBytes fragment;
  fragment.header.keyspace.bytes.fill(0xab);
  fragment.header.key.bytes.fill(key);
  fragment.header.generation = 1;
  fragment.header.tile_bytes = kTileBytes;
  fragment.header.range = {{0, 3}, {0, 2}};
  std::mt19937 random(key);
  fragment.tiles.resize(size_t{6} * kTileBytes);
  std::generate(fragment.tiles.begin(), fragment.tiles.end(),
                [&] { return static_cast<char>(random()); });
  const auto bytes = std::as_bytes(std::span(fragment.tiles));
  for (size_t at = 0; at < bytes.size(); at += kTileBytes) {
    fragment.header.tile_sums.push_back(Crc32c(bytes.subspan(at, kTileBytes)));
  }
  return fragment;
}

const std::vector<FragmentBytes>& Fragments() {
  static const std::vector<FragmentBytes> fragments = {Fragment(1), Fragment(2)};
  return fragments;
}

class FragmentStreamTest : public testing::Test {
 protected:
  // Returns the messages of a Get that has the fragments of the keys 1 and 2, cut as in a Put.
  std::vector<v1::GetResponse> Messages() {
    FragmentSplitter splitter(fragments_[0].header.keyspace, fragments_);
    std::vector<v1::GetResponse> messages;
    v1::PutRequest part;
    for (uint32_t page = 0; splitter.Next(&part);) {
      v1::GetResponse& message = messages.emplace_back();
      message.set_page(page);
      message.set_tier(v1::TIER_HOST);
      message.set_header(part.header());
      message.set_tiles(part.tiles());
      bytes_ += part.tiles().size();
      page = static_cast<uint32_t>(bytes_ / fragments_[0].tiles.size());
      part.clear_header();
    }
    return messages;
  }

  // Returns the first error of Add, or the result of End.
  absl::StatusOr<MissReason> Assemble(std::vector<v1::GetResponse> messages) {
    FragmentAssembler assembler(fragments_[0].header.keyspace, keys_, receiver_);
    for (v1::GetResponse& message : messages) {
      if (absl::Status added = assembler.Add(message); !added.ok()) return added;
    }
    return assembler.End();
  }

  const std::vector<FragmentBytes>& fragments_ = Fragments();
  std::vector<PageKey> keys_ = {fragments_[0].header.key, fragments_[1].header.key};
  std::vector<FragmentBytes> received_;
  FragmentReceiver receiver_ = [this](FragmentBytes fragment) {
    received_.push_back(std::move(fragment));
    return absl::OkStatus();
  };
  size_t bytes_ = 0;
};

TEST_F(FragmentStreamTest, SplitFragmentsAreReassembled) {
  const std::vector<v1::GetResponse> messages = Messages();
  EXPECT_EQ(messages.size(), 4);  // a message has at most 2 MiB of tiles
  const auto end = Assemble(messages);
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(*end, MissReason::kNone);
  ASSERT_EQ(received_.size(), 2);
  for (int page = 0; page < 2; ++page) {
    EXPECT_EQ(received_[page].page, page);
    EXPECT_EQ(received_[page].tier, Tier::kHost);
    EXPECT_EQ(received_[page].header.key, keys_[page]);
    EXPECT_TRUE(received_[page].tiles == fragments_[page].tiles);
  }
}

TEST_F(FragmentStreamTest, OnlyTheFirstMessageOfAPutNamesTheKeyspace) {
  FragmentSplitter splitter(fragments_[0].header.keyspace, fragments_);
  v1::PutRequest message;
  ASSERT_TRUE(splitter.Next(&message));
  EXPECT_EQ(message.keyspace(), ToBytes(fragments_[0].header.keyspace));
  message.Clear();
  ASSERT_TRUE(splitter.Next(&message));
  EXPECT_TRUE(message.keyspace().empty());
  EXPECT_TRUE(message.header().empty());
}

TEST_F(FragmentStreamTest, TheReasonOfAMissIsReturned) {
  v1::GetResponse miss;
  miss.set_miss_reason(v1::MISS_REASON_DEADLINE);
  EXPECT_EQ(Assemble({miss}).value(), MissReason::kDeadline);
}

TEST_F(FragmentStreamTest, DamagedTilesAreNotDelivered) {
  std::vector<v1::GetResponse> messages = Messages();
  (*messages[1].mutable_tiles())[1000] ^= 1;
  EXPECT_EQ(Assemble(messages).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(received_.empty());
}

TEST_F(FragmentStreamTest, AStreamThatEndsInsideAFragmentIsAnError) {
  std::vector<v1::GetResponse> messages = Messages();
  messages.pop_back();
  EXPECT_EQ(Assemble(messages).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(received_.size(), 1);
}

TEST_F(FragmentStreamTest, MessagesThatContradictTheHeaderAreErrors) {
  const std::vector<v1::GetResponse> messages = Messages();
  std::vector<v1::GetResponse> early = {messages[0], messages[2]};
  EXPECT_THAT(std::string(Assemble(early).status().message()), HasSubstr("inside another"));
  std::vector<v1::GetResponse> headless = {messages[1]};
  EXPECT_THAT(std::string(Assemble(headless).status().message()), HasSubstr("more bytes"));
  std::vector<v1::GetResponse> longer = {messages[0], messages[1]};
  longer[1].mutable_tiles()->push_back('x');
  EXPECT_THAT(std::string(Assemble(longer).status().message()), HasSubstr("more bytes"));
  EXPECT_TRUE(received_.empty());
}

TEST_F(FragmentStreamTest, PagesThatWereNotRequestedAreErrors) {
  std::vector<v1::GetResponse> messages = Messages();
  messages[0].set_page(2);
  EXPECT_THAT(std::string(Assemble(messages).status().message()), HasSubstr("not requested"));
  messages[0].set_page(1);  // its header has the key of page 0
  EXPECT_THAT(std::string(Assemble(messages).status().message()), HasSubstr("another page"));
  messages[0].mutable_header()->resize(8);
  EXPECT_FALSE(Assemble(messages).ok());
  EXPECT_TRUE(received_.empty());
}

TEST_F(FragmentStreamTest, TheErrorOfTheReceiverEndsTheGet) {
  receiver_ = [](const FragmentBytes&) { return absl::AbortedError("enough"); };
  EXPECT_EQ(Assemble(Messages()).status(), absl::AbortedError("enough"));
}

}  // namespace
}  // namespace crumb::client
