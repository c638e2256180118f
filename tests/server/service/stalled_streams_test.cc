// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// Streams whose callers neither send nor read end, and their places and leases come back.
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "server/daemon/daemon.h"
#include "server/service/stall_watch.h"
#include "tests/common/eventually.h"
#include "tests/common/temporary_folder.h"
#include "tests/server/test_client.h"

namespace crumb::server {
namespace {

class StalledStreamsTest : public testing::Test {
 protected:
  explicit StalledStreamsTest(const std::function<void(Options&)>& change = {}) {
    options_.listen.socket_dir = folder_.path();
    options_.admin.listen = "";
    options_.store.host.bytes_max = ByteSize{16 << 20};
    options_.store.host.slab_bytes = ByteSize{16 << 20};
    options_.store.ssd.path = "";
    options_.limits.put_streams = 1;
    options_.limits.get_streams = 1;
    options_.limits.watchers_max = 1;
    options_.limits.stream_progress_timeout = std::chrono::milliseconds(300);
    options_.log.severity = "off";
    if (change) change(options_);
    options_.Complete();
    daemon_ = Daemon::Start(options_).value();
    client_ = std::make_unique<TestClient>(options_.listen.fd_socket,
                                           "unix:" + options_.listen.unix_socket);
    EXPECT_TRUE(client_->OpenKeyspace().ok());
  }

  // More pages than the buffers of a connection hold.
  void Store(int pages) {
    for (int first = 0; first < pages; first += 100) {
      std::vector<std::vector<std::byte>> fragments;
      for (int page = first; page < first + 100; ++page) {
        fragments.push_back(client_->Fragment(TestClient::Key(page), 1));
      }
      v1::PutResponse response;
      ASSERT_TRUE(client_->Put(fragments, &response).ok());
    }
  }
  uint64_t Leases() {
    v1::StatsResponse stats;
    EXPECT_TRUE(client_->stub().Stats(client_->Context().get(), {}, &stats).ok());
    return stats.leases();
  }

  uint64_t Stalled() {
    v1::StatsResponse stats;
    EXPECT_TRUE(client_->stub().Stats(client_->Context().get(), {}, &stats).ok());
    return stats.counters().at("crumb_stalled_streams_total");
  }

  // Its windows do not grow with the traffic, so that unread bytes block a stream.
  std::unique_ptr<v1::CacheService::Stub> StubOfNarrowWindows() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    return v1::CacheService::NewStub(grpc::CreateCustomChannel(
        "unix:" + options_.listen.unix_socket, grpc::InsecureChannelCredentials(), arguments));
  }

  TemporaryFolder folder_;
  Options options_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<TestClient> client_;
};

TEST_F(StalledStreamsTest, APutThatSendsNothingEnds) {
  const auto context = client_->Context();
  v1::PutResponse response;
  const auto stream = client_->stub().Put(context.get(), &response);
  v1::PutRequest first;
  first.set_keyspace(client_->keyspace().keyspace());
  ASSERT_TRUE(stream->Write(first));
  const grpc::Status ended = stream->Finish();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << ended.error_message();
  EXPECT_NE(ended.error_message().find("limits.stream_progress_timeout"), std::string::npos);
  EXPECT_TRUE(Eventually([&] {
    v1::PutResponse stored;
    return client_->Put({client_->Fragment(TestClient::Key(1), 1)}, &stored).ok();
  })) << "the place is free";
}

TEST_F(StalledStreamsTest, APutThatDripsEnds) {
  const auto context = client_->Context();
  v1::PutResponse response;
  const auto stream = client_->stub().Put(context.get(), &response);
  const auto fragment = client_->Fragment(TestClient::Key(1), 1);
  v1::PutRequest message;
  message.set_keyspace(client_->keyspace().keyspace());
  message.set_header(fragment.data() + client_->tiles_bytes(),
                     fragment.size() - client_->tiles_bytes());
  ASSERT_TRUE(stream->Write(message));
  v1::PutRequest drop;
  drop.set_tiles("x");
  EXPECT_TRUE(Eventually([&] { return !stream->Write(drop); })) << "until the stream has ended";
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(StalledStreamsTest, AGetThatIsNotReadEndsAndItsLeaseToo) {
  Store(1'000);
  const auto context = client_->Context();
  v1::GetRequest request;
  request.set_keyspace(client_->keyspace().keyspace());
  request.set_keys(TestClient::Keys(0, 1'000));
  const auto stream = client_->stub().Get(context.get(), request);
  EXPECT_TRUE(Eventually([&] { return Leases() == 1; }));
  EXPECT_TRUE(Eventually([&] { return Leases() == 0; })) << "nothing was read";
  v1::GetResponse part;
  while (stream->Read(&part)) {
  }
  EXPECT_FALSE(stream->Finish().ok());
  std::vector<std::vector<std::byte>> got;
  v1::MissReason miss;
  EXPECT_TRUE(client_->Get(TestClient::Keys(0, 1), &got, &miss).ok()) << "the place is free";
}

TEST_F(StalledStreamsTest, AWatcherThatDoesNotReadEnds) {
  Store(100);
  const auto stub = StubOfNarrowWindows();
  const auto watch = [&](grpc::ClientContext& context) {
    v1::WatchEventsRequest request;
    request.set_keyspace(client_->keyspace().keyspace());
    request.set_snapshot(true);
    return stub->WatchEvents(&context, request);
  };
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  contexts.push_back(client_->Context());
  contexts.back()->set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
  const auto silent = watch(*contexts.back());
  v1::WatchEventsResponse first;
  ASSERT_TRUE(silent->Read(&first)) << "it has the place";
  Store(5'000);  // pages that come and go: more events than the buffers of a connection hold
  EXPECT_TRUE(Eventually([&] { return Stalled() == 1; }));
  // Another one gets the place once the first one has lost it.
  EXPECT_TRUE(Eventually([&] {
    contexts.push_back(client_->Context());
    const auto other = watch(*contexts.back());
    v1::WatchEventsResponse event;
    const bool served = other->Read(&event);
    contexts.back()->TryCancel();
    other->Finish();
    return served;
  }));
}

class SessionStreamsTest : public StalledStreamsTest {
 protected:
  using Stream = grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>;

  std::unique_ptr<grpc::ClientContext> SessionContext() {
    auto context = client_->Context();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
    return context;
  }
  // Makes a notice for the session.
  void ChangeState(const std::string& reason) {
    v1::SetKeyspaceStateRequest request;
    request.set_keyspace(client_->keyspace().keyspace());
    request.set_state(v1::KEYSPACE_STATE_ACTIVE);
    request.set_who("test");
    request.set_reason(reason);
    v1::SetKeyspaceStateResponse response;
    EXPECT_TRUE(
        client_->stub().SetKeyspaceState(client_->Context().get(), request, &response).ok());
  }

  const std::unique_ptr<v1::CacheService::Stub> stub_ = StubOfNarrowWindows();
};

TEST_F(SessionStreamsTest, AStreamWhoseNoticesAreNotReadEnds) {
  const auto context = SessionContext();
  const std::unique_ptr<Stream> stream = stub_->Session(context.get());
  // More notices than the buffers of a connection hold.
  EXPECT_TRUE(Eventually([&] {
    for (int i = 0; i < 10; ++i) ChangeState(std::string(512, 'r'));
    return Stalled() == 1;
  }));
  v1::SessionResponse notice;
  int read = 0;
  while (stream->Read(&notice)) ++read;
  EXPECT_GT(read, 10);
  EXPECT_FALSE(stream->Finish().ok());
  const auto again = SessionContext();
  const std::unique_ptr<Stream> next = stub_->Session(again.get());
  EXPECT_TRUE(Eventually([&] {
    ChangeState("why");
    return next->Read(&notice);
  })) << "the session may have a stream again";
  EXPECT_EQ(notice.keyspace_state().reason(), "why");
  again->TryCancel();
  next->Finish();
}

TEST_F(SessionStreamsTest, AStreamWithoutNoticesStays) {
  const auto context = SessionContext();
  const std::unique_ptr<Stream> stream = stub_->Session(context.get());
  v1::SessionResponse notice;
  for (const std::string reason : {"first", "second"}) {
    std::this_thread::sleep_for(4 * options_.limits.stream_progress_timeout);
    ChangeState(reason);
    ASSERT_TRUE(stream->Read(&notice));
    EXPECT_EQ(notice.keyspace_state().reason(), reason);
  }
  EXPECT_EQ(Stalled(), 0u);
  context->TryCancel();
  stream->Finish();
}

// A request of 40 bytes makes a snapshot of millions of pages, which crumbd keeps until it is sent.
class WatchSnapshotsTest : public StalledStreamsTest {
 protected:
  static constexpr int kPages = 6'000;
  WatchSnapshotsTest()
      : StalledStreamsTest([](Options& options) {
          options.store.host.bytes_max = ByteSize{128 << 20};
          options.limits.watchers_max = 8;
          options.limits.watch_snapshot_total_pages_max = 2 * kPages + 1'000;
          options.limits.stream_progress_timeout = std::chrono::hours(1);
        }) {}

  struct Watcher {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<grpc::ClientReader<v1::WatchEventsResponse>> stream;
    bool served = false;  // its first page was read, and then nothing
  };
  Watcher Watch() {
    Watcher watcher;
    watcher.context = client_->Context();
    watcher.context->set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
    v1::WatchEventsRequest request;
    request.set_keyspace(client_->keyspace().keyspace());
    request.set_snapshot(true);
    watcher.stream = stub_->WatchEvents(watcher.context.get(), request);
    v1::WatchEventsResponse page;
    watcher.served = watcher.stream->Read(&page);
    return watcher;
  }

  static void End(Watcher& watcher) {
    watcher.context->TryCancel();
    watcher.stream->Finish();
  }

  const std::unique_ptr<v1::CacheService::Stub> stub_ = StubOfNarrowWindows();
};

TEST_F(WatchSnapshotsTest, SnapshotsThatAreNotReadAreBoundedTogether) {
  Store(kPages);
  std::vector<Watcher> watchers;
  for (int i = 0; i < 2; ++i) {
    watchers.push_back(Watch());
    EXPECT_TRUE(watchers.back().served) << i;
  }
  Watcher refused = Watch();
  ASSERT_FALSE(refused.served);
  EXPECT_EQ(refused.stream->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  End(watchers.front());
  EXPECT_TRUE(Eventually([&] {
    watchers.push_back(Watch());
    return watchers.back().served;
  })) << "the room of a watcher that has ended is free";
  for (size_t i = 1; i < watchers.size(); ++i) End(watchers[i]);
  watchers.clear();
  // The room of those that were cancelled is free a moment later.
  EXPECT_TRUE(Eventually([&] {
    watchers.push_back(Watch());
    return watchers.back().served;
  }));
  v1::WatchEventsResponse event;
  while (event.kind() != v1::WatchEventsResponse::KIND_SNAPSHOT_END) {
    ASSERT_TRUE(watchers.back().stream->Read(&event));
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(Eventually([&] {
      watchers.push_back(Watch());
      return watchers.back().served;
    })) << "the first one's snapshot is sent, and takes no room";
  }
  for (Watcher& watcher : watchers) End(watcher);
}

// The rules of one stream, with a clock of its own.
class Recorder : public StallableStream {
 public:
  void Stalled() override {}
};

TEST(StallableStreamTest, AWaitWithoutProgressGoesOnFromTheOneBefore) {
  const auto at = [](int seconds) { return TimePoint() + std::chrono::seconds(1'000 + seconds); };
  Recorder stream;
  EXPECT_FALSE(stream.Claim(at(0))) << "it works";
  stream.BeginWait(at(0), true);
  EXPECT_FALSE(stream.Claim(at(-1)));
  EXPECT_TRUE(stream.EndWait());
  stream.BeginWait(at(5), false);
  EXPECT_TRUE(stream.Claim(at(1)));
  EXPECT_TRUE(stream.stalled());
  EXPECT_FALSE(stream.EndWait());
  EXPECT_FALSE(stream.Claim(at(9))) << "once";
  Recorder busy;
  busy.BeginWait(at(0), true);
  EXPECT_TRUE(busy.EndWait());
  busy.BeginWait(at(5), true);
  EXPECT_FALSE(busy.Claim(at(1)));
}

}  // namespace
}  // namespace crumb::server
