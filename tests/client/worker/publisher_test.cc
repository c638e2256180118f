// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/publisher.h"

#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/worker/page_reader.h"
#include "client/worker/worker_tally.h"
#include "gmock/gmock.h"
#include "tests/client/forwarding_client.h"
#include "tests/client/memory_client.h"

namespace crumb::client {
namespace {

using testing::ElementsAre;

constexpr size_t kPageBytes = 400 << 10;  // two of them make a part of a batch

// Notes in which order parts are written and committed, and fails on request.
class Log final : public ForwardingClient, public PageReader {
 public:
  using ForwardingClient::ForwardingClient;

  std::vector<std::string> steps;
  size_t failing_commit = SIZE_MAX;  // number of the Commit that fails
  size_t failing_read = SIZE_MAX;

  absl::StatusOr<std::vector<std::vector<uint32_t>>> Read(
      std::span<const std::shared_ptr<const Page>> pages, std::span<std::byte* const> to) override {
    steps.push_back("write " + std::to_string(pages.size()));
    if (reads_++ == failing_read) return absl::InternalError("the device is gone");
    return reader_.Read(pages, to);
  }

  std::unique_ptr<PendingCommit> StartCommit(const KeyspaceId& keyspace,
                                             std::vector<StagingSlot> slots, size_t tiles_bytes,
                                             Duration timeout) override {
    steps.push_back("commit " + std::to_string(slots.size()));
    absl::StatusOr<std::vector<CommitOutcome>> result = absl::UnavailableError("crumbd is gone");
    if (commits_++ != failing_commit) {
      result = Commit(keyspace, std::move(slots), tiles_bytes, timeout);
    }
    return std::make_unique<Noted>(steps, std::move(result));
  }

 private:
  class Noted final : public PendingCommit {
   public:
    Noted(std::vector<std::string>& steps, absl::StatusOr<std::vector<CommitOutcome>> result)
        : steps_(steps), result_(std::move(result)) {}
    absl::StatusOr<std::vector<CommitOutcome>> Finish() override {
      steps_.push_back("finish");
      return result_;
    }

   private:
    std::vector<std::string>& steps_;
    const absl::StatusOr<std::vector<CommitOutcome>> result_;
  };

  HostPageReader reader_;
  size_t reads_ = 0;
  size_t commits_ = 0;
};

class PublisherTest : public testing::Test {
 protected:
  PublisherTest() {
    options_.layers = 1;
    options_.q_heads = 1;
    options_.kv_heads = 1;
    KeyspaceSpec spec;
    spec.fields = {{"model", "test"}, {"format", "int2"}};
    spec.layers = 1;
    spec.kv_heads = 1;
    spec.head_dim = 64;
    spec.group_size = 64;
    const KeyspaceInfo info = client_.OpenKeyspace(spec, std::chrono::seconds(5)).value();
    auto binding = std::make_shared<KeyspaceBinding>();
    binding->id = info.id;
    binding->generation = info.generation;
    binding->known_to_crumbd = true;
    keyspace_ = binding;
  }

  std::shared_ptr<const Page> MakePage(uint8_t number) {
    auto bytes = std::make_shared<std::vector<std::byte>>(kPageBytes, std::byte{number});
    auto page = std::make_shared<Page>();
    page->key.bytes[0] = number;
    page->tiles = bytes->data();
    page->tile_bytes = kPageBytes;
    page->bytes = kPageBytes;
    page->memory = bytes;
    return page;
  }

  // Publishes five pages as one batch.
  void PublishFive() {
    Publisher publisher(options_, log_, log_, nullptr, tally_, [] {});
    std::promise<void> started;
    std::promise<void> queued;
    publisher.RunSoon([&] {
      started.set_value();
      queued.get_future().wait();
    });
    started.get_future().wait();  // a batch that is taken together with the task is empty then
    for (uint8_t number = 1; number <= 5; ++number) publisher.Publish(keyspace_, MakePage(number));
    queued.set_value();
    ASSERT_TRUE(publisher.WaitIdle(std::chrono::seconds(20)).ok());
  }

  WorkerOptions options_;
  MemoryClient client_;
  Log log_{client_};
  WorkerTally tally_;
  std::shared_ptr<const KeyspaceBinding> keyspace_;
};

TEST_F(PublisherTest, APartIsWrittenWhileTheOneBeforeIsCommitted) {
  PublishFive();
  EXPECT_THAT(log_.steps, ElementsAre("write 2", "commit 2", "write 2", "finish", "commit 2",
                                      "write 1", "finish", "commit 1", "finish"));
  EXPECT_EQ(client_.pages(), 5u);
  EXPECT_EQ(tally_.published_pages.value(), 5u);
}

TEST_F(PublisherTest, AFailedCommitDropsItsPartAndThoseBehindIt) {
  log_.failing_commit = 1;
  PublishFive();
  EXPECT_THAT(log_.steps, ElementsAre("write 2", "commit 2", "write 2", "finish", "commit 2",
                                      "write 1", "finish"));
  EXPECT_EQ(client_.pages(), 2u);
  EXPECT_EQ(tally_.published_pages.value(), 2u);
  EXPECT_EQ(tally_.publish_dropped_unavailable.value(), 3u);
}

TEST_F(PublisherTest, AFailedReadDropsWhatIsNotWritten) {
  log_.failing_read = 2;
  PublishFive();
  EXPECT_EQ(client_.pages(), 4u);
  EXPECT_EQ(tally_.published_pages.value(), 4u);
  EXPECT_EQ(tally_.publish_dropped_unavailable.value(), 1u);
}

}  // namespace
}  // namespace crumb::client
