// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "crumb/counters.h"
#include "crumb/sequence.h"
#include "crumb/worker_options.h"

namespace crumb::client {

class Client;

// A sequence and what the other ranks of its engine begin theirs with.
struct LedSequence {
  std::unique_ptr<Sequence> sequence;
  std::string token;  // to be sent as it is
};

// The KV cache of one model replica, or of one rank of it, in this process: makes sequences, shares
// pages between live ones, and publishes finished pages to crumbd in the background. Works without
// crumbd: then nothing is fetched and nothing published. Thread-safe. Starts a thread when it first
// publishes.
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

  // Begin for engines of several ranks, of which each holds a part of the layers and heads: one
  // rank leads and takes the longest prefix that crumbd has for all layers and heads, so that every
  // rank can have it; the others follow with its token, over the same tokens and options, and get a
  // sequence with the same cached_tokens(). Their clients name one engine (ClientOptions). Errors
  // as Begin; without crumbd nothing is cached.
  virtual absl::StatusOr<LedSequence> Lead(std::span<const int32_t> tokens,
                                           const SequenceOptions& options = {}) = 0;
  // While the leader's sequence lives its pages stay; afterwards this looks for them by itself, as
  // it does when this rank's crumbd is another one. kAborted: this rank cannot have all of them;
  // lead again with the cached_tokens_max that the message names. kInvalidArgument: the token is of
  // another model or prompt; kDataLoss, kFailedPrecondition: it is damaged, or another version's.
  virtual absl::StatusOr<std::unique_ptr<Sequence>> Follow(std::string_view token,
                                                           std::span<const int32_t> tokens,
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
