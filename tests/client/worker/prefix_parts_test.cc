// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Tests of prefixes that are acquired in parts: requests and results together are those of one
// request for the whole prefix.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <string>

#include "crumb/worker.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

constexpr Duration kPatience = std::chrono::seconds(60);
constexpr int kRecent = 256;
using Requests = std::vector<MemoryClient::Request>;

WorkerOptions PartOptions(int part_pages) {
  WorkerOptions options = SmallWorkerOptions();
  options.watch_every = 0;
  options.verify_every = 1;
  options.part_pages = part_pages;
  options.prompt_key_cache_tokens = 0;
  return options;
}

// Stores a prompt's pages.
void Store(const SequenceModel& model, int tokens, MemoryClient& client) {
  const auto worker = Worker::Open(PartOptions(0), &client).value();
  const auto sequence = worker->Begin(model.prompt(tokens)).value();
  model.Pass(*sequence, tokens);
  ASSERT_TRUE(sequence->Finish().ok());
  ASSERT_TRUE(worker->WaitPublished(kPatience).ok());
}

// Returns the keys of all requests, which follow each other without gap, and the sum of their
// window tokens.
std::vector<PageKey> RequestedKeys(const Requests& requests, uint32_t* window_tokens) {
  std::vector<PageKey> keys;
  *window_tokens = 0;
  for (const MemoryClient::Request& request : requests) {
    EXPECT_EQ(request.first_page, keys.size());
    keys.insert(keys.end(), request.keys.begin(), request.keys.end());
    *window_tokens += request.window_tokens;
  }
  return keys;
}

TEST(PrefixPartsTest, PartsFindAndRequestTheSamePagesAsOneRequest) {
  const SequenceModel model(PartOptions(0), RandomTokens(2000, 5));
  MemoryClient client;
  Store(model, 1900, client);
  const std::vector<PageKey> stored =
      PageKeysOf(client.int2_keyspaces().front(), model.prompt(1900));
  std::mt19937 random(11);
  for (int round = 0; round < 40; ++round) {
    const int prompt = 100 + static_cast<int>(random() % 1800);
    // index of the missing page, if it is requested
    const int gap = static_cast<int>(random() % 40);
    SequenceOptions options;
    if (random() % 3 == 0) options.cached_tokens_max = static_cast<int>(random() % 1900);
    client.Hide({});
    if (gap < static_cast<int>(stored.size())) client.Hide({stored[static_cast<size_t>(gap)]});
    SCOPED_TRACE("prompt " + std::to_string(prompt) + ", gap " + std::to_string(gap));
    std::string expected_reason;
    int expected_tokens = 0;
    std::vector<PageKey> expected_keys;
    uint32_t expected_window = 0;
    for (const int part_pages : {0, 1, 3, 7}) {
      const size_t before = client.requests().size();
      const auto worker = Worker::Open(PartOptions(part_pages), &client).value();
      const auto sequence = worker->Begin(model.prompt(prompt), options).value();
      const Requests every = client.requests();
      const Requests requests(every.begin() + static_cast<std::ptrdiff_t>(before), every.end());
      uint32_t window = 0;
      const std::vector<PageKey> keys = RequestedKeys(requests, &window);
      if (part_pages == 0) {
        EXPECT_LE(requests.size(), 1u);
        expected_tokens = sequence->cached_tokens();
        expected_reason = sequence->stats().miss_reason;
        expected_keys = keys;
        expected_window = window;
        continue;
      }
      EXPECT_EQ(sequence->cached_tokens(), expected_tokens) << part_pages;
      EXPECT_EQ(sequence->stats().miss_reason, expected_reason) << part_pages;
      EXPECT_EQ(keys, expected_keys) << part_pages;
      EXPECT_EQ(window, expected_window) << part_pages;
      // Keys behind the first miss are counted, and not looked up.
      int found = 0;
      for (const MemoryClient::Request& request : requests) {
        EXPECT_EQ(request.behind_miss, found * kPageTokens > expected_tokens) << part_pages;
        found += static_cast<int>(request.keys.size());
      }
      if (static_cast<int>(expected_keys.size()) >= 2 * part_pages) {
        EXPECT_GT(requests.size(), 1u) << part_pages;
      }
      EXPECT_LE(requests.size(), 4u);
    }
  }
}

TEST(PrefixPartsTest, KnownKeysAreRequestedBeforeTheOthersAreHashed) {
  const SequenceModel model(PartOptions(3), RandomTokens(2000, 5));
  MemoryClient client;
  Store(model, 1900, client);
  WorkerOptions options = PartOptions(3);
  options.prompt_key_cache_tokens = 1 << 16;
  const auto worker = Worker::Open(options, &client).value();
  worker->Begin(model.prompt(64 * 10)).value().reset();
  const size_t before = client.requests().size();
  const auto sequence = worker->Begin(model.prompt(1900)).value();
  const Requests requests = client.requests();
  ASSERT_EQ(requests.size(), before + 3);
  EXPECT_EQ(requests[before].keys.size(), 9u);
  EXPECT_EQ(sequence->cached_tokens(), (1900 - kRecent) / kPageTokens * kPageTokens);
  EXPECT_EQ(worker->counters().prompt_tokens_known, 64u * 10);
}

// The connection, or the pages, are lost between two parts.
TEST(PrefixPartsTest, WhatIsLostBetweenPartsEndsThePrefix) {
  for (const bool connection : {false, true}) {
    for (size_t lost = 0; lost < 2; ++lost) {
      SCOPED_TRACE(std::to_string(lost) + (connection ? " connection" : " pages"));
      const SequenceModel model(PartOptions(3), RandomTokens(2000, 5));
      MemoryClient client;
      Store(model, 1900, client);
      const auto worker = Worker::Open(PartOptions(3), &client).value();
      const std::vector<PageKey> keys =
          PageKeysOf(client.int2_keyspaces().front(), model.prompt(1900));
      const size_t before = client.requests().size();
      client.before_acquire = [&](size_t request) {
        if (request != before + lost) return;
        if (connection) {
          client.up = false;
        } else {
          client.Hide(keys);
        }
      };
      {
        const auto sequence = worker->Begin(model.prompt(1900)).value();
        const Requests requests = client.requests();
        int expected = 0;
        for (size_t part = 0; part < lost; ++part) {
          expected += static_cast<int>(requests[before + part].keys.size()) * kPageTokens;
        }
        EXPECT_EQ(sequence->cached_tokens(), expected);
        EXPECT_EQ(sequence->stats().miss_reason, connection ? "unavailable" : "absent");
        EXPECT_EQ(client.leases(), lost);
        client.before_acquire = nullptr;
        // The found pages are intact.
        model.Pass(*sequence, 1900);
        EXPECT_EQ(sequence->length(), 1900);
      }
      EXPECT_EQ(client.leases(), 0u);
    }
  }
}

}  // namespace
}  // namespace crumb::client
