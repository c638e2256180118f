// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/counter_list.h"

namespace crumb::server {

std::vector<NamedCounter> UnlabelledCounters(const ServerMetrics& metrics,
                                             const storage::StoreStats& stats) {
  return {
      {"crumb_used_tokens_total", "Tokens of fetched pages that attention read, as clients tell.",
       metrics.used_tokens.value()},
      {"crumb_prefill_tokens_avoided_total", "Tokens that clients did not compute again.",
       metrics.prefill_tokens_avoided.value()},
      {"crumb_publish_dropped_pages_total", "Pages that clients dropped: their queues were full.",
       metrics.publish_dropped_pages.value()},
      {"crumb_scrubbed_pages_total", "Pages on devices that clients summed again where they lie.",
       metrics.scrubbed_pages.value()},
      {"crumb_client_deadline_exceeded_total", "Calls that clients gave up.",
       metrics.client_deadline_exceeded.value()},
      {"crumb_deadline_exceeded_total", "Acquires that ended at a page not brought up in time.",
       metrics.deadline_exceeded.value()},
      {"crumb_sessions_opened_total", "Sessions opened.", metrics.sessions_opened.value()},
      {"crumb_sessions_reaped_total", "Sessions that ended with their process.",
       metrics.sessions_reaped.value()},
      {"crumb_hellos_refused_total", "Connections that got no session.",
       metrics.hellos_refused.value()},
      {"crumb_accept_pauses_total",
       "Times at which no session was accepted for a moment: descriptors or places had run out.",
       metrics.accept_pauses.value()},
      {"crumb_admin_closed_total",
       "Connections of the admin port closed before their request was whole or its answer read.",
       metrics.admin_closed.value()},
      {"crumb_leases_reaped_total", "Leases that ended with their engine.",
       metrics.leases_reaped.value()},
      {"crumb_events_lost_total", "Events that slow watchers missed.", metrics.events_lost.value()},
      {"crumb_stalled_streams_total", "Streams ended because their callers made no progress.",
       metrics.stalled_streams.value()},
      {"crumb_keyspaces_ended_total", "Keyspaces forgotten because they were not used.",
       metrics.keyspaces_ended.value()},
      {"crumb_notices_dropped_total", "Notices that slow session streams missed.",
       metrics.notices_dropped.value()},
      {"crumb_dedup_bytes_total", "Bytes of commits whose tiles were there already.",
       stats.dedup_bytes},
      {"crumb_durable_pages_total", "Pages synced to the SSD tier.", stats.durable_pages},
      {"crumb_write_queue_dropped_total", "Pages not written to SSD: the disk lagged.",
       stats.write_queue_dropped},
      {"crumb_lost_pages_total", "Pages that left host memory before they were durable.",
       stats.lost_pages},
      {"crumb_admission_rejected_total", "Pages not written to SSD: admission.",
       stats.admission_rejected},
      {"crumb_promoted_pages_total", "Pages brought up from SSD.", stats.promoted_pages},
      {"crumb_demoted_pages_total", "Pages that left host memory for SSD only.",
       stats.demoted_pages},
      {"crumb_device_demoted_slots_total",
       "Slots of device pools whose pages workers copied down before they left.",
       stats.pools.demoted_slots},
      {"crumb_device_dropped_slots_total",
       "Slots of device pools whose pages left with no copy below.", stats.pools.dropped_slots},
  };
}

}  // namespace crumb::server
