// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/metrics.h"
#include "crumb/counters.h"

namespace crumb::client {

// WorkerTally holds the counters of WorkerCounters while they are being counted. Thread-safe.
//
// Parts of a worker borrow it and add without a lock. WorkerCounters has the meaning of each
// counter.
struct WorkerTally {
  Counter sequences;
  Counter prompt_tokens;
  Counter prompt_tokens_known;
  Counter hit_tokens_worker;
  Counter hit_tokens_device;
  Counter hit_tokens_host;
  Counter hit_tokens_ssd;
  Counter hit_tokens_remote;
  Counter verify_failures;
  Counter pages_scrubbed;
  Counter scrubs_dropped;
  Counter deadline_exceeded;
  Counter unavailable;
  Counter windows_evicted;
  Counter windows_refused;
  Counter windows_saturated;
  Counter windows_measured;
  Counter quality_alarms;
  Counter pool_pages;
  Counter published_pages;
  Counter deduplicated_pages;
  Counter publish_refused;
  Counter publish_dropped_queue;
  Counter publish_dropped_room;
  Counter publish_dropped_unavailable;
  Counter published_bytes;

  WorkerCounters Read() const {
    return {
        .sequences = sequences.value(),
        .prompt_tokens = prompt_tokens.value(),
        .prompt_tokens_known = prompt_tokens_known.value(),
        .hit_tokens_worker = hit_tokens_worker.value(),
        .hit_tokens_device = hit_tokens_device.value(),
        .hit_tokens_host = hit_tokens_host.value(),
        .hit_tokens_ssd = hit_tokens_ssd.value(),
        .hit_tokens_remote = hit_tokens_remote.value(),
        .verify_failures = verify_failures.value(),
        .pages_scrubbed = pages_scrubbed.value(),
        .scrubs_dropped = scrubs_dropped.value(),
        .deadline_exceeded = deadline_exceeded.value(),
        .unavailable = unavailable.value(),
        .windows_evicted = windows_evicted.value(),
        .windows_refused = windows_refused.value(),
        .windows_saturated = windows_saturated.value(),
        .windows_measured = windows_measured.value(),
        .quality_alarms = quality_alarms.value(),
        .pool_pages = pool_pages.value(),
        .published_pages = published_pages.value(),
        .deduplicated_pages = deduplicated_pages.value(),
        .publish_refused = publish_refused.value(),
        .publish_dropped_queue = publish_dropped_queue.value(),
        .publish_dropped_room = publish_dropped_room.value(),
        .publish_dropped_unavailable = publish_dropped_unavailable.value(),
        .published_bytes = published_bytes.value(),
    };
  }
};

}  // namespace crumb::client
