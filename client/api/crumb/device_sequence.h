// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb/sequence_stats.h"

namespace crumb::client {

// Keys and values of one request in device memory, in three segments as Sequence has them. Made by
// DeviceWorker::Begin and by DeviceBatch::Fork; must not outlive its worker, and a batch that a
// prepared pass brings it through. Batches do everything with it; it goes from one to another as
// the engine likes. Dropping it unfinished publishes nothing more. Not thread-safe.
class DeviceSequence {
 public:
  virtual ~DeviceSequence() = default;
  DeviceSequence(const DeviceSequence&) = delete;
  DeviceSequence& operator=(const DeviceSequence&) = delete;

  // Tokens held: the position of the next one. Starts at cached_tokens().
  virtual int length() const = 0;
  // Leading prompt tokens that came from the cache, a multiple of 64: the engine computes the rest.
  virtual int cached_tokens() const = 0;
  // Most tokens that the next pass may bring: in the prompt up to its end or that of the prefill
  // block, then 1 + draft_slots.
  virtual int pass_tokens_max() const = 0;

  virtual SequenceStats stats() const = 0;

 protected:
  DeviceSequence() = default;
};

}  // namespace crumb::client
