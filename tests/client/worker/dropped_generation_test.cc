// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// A dropped keyspace's pages must not be used any more. Live sequences keep theirs, but no later
// sequence may use one, and no page that was computed over one may be published.

#include <chrono>

#include "client/worker/page_table.h"
#include "crumb/worker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/memory_client.h"
#include "tests/client/sequence_model.h"

namespace crumb::client {
namespace {

using std::chrono::seconds;

class DroppedGenerationTest : public testing::Test {
 protected:
  // Returns a sequence that has read its prompt of 1,100 tokens and published its pages.
  std::unique_ptr<Sequence> Read(const SequenceModel& model) {
    auto sequence = worker_->Begin(model.prompt(1100)).value();
    model.Pass(*sequence, 1100);
    EXPECT_TRUE(worker_->WaitPublished(seconds(20)).ok());
    return sequence;
  }
  void ExpectOnlyNewPages() {
    for (const auto& [key, generation] : client_.generations()) {
      EXPECT_EQ(generation, client_.generation.load());
    }
  }

  const WorkerOptions options_ = SmallWorkerOptions();
  const SequenceModel model_{options_, RandomTokens(1300, 7)};
  const SequenceModel other_{options_, RandomTokens(1300, 8)};
  MemoryClient client_;
  std::unique_ptr<Worker> worker_ = Worker::Open(options_, &client_).value();
};

TEST_F(DroppedGenerationTest, LiveSequencesShareTheirPagesUntilTheDrop) {
  const auto first = Read(model_);
  EXPECT_GT(worker_->Begin(model_.prompt(1100)).value()->stats().hit_tokens_worker, 0);
  client_.Drop();
  const auto second = worker_->Begin(model_.prompt(1100)).value();
  EXPECT_EQ(second->cached_tokens(), 0);
  model_.Pass(*second, 1100);
  ASSERT_TRUE(worker_->WaitPublished(seconds(20)).ok());
  EXPECT_GT(client_.pages(), 0u) << "pages computed after the drop are published";
  ExpectOnlyNewPages();
  EXPECT_GT(worker_->Begin(model_.prompt(1100)).value()->stats().hit_tokens_worker, 0)
      << "and shared, though the sequence from before the drop lives";
}

TEST_F(DroppedGenerationTest, AWorkerThatLearnsByARefusalPublishesNoSuffix) {
  client_.reports_drops = false;
  const auto first = Read(model_);
  client_.Drop();
  const auto refused = Read(other_);  // it has the old generation, so crumbd refuses its pages
  EXPECT_EQ(client_.pages(), 0u);
  const auto second = worker_->Begin(model_.prompt(1100)).value();
  EXPECT_EQ(second->cached_tokens(), 0) << "the prefix is of the dropped generation";
  model_.Pass(*first, 1101);
  ASSERT_TRUE(worker_->WaitPublished(seconds(20)).ok());
  EXPECT_EQ(client_.pages(), 0u) << "a sequence from before the drop publishes nothing";
}

TEST(PageTableGenerationTest, ANewerPageTakesThePlaceAndIsNotForgottenWithTheOld) {
  PageTable table;
  const auto page = [](uint64_t generation) {
    auto made = std::make_shared<Page>();
    made->key.bytes[0] = 1;
    made->generation = generation;
    return made;
  };
  auto old = table.Share(page(1));
  EXPECT_EQ(table.Find(old->key, 1), old);
  EXPECT_EQ(table.Find(old->key, 2), nullptr);
  const auto fresh = table.Share(page(2));
  EXPECT_EQ(table.Find(fresh->key, 1), nullptr);
  EXPECT_EQ(table.Find(fresh->key, 2), fresh);
  const auto late = table.Share(page(1));
  EXPECT_EQ(table.Find(fresh->key, 2), fresh) << "an older page does not take it back";
  old.reset();
  EXPECT_EQ(table.Find(fresh->key, 2), fresh);
}

}  // namespace
}  // namespace crumb::client
