// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/resp_client.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "bench/child_process.h"
#include "tests/bench/scripted_server.h"

namespace crumb::bench {
namespace {

// A server of SET and GET by the protocol's documentation, implemented independently of the client.
class TinyRedis {
 public:
  std::string Take(const std::string& piece) {
    pending_ += piece;
    std::string replies;
    for (std::vector<std::string> words; Parse(&words);) {
      if (words[0] == "PING") replies += "+PONG\r\n";
      if (words[0] == "SET") {
        values_[words[1]] = words[2];
        replies += "+OK\r\n";
      }
      if (words[0] == "GET") {
        const auto value = values_.find(words[1]);
        replies += value == values_.end() ? "$-1\r\n"
                                          : "$" + std::to_string(value->second.size()) + "\r\n" +
                                                value->second + "\r\n";
      }
    }
    return replies;
  }

 private:
  // Removes one whole request from the front.
  bool Parse(std::vector<std::string>* words) {
    words->clear();
    size_t at = pending_.find("\r\n");
    if (at == std::string::npos) return false;
    const int count = std::stoi(pending_.substr(1));
    at += 2;
    for (int i = 0; i < count; ++i) {
      const size_t line_end = pending_.find("\r\n", at);
      if (line_end == std::string::npos) return false;
      const size_t size = std::stoul(pending_.substr(at + 1));
      if (pending_.size() < line_end + 2 + size + 2) return false;
      words->push_back(pending_.substr(line_end + 2, size));
      at = line_end + 2 + size + 2;
    }
    pending_.erase(0, at);
    return true;
  }

  std::string pending_;
  std::map<std::string, std::string> values_;
};

std::unique_ptr<RespClient> ConnectTo(const ScriptedServer& server) {
  auto client = RespClient::Connect("127.0.0.1", server.port());
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

TEST(RespClientTest, ValuesOfAnySizeComeBackUnchanged) {
  TinyRedis redis;
  ScriptedServer server([&](const std::string& piece, bool*) { return redis.Take(piece); });
  const auto client = ConnectTo(server);
  ASSERT_TRUE(client->Ping().ok());
  constexpr uint32_t kSeed = 17;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937 random(kSeed);
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{65'535}, size_t{65'536}, size_t{3} << 20}) {
    std::vector<std::byte> value(size), back(size + 7);
    for (std::byte& byte : value) byte = static_cast<std::byte>(random());
    ASSERT_TRUE(client->Set("key", value).ok());
    const auto got = client->Get("key", back);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(*got, size);
    EXPECT_TRUE(std::equal(value.begin(), value.end(), back.begin()));
  }
  EXPECT_EQ(client->Get("absent", {}).status().code(), absl::StatusCode::kNotFound);
}

TEST(RespClientTest, AValueLargerThanTheRoomIsRefused) {
  TinyRedis redis;
  ScriptedServer server([&](const std::string& piece, bool*) { return redis.Take(piece); });
  const auto client = ConnectTo(server);
  const std::vector<std::byte> value(100);
  ASSERT_TRUE(client->Set("key", value).ok());
  std::vector<std::byte> room(99);
  EXPECT_EQ(client->Get("key", room).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(RespClientTest, TheServersErrorIsPassedOn) {
  ScriptedServer server([](const std::string&, bool*) { return "-OOM no memory\r\n"; });
  const auto client = ConnectTo(server);
  const absl::Status status = client->Set("key", {});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "OOM no memory");
}

class HostileReplyTest : public testing::TestWithParam<std::string> {};

TEST_P(HostileReplyTest, EndsInAnError) {
  ScriptedServer server([](const std::string&, bool* close) {
    *close = true;
    return GetParam();
  });
  const auto client = ConnectTo(server);
  std::vector<std::byte> room(16);
  EXPECT_FALSE(client->Get("key", room).ok());
}

INSTANTIATE_TEST_SUITE_P(All, HostileReplyTest,
                         testing::Values("", "\r\n", "$\r\n", "$x\r\n", "$5\r\nab", "$2\r\nabXY",
                                         "$-2\r\n", "$99999999999999999999\r\n", "+OK\r\n",
                                         ":5\r\n", "$2\r", std::string(10'000, 'a')));

TEST(RespClientTest, NoServerThereIsUnavailable) {
  const auto port = FreeLoopbackPort();
  ASSERT_TRUE(port.ok());
  EXPECT_EQ(RespClient::Connect("127.0.0.1", *port).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace crumb::bench
