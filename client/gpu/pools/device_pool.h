// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/device_memory.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "crumb/acquire.h"
#include "crumb/client.h"

namespace crumb::client {

struct DevicePoolOptions {
  uint64_t slot_bytes = 0;                          // tiles of one fragment; a multiple of 128
  uint64_t handle_bytes = uint64_t{256} << 20;      // of one piece of device memory
  uint64_t bytes_max = 0;                           // of the pool, whoever gave the handles
  uint64_t range_bytes = uint64_t{1} << 40;         // of addresses that handles are mapped into
  int blank_slots = 64;                             // kept ahead of need; 0: only reads
  Duration call_timeout = std::chrono::seconds(2);  // of calls in the background
};

struct DevicePoolStats {
  uint64_t handles = 0;        // mapped
  uint64_t blank_slots = 0;    // ahead of need
  uint64_t held_slots = 0;     // by the caller: blank or committed
  uint64_t pages_demoted = 0;  // copied to staging memory for crumbd
  uint64_t demotions_failed = 0;
  uint64_t out_of_slots = 0;     // TakeBlank found none
  uint64_t slots_reclaimed = 0;  // held slots that a new crumbd knows again
};

// A slot in the caller's hands: blank, and written by the caller alone, or committed, and read
// only. Stays where it is until this is destroyed, which must follow the last write or read of the
// device: the slot is somebody else's afterwards. Must not outlive its DevicePool. Thread-safe.
class DeviceSlot {
 public:
  virtual ~DeviceSlot() = default;
  virtual DeviceAddress address() const = 0;
  virtual uint64_t number() const = 0;  // in the pool
};

// The slots of one device and slot size that all workers of a tenant on this host share, mapped
// into one range of this process. Works without crumbd, too, as far as slots are there: what is
// held stays, TakeBlank runs dry. Its thread keeps blank slots ready, joins the pool again when
// crumbd was away, and copies pages down that crumbd needs the slots of. Thread-safe.
class DevicePool {
 public:
  // A committed fragment to be: what was written to `slot` by work that is done.
  struct Fragment {
    std::shared_ptr<const DeviceSlot> slot;
    FragmentHeader header;
  };

  // `memory` and `client` must outlive the pool. Needs no crumbd to be there. kInvalidArgument: an
  // option; kFailedPrecondition: `client` is not on this host, or takes part in this device's pool
  // of these sizes already.
  static absl::StatusOr<std::unique_ptr<DevicePool>> Open(const DevicePoolOptions& options,
                                                          DeviceMemory& memory, Client& client);

  // Ends what is under way. No slot may be held.
  virtual ~DevicePool() = default;

  // A blank slot, without waiting and without a call. Null: none is ready now.
  virtual std::shared_ptr<const DeviceSlot> TakeBlank() = 0;
  // Up to `count` blank slots: those that are ready, then as many as crumbd gives for the asking.
  // Blocks on that; `timeout` is of each call. So many of them are let go `together`, with the
  // last.
  virtual std::vector<std::shared_ptr<const DeviceSlot>> Reserve(int count, Duration timeout,
                                                                 int together = 1) = 0;
  // Waits until `count` blank slots are ready. False: not within `timeout`.
  virtual bool WaitBlank(int count, Duration timeout) = 0;

  // Makes fragments visible to the tenant's workers. Slots stay held whatever the outcome: those
  // with another one than kStored are the caller's own. kAborted: crumbd has restarted meanwhile.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                            std::span<const Fragment> fragments,
                                                            Duration timeout) = 0;

  // What AcquireRequest::pools wants to know. Zeros: not joined now.
  virtual PoolId id() const = 0;
  // Holds the slots of fragments that an Acquire found in this pool, as long as `lease` is held,
  // which goes with them; maps handles first that are new. The slots are let go together, with the
  // last of them. None is held otherwise: kNotFound, one is of another pool; kAborted, crumbd has
  // restarted since the lease and was told what is held; kUnavailable, crumbd has to be asked for a
  // handle and is not there.
  virtual absl::StatusOr<std::vector<std::shared_ptr<const DeviceSlot>>> Hold(
      std::span<const DeviceFragment* const> fragments, std::shared_ptr<const Lease> lease) = 0;

  // What crumbd knows to lie in slots of this pool, one a slot. It is so as long as they are held.
  virtual absl::StatusOr<std::vector<std::optional<FragmentHeader>>> Headers(
      std::span<const uint64_t> slots, Duration timeout) = 0;
  // Makes this crumbd, and those that come after it, give nobody the pages any more that were found
  // damaged; keys[i] is the one in slots[i], which is held and stays held.
  virtual absl::Status Withdraw(std::span<const uint64_t> slots, std::span<const PageKey> keys,
                                Duration timeout) = 0;

  virtual DeviceAddress base() const = 0;  // of the range
  virtual uint64_t slot_bytes() const = 0;
  virtual DevicePoolStats stats() const = 0;
};

}  // namespace crumb::client
