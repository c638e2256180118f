// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "crumb/sequence.h"
#include "crumb/sequence_options.h"
#include "crumb/worker_counters.h"
#include "crumb/worker_options.h"

namespace crumb::client {

class Client;

// The KV cache of one model replica in this process: makes sequences, shares pages between live
// ones, and publishes finished pages to crumbd in the background. Works without crumbd: then
// nothing is fetched and nothing published. Thread-safe. Starts a thread when it first publishes.
class Worker {
 public:
  virtual ~Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // `client` is borrowed and may be null: no crumbd. When crumbd is
  // connected its keyspace is opened, which may take 2 s the first time.
  // kInvalidArgument: see WorkerOptions::Validate.
  static absl::StatusOr<std::unique_ptr<Worker>> Open(const WorkerOptions& options, Client* client);

  // Starts a request: finds the longest cached prefix of `tokens` that the recent rule allows.
  // Blocks for the options' deadline at most; a late or failed fetch is a miss, not an error.
  // kInvalidArgument: no tokens.
  virtual absl::StatusOr<std::unique_ptr<Sequence>> Begin(std::span<const int32_t> tokens,
                                                          const SequenceOptions& options = {}) = 0;

  // Waits until everything queued for publishing so far was published or dropped.
  // kDeadlineExceeded: not within `timeout`.
  virtual absl::Status WaitPublished(Duration timeout) = 0;

  virtual const WorkerOptions& options() const = 0;
  virtual WorkerCounters counters() const = 0;

 protected:
  Worker() = default;
};

}  // namespace crumb::client
