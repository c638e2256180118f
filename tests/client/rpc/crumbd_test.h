// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "crumb/client.h"
#include "crumb/worker.h"
#include "fake_crumbd.h"
#include "gtest/gtest.h"
#include "tests/client/sequence_model.h"
#include "tests/common/temporary_folder.h"

namespace crumb::client {

// A fixture with a temporary folder and a fake crumbd.
class CrumbdTest : public testing::Test {
 protected:
  void StartCrumbd(uint64_t epoch = 1) { crumbd_ = FakeCrumbd::Start(dir_, epoch); }

  ClientOptions Options() const {
    ClientOptions options;
    options.socket_dir = dir_;
    options.staging_bytes = 8 << 20;
    options.backoff_min = std::chrono::milliseconds(5);
    options.backoff_max = std::chrono::milliseconds(40);
    options.counters_interval = std::chrono::milliseconds(5);
    return options;
  }

  std::unique_ptr<Client> OpenClient() const {
    auto client = Client::Open(Options());
    EXPECT_TRUE(client.ok()) << client.status();
    return std::move(client).value();
  }

  static std::unique_ptr<Worker> OpenWorker(const WorkerOptions& options, Client* client) {
    auto worker = Worker::Open(options, client);
    EXPECT_TRUE(worker.ok()) << worker.status();
    return std::move(worker).value();
  }

  // Reads `prompt` tokens of the model in one pass, and publishes every full page.
  static void PublishPrompt(Worker& worker, const SequenceModel& model, int prompt) {
    const auto sequence = worker.Begin(model.prompt(prompt)).value();
    model.Pass(*sequence, prompt);
    EXPECT_TRUE(sequence->Finish().ok());
    EXPECT_TRUE(worker.WaitPublished(std::chrono::seconds(20)).ok());
  }

  const TemporaryFolder folder_;
  const std::string& dir_ = folder_.path();
  std::unique_ptr<FakeCrumbd> crumbd_;
};

}  // namespace crumb::client
