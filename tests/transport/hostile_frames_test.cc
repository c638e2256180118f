// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A peer that violates the protocol can end its own connection, but never deliver wrong bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "common/crc32c.h"
#include "tests/common/eventually.h"
#include "tests/transport/fetch_calls.h"
#include "tests/transport/sample_source.h"
#include "transport/frame.h"
#include "transport/loopback_transport.h"
#include "transport/protocol.h"

namespace crumb::transport {
namespace {

using ::testing::ElementsAre;
using Frame = LoopbackNetwork::Frame;

constexpr uint32_t kTileBytes = 4608;
constexpr TileRange kWhole = {{0, 8}, {0, 4}};

std::vector<Frame> One(Frame frame) {
  std::vector<Frame> frames;
  frames.push_back(std::move(frame));
  return frames;
}

// Returns a frame with changed fields and right checksums.
Frame Reseal(Frame frame,
             const std::function<void(FrameHeader&, std::vector<std::byte>&)>& change) {
  FrameHeader header = *DecodeFrameHeader(frame.header);
  change(header, frame.body);
  if (header.type != FrameType::kData) header.body_sum = Crc32c(frame.body);
  const FrameHeaderBytes bytes = EncodeFrameHeader(header);
  frame.header.assign(bytes.begin(), bytes.end());
  return frame;
}

FrameType TypeOf(const Frame& frame) { return DecodeFrameHeader(frame.header)->type; }

class HostileFrames : public ::testing::Test {
 protected:
  HostileFrames() {
    TransportOptions options;
    options.listen = "127.0.0.1:0";
    options.reconnect_after_min = options.reconnect_after_max = std::chrono::milliseconds(1);
    options.frame_bytes.value = 8 * kTileBytes;  // four frames of tiles
    source_.Add(1, {kWhole}, kTileBytes);
    source_.Add(2, {kWhole}, kTileBytes);
    server_ = *network_.Open(options, &source_);
    client_ = *network_.Open(options, nullptr);
    to_.Want(1, kWhole, kTileBytes);
  }
  PageStatus Fetch(Duration patience = std::chrono::seconds(20)) {
    FetchRequest request = to_.Request();
    request.deadline = Clock::Real().Now() + patience;
    const FetchResponse response = PendingFetch(*client_, server_->address(), request).Wait();
    EXPECT_EQ(response.pages.size(), 1u);
    EXPECT_EQ(to_.FirstWrong(response.pages), -1);
    return response.pages.empty() ? PageStatus::kUnavailable : response.pages[0].status;
  }
  // Passes the frames of `type` through `change` and others as they are.
  void TapOn(FrameType type, std::function<std::vector<Frame>(Frame)> change) {
    network_.SetTap([type, change = std::move(change)](Frame frame) {
      return TypeOf(frame) == type ? change(std::move(frame)) : One(std::move(frame));
    });
  }
  void ExpectHealthy() {
    network_.SetTap(nullptr);
    EXPECT_TRUE(Eventually([&] { return Fetch() == PageStatus::kHit; }));
    EXPECT_TRUE(Eventually([&] { return to_.released() && source_.leases() == 0; }));
  }

  LoopbackNetwork network_;
  SampleSource source_;
  std::unique_ptr<Transport> server_;
  std::unique_ptr<Transport> client_;
  Destination to_;
};

TEST_F(HostileFrames, CorruptTileIsCorruptAndTheConnectionStays) {
  TapOn(FrameType::kData, [](Frame frame) {
    frame.body[frame.body.size() / 2] ^= std::byte{16};
    return One(std::move(frame));
  });
  EXPECT_EQ(Fetch(), PageStatus::kCorrupt);
  EXPECT_EQ(client_->stats().frames_refused, 0u);
  ExpectHealthy();
  EXPECT_EQ(client_->stats().connections_opened, 1u);
}

TEST_F(HostileFrames, DamagedHeadersAndBodiesEndTheConnection) {
  for (const FrameType type :
       {FrameType::kFetch, FrameType::kResponse, FrameType::kData, FrameType::kHello}) {
    TapOn(type, [](Frame frame) {
      frame.header[16] ^= std::byte{1};
      return One(std::move(frame));
    });
    EXPECT_EQ(Fetch(), PageStatus::kUnavailable);
    ExpectHealthy();
    client_->Disconnect(server_->address());
  }
  for (const FrameType type : {FrameType::kFetch, FrameType::kResponse, FrameType::kHello}) {
    TapOn(type, [](Frame frame) {
      frame.body.back() ^= std::byte{1};
      return One(std::move(frame));
    });
    EXPECT_EQ(Fetch(), PageStatus::kUnavailable);
    ExpectHealthy();
    client_->Disconnect(server_->address());
  }
  EXPECT_GT(client_->stats().frames_refused + server_->stats().frames_refused, 5u);
}

TEST_F(HostileFrames, TruncatedFramesEndTheConnection) {
  for (const FrameType type : {FrameType::kFetch, FrameType::kResponse}) {
    TapOn(type, [](const Frame& frame) {
      return One(Reseal(
          frame, [](FrameHeader&, std::vector<std::byte>& body) { body.resize(body.size() - 5); }));
    });
    EXPECT_EQ(Fetch(), PageStatus::kUnavailable);
    ExpectHealthy();
  }
  TapOn(FrameType::kData, [](Frame frame) {
    frame.body.resize(frame.body.size() - 1);
    return One(std::move(frame));
  });
  EXPECT_EQ(Fetch(), PageStatus::kUnavailable);
  ExpectHealthy();
}

TEST_F(HostileFrames, TilesInAnyOrderAreAHit) {
  auto held = std::make_shared<std::vector<Frame>>();
  TapOn(FrameType::kData, [held](Frame frame) {
    held->push_back(std::move(frame));
    if (held->size() < 4) return std::vector<Frame>();
    std::reverse(held->begin(), held->end());
    return std::exchange(*held, {});
  });
  EXPECT_EQ(Fetch(), PageStatus::kHit);
  ExpectHealthy();
}

TEST_F(HostileFrames, TilesBeforeTheirResponseEndTheConnection) {
  auto held = std::make_shared<std::vector<Frame>>();
  network_.SetTap([held](Frame frame) {
    if (TypeOf(frame) == FrameType::kResponse) {
      held->push_back(std::move(frame));
      return std::vector<Frame>();
    }
    std::vector<Frame> frames = One(std::move(frame));
    if (TypeOf(frames[0]) == FrameType::kData) {
      for (Frame& late : std::exchange(*held, {})) frames.push_back(std::move(late));
    }
    return frames;
  });
  EXPECT_EQ(Fetch(), PageStatus::kUnavailable);
  ExpectHealthy();
}

TEST_F(HostileFrames, DuplicatesEndTheConnectionAndOverwriteNothing) {
  // The copy carries other bytes, which would replace a verified tile if it were accepted.
  TapOn(FrameType::kData, [](Frame frame) {
    std::vector<Frame> frames = One(frame);
    for (std::byte& byte : frame.body) byte ^= std::byte{0xFF};
    frames.push_back(std::move(frame));
    return frames;
  });
  EXPECT_EQ(Fetch(), PageStatus::kUnavailable);
  TapOn(FrameType::kResponse, [](Frame frame) {
    std::vector<Frame> frames = One(frame);
    frames.push_back(std::move(frame));
    return frames;
  });
  EXPECT_TRUE(Eventually([&] {
    EXPECT_EQ(Fetch(), PageStatus::kUnavailable);
    return client_->stats().frames_refused >= 2;
  }));
  ExpectHealthy();
}

// Frames of an ended fetch, or of an ended connection, are dropped and counted.
TEST_F(HostileFrames, StaleFramesAreDropped) {
  auto old = std::make_shared<std::vector<Frame>>();
  network_.SetTap([old](Frame frame) {
    old->push_back(frame);
    return One(std::move(frame));
  });
  ASSERT_EQ(Fetch(), PageStatus::kHit);
  auto replayed = std::make_shared<std::vector<Frame>>(*old);
  TapOn(FrameType::kResponse, [replayed](Frame frame) {
    std::vector<Frame> frames;
    for (const Frame& late : std::exchange(*replayed, {})) {
      const FrameType type = TypeOf(late);
      if (type == FrameType::kResponse || type == FrameType::kData) frames.push_back(late);
    }
    frames.push_back(std::move(frame));
    return frames;
  });
  EXPECT_EQ(Fetch(), PageStatus::kHit);
  EXPECT_GE(client_->stats().frames_stale, 5u);
  EXPECT_EQ(client_->stats().frames_refused, 0u);
  network_.SetTap(nullptr);
  client_->Disconnect(server_->address());
  *replayed = *old;
  TapOn(FrameType::kResponse, [replayed](Frame frame) {
    std::vector<Frame> frames;
    for (const Frame& late : std::exchange(*replayed, {})) {
      if (TypeOf(late) != FrameType::kHello) frames.push_back(late);
    }
    frames.push_back(std::move(frame));
    return frames;
  });
  EXPECT_EQ(Fetch(), PageStatus::kHit);
  ExpectHealthy();
}

// The response belongs to another page, and all checksums are right.
TEST_F(HostileFrames, AnotherPagesResponseIsCorrupt) {
  TapOn(FrameType::kFetch, [](const Frame& frame) {
    return One(Reseal(frame, [](FrameHeader&, std::vector<std::byte>& body) {
      FetchBody fetch = *DecodeFetch(body);
      fetch.pages[0].key = SampleKey(2);
      body = EncodeFetch(fetch);
    }));
  });
  EXPECT_EQ(Fetch(), PageStatus::kCorrupt);
  // The response covers fewer tiles than were requested.
  TapOn(FrameType::kFetch, [](const Frame& frame) {
    return One(Reseal(frame, [](FrameHeader&, std::vector<std::byte>& body) {
      FetchBody fetch = *DecodeFetch(body);
      fetch.pages[0].range.heads.end -= 1;
      body = EncodeFetch(fetch);
    }));
  });
  // The peer's tiles are then at other places of its fragment, which their checksums show.
  EXPECT_EQ(Fetch(), PageStatus::kCorrupt);
  ExpectHealthy();
}

TEST_F(HostileFrames, PeersWithoutACommonVersionDoNotTalk) {
  TapOn(FrameType::kHello, [](const Frame& frame) {
    return One(Reseal(frame, [](FrameHeader&, std::vector<std::byte>& body) {
      Hello hello = *DecodeHello(body);
      hello.version_min = kVersionMax + 1;
      hello.version_max = kVersionMax + 3;
      body = EncodeHello(hello);
    }));
  });
  FetchRequest request = to_.Request();
  const FetchResponse response = PendingFetch(*client_, server_->address(), request).Wait();
  EXPECT_THAT(StatusesOf(response), ElementsAre(PageStatus::kUnavailable));
  EXPECT_EQ(response.detail.code(), absl::StatusCode::kFailedPrecondition) << response.detail;
  EXPECT_EQ(client_->stats().version_mismatches, 1u);
  EXPECT_TRUE(Eventually([&] { return server_->stats().version_mismatches == 1; }));
  // A newer peer that still supports this version is accepted.
  TapOn(FrameType::kHello, [](const Frame& frame) {
    return One(Reseal(frame, [](FrameHeader&, std::vector<std::byte>& body) {
      Hello hello = *DecodeHello(body);
      hello.version_max = kVersionMax + 3;
      body = EncodeHello(hello);
      body.resize(body.size() + 8);
    }));
  });
  EXPECT_TRUE(Eventually([&] { return Fetch() == PageStatus::kHit; }));
}

TEST_F(HostileFrames, SilentPeersAreGivenUp) {
  TransportOptions options;
  options.listen = "127.0.0.1:0";
  options.connect_timeout = std::chrono::milliseconds(30);
  client_ = *network_.Open(options, nullptr);
  TapOn(FrameType::kHello, [](const Frame&) { return std::vector<Frame>(); });
  EXPECT_EQ(Fetch(), PageStatus::kUnavailable);
  network_.SetTap([](Frame frame) {
    const FrameType type = TypeOf(frame);
    return type == FrameType::kResponse || type == FrameType::kData ? std::vector<Frame>()
                                                                    : One(std::move(frame));
  });
  EXPECT_TRUE(
      Eventually([&] { return Fetch(std::chrono::milliseconds(30)) == PageStatus::kDeadline; }));
  ExpectHealthy();
}

// The source continues with fetches that the peer has cancelled, so they count as well.
TEST_F(HostileFrames, CancelledFetchesDoNotAddUpAtTheSource) {
  constexpr uint64_t kFetches = 200;
  TransportOptions options;
  options.listen = "127.0.0.1:0";
  options.serves_max = 4;
  SampleSource source;
  source.Add(1, {kWhole}, kTileBytes);
  source.Hold();
  const auto server = *network_.Open(options, &source);
  TapOn(FrameType::kFetch, [](const Frame& frame) {
    std::vector<Frame> frames;
    for (uint64_t i = 0; i < kFetches; ++i) {
      const auto number = [i](FrameHeader& header, std::vector<std::byte>&) {
        header.fetch = 1000 + i;
      };
      frames.push_back(Reseal(frame, number));
      frames.push_back(Reseal(frame, [i](FrameHeader& header, std::vector<std::byte>& body) {
        header.type = FrameType::kCancel;
        header.fetch = 1000 + i;
        body.clear();
      }));
    }
    return frames;
  });
  FetchRequest request = to_.Request();
  request.deadline = Clock::Real().Now() + std::chrono::seconds(60);
  PendingFetch fetch(*client_, server->address(), request);
  EXPECT_TRUE(Eventually([&] { return server->stats().serves == kFetches; }));
  EXPECT_LE(source.requests(), options.serves_max);
  EXPECT_GE(server->stats().serves_refused, kFetches - 4);
  source.ReplyAll();
  client_->Disconnect(server->address());
  EXPECT_THAT(StatusesOf(fetch.Wait()), ElementsAre(PageStatus::kUnavailable));
  EXPECT_TRUE(Eventually([&] { return source.leases() == 0; }));
}

// Keeps the frames that a protocol sends, so that none of them is ever sent.
class StuckLink final : public Link {
 public:
  StuckLink(std::vector<OutgoingFrame>& sent, bool& open) : sent_(sent), open_(open) {
    open_ = true;
  }
  ~StuckLink() override { open_ = false; }
  void Send(OutgoingFrame frame, std::shared_ptr<const void>, std::function<void()>) override {
    sent_.push_back(std::move(frame));
  }

 private:
  std::vector<OutgoingFrame>& sent_;
  bool& open_;
};

class NoLinks final : public LinkMaker {
 public:
  absl::StatusOr<std::unique_ptr<Link>> MakeLink(const std::string&) override {
    return absl::UnavailableError("nowhere");
  }
};

class BodyArrival final : public Arrival {
 public:
  explicit BodyArrival(std::span<const std::byte> body) : body_(body) {}
  size_t size() const override { return body_.size(); }
  const std::byte* data() const override { return body_.data(); }
  void Pull(std::vector<std::span<std::byte>>, Pulled) override {}

 private:
  const std::span<const std::byte> body_;
};

TEST(UnreadResponsesTest, APeerThatRequestsAndDoesNotReadIsDisconnected) {
  TransportOptions options;
  options.serves_max = 1;
  options.refusals_bytes_max.value = 4 << 20;
  SampleSource source;
  source.Hold();
  NoLinks links;
  Protocol protocol(options, &source, links, Clock::Real(), [] {});
  std::vector<OutgoingFrame> sent;
  bool open = false;
  auto link = std::make_unique<StuckLink>(sent, open);
  Link* const raw = link.get();
  protocol.OnAccepted(std::move(link), "127.0.0.1:1");
  const auto deliver = [&](FrameHeader header, const std::vector<std::byte>& body) {
    header.body_sum = Crc32c(body);
    BodyArrival arrival(body);
    protocol.OnFrame(raw, EncodeFrameHeader(header), arrival);
    protocol.Step();
  };
  deliver({.type = FrameType::kHello}, EncodeHello({kVersionMin, kVersionMax, 77}));
  ASSERT_EQ(sent.size(), 1u);
  const uint64_t connection = DecodeHello(sent[0].body)->connection;
  FetchBody fetch;
  fetch.time_left_us = uint64_t{3600} * 1000 * 1000;
  fetch.pages.assign(kFetchPagesMax, {SampleKey(1), kWhole, kTileBytes});
  const std::vector<std::byte> body = EncodeFetch(fetch);
  uint64_t requested = 0;
  for (; open && requested < 100; ++requested) {
    FrameHeader header{.type = FrameType::kFetch};
    header.connection = connection;
    header.fetch = requested + 1;
    deliver(header, body);
    EXPECT_LE(protocol.stats().refusal_bytes, options.refusals_bytes_max.value + (2 << 20));
  }
  EXPECT_FALSE(open);
  EXPECT_LT(requested, 20u);
  EXPECT_EQ(protocol.stats().unread_closes, 1u);
  EXPECT_EQ(protocol.stats().refusal_bytes, 0u);
  EXPECT_EQ(protocol.stats().serves_in_flight, 0u);
  protocol.Shutdown();
}

// Whatever happens to frames, hits are right and all memory and leases are released.
TEST_F(HostileFrames, RandomMishaps) {
  // A lost hello must cost one fetch, not all that fit into a patient timeout.
  TransportOptions options;
  options.listen = "127.0.0.1:0";
  options.connect_timeout = std::chrono::milliseconds(20);
  options.reconnect_after_min = options.reconnect_after_max = std::chrono::milliseconds(1);
  client_ = *network_.Open(options, nullptr);
  auto random = std::make_shared<std::mt19937>(77);
  auto mutex = std::make_shared<std::mutex>();
  auto kept = std::make_shared<std::vector<Frame>>();
  network_.SetTap([=](Frame frame) {
    const std::lock_guard lock(*mutex);
    std::vector<Frame> frames;
    switch ((*random)() % 200) {
      case 0:
        break;  // lost
      case 1:
        frames.push_back(frame);
        frames.push_back(std::move(frame));
        break;
      case 2:
        frame.header[(*random)() % frame.header.size()] ^= static_cast<std::byte>((*random)());
        frames.push_back(std::move(frame));
        break;
      case 3:
        if (!frame.body.empty()) {
          frame.body[(*random)() % frame.body.size()] ^= static_cast<std::byte>((*random)());
        }
        frames.push_back(std::move(frame));
        break;
      case 4:
        frame.body.resize((*random)() % (frame.body.size() + 1));
        frames.push_back(std::move(frame));
        break;
      case 5:
        kept->push_back(std::move(frame));  // late
        break;
      default:
        frames.push_back(std::move(frame));
        if ((*random)() % 8 == 0) {
          for (Frame& late : std::exchange(*kept, {})) frames.push_back(std::move(late));
        }
    }
    return frames;
  });
  int hits = 0;
  for (int i = 0; i < 300; ++i) hits += Fetch(std::chrono::milliseconds(20)) == PageStatus::kHit;
  EXPECT_GT(hits, 50);
  ExpectHealthy();
}

}  // namespace
}  // namespace crumb::transport
