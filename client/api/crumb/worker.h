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

// A sequence, and the token with which the other ranks of its engine begin theirs.
struct LedSequence {
  std::unique_ptr<Sequence> sequence;
  std::string token;  // opaque; to be sent unchanged
};

// Worker is the KV cache of one model replica, or of one rank of it, in this process. It creates
// sequences, lets live sequences use each other's pages, and publishes finished pages to crumbd in
// the background. Without crumbd it works too, but fetches and publishes nothing. Thread-safe. It
// starts a thread when it first publishes.
//
// A request's life: Begin finds the cached prefix and returns a Sequence; the engine computes the
// remaining prompt and decodes with it; pages that become complete are queued for publishing;
// Finish queues the rest. The worker must outlive its sequences, and `client` the worker.
//
// Memory: pages take at most WorkerOptions::page_bytes_max of this process's memory, fetched pages
// none; BF16 rows of live sequences come on top of that.
class Worker {
 public:
  virtual ~Worker() = default;
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // `client` is borrowed and may be null, which means no crumbd. If crumbd is connected, Open opens
  // the keyspace, which may take 2 s the first time. kInvalidArgument: see WorkerOptions::Validate.
  static absl::StatusOr<std::unique_ptr<Worker>> Open(const WorkerOptions& options, Client* client);

  // Begins a request with the longest cached prefix of `tokens` that may be taken from the cache:
  // none of the last recent_tokens in INT2, and at least one token is left to compute. Blocks for
  // the options' deadline at most; a late or failed fetch is a miss, not an error.
  // kInvalidArgument: `tokens` is empty. Hashes the prompt's pages (SHA-256, in proportion to its
  // length) unless a recent prompt had the same beginning.
  virtual absl::StatusOr<std::unique_ptr<Sequence>> Begin(std::span<const int32_t> tokens,
                                                          const SequenceOptions& options = {}) = 0;

  // Lead and Follow begin a request in an engine of several ranks, each of which holds a part of
  // the layers and heads. One rank leads: it takes the longest prefix that crumbd has for all
  // layers and heads, so that every rank can have it. The other ranks follow with the leader's
  // token and the same tokens and options, and get a sequence with the same cached_tokens(). The
  // ranks' clients name the same engine (ClientOptions::engine). Errors as for Begin. Without
  // crumbd nothing is cached.
  virtual absl::StatusOr<LedSequence> Lead(std::span<const int32_t> tokens,
                                           const SequenceOptions& options = {}) = 0;
  // The pages of the prefix stay in the cache while the leader's sequence lives. Later, or if this
  // rank is connected to another crumbd, Follow looks for them itself. kAborted: this rank cannot
  // have all of them; lead again with the cached_tokens_max that the message names.
  // kInvalidArgument: the token belongs to another model or prompt; kDataLoss: it is damaged;
  // kFailedPrecondition: it has another version.
  virtual absl::StatusOr<std::unique_ptr<Sequence>> Follow(std::string_view token,
                                                           std::span<const int32_t> tokens,
                                                           const SequenceOptions& options = {}) = 0;

  // Blocks until every page queued so far was published or dropped. kDeadlineExceeded: not within
  // `timeout`. A dropped page is no error; counters() says how many were dropped and why. Returns
  // at once without a client.
  virtual absl::Status WaitPublished(Duration timeout) = 0;

  virtual const WorkerOptions& options() const = 0;
  virtual WorkerCounters counters() const = 0;

 protected:
  Worker() = default;
};

}  // namespace crumb::client
