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
  uint64_t slot_bytes = 0;                      // size of one fragment's tiles; a multiple of 128
  uint64_t handle_bytes = uint64_t{256} << 20;  // size of one allocation of device memory
  uint64_t bytes_max = 0;  // bound on the pool, including other processes' handles
  // Size of the address range to which handles are mapped.
  uint64_t range_bytes = uint64_t{1} << 40;
  int blank_slots = 64;  // blank slots kept ready; 0: the pool is only read
  Duration call_timeout = std::chrono::seconds(2);  // for calls in the background
};

struct DevicePoolStats {
  uint64_t handles = 0;        // mapped handles
  uint64_t blank_slots = 0;    // blank slots that are ready
  uint64_t held_slots = 0;     // slots held by the caller, blank or committed
  uint64_t pages_demoted = 0;  // pages copied to staging memory for crumbd
  uint64_t demotions_failed = 0;
  uint64_t out_of_slots = 0;     // times TakeBlank found no slot
  uint64_t slots_reclaimed = 0;  // held slots that a restarted crumbd has accepted again
};

// DeviceSlot holds one slot of a device pool for the caller. A blank slot is written by the caller
// only; a committed one is read-only. The slot stays where it is until the DeviceSlot is destroyed.
// REQUIRES: the device has finished its reads and writes then, because crumbd may give the slot to
// another process. It must not outlive its DevicePool. Thread-safe.
class DeviceSlot {
 public:
  virtual ~DeviceSlot() = default;
  virtual DeviceAddress address() const = 0;
  virtual uint64_t number() const = 0;  // number of the slot in the pool
};

// DevicePool holds the slots of one device and one slot size that all workers of a tenant on this
// host use, mapped into one address range of this process. It continues to work without crumbd:
// held slots stay, and TakeBlank uses up the slots that are ready. Its thread keeps blank slots
// ready, joins the pool again after crumbd has restarted, and copies pages whose slots crumbd needs
// to staging memory (demotion). See PoolSession for the states of a slot. Thread-safe.
class DevicePool {
 public:
  // A fragment to commit: work that has finished wrote its tiles to `slot`.
  struct Fragment {
    std::shared_ptr<const DeviceSlot> slot;
    FragmentHeader header;
  };

  // `memory` and `client` must outlive the pool. crumbd need not be connected. kInvalidArgument: an
  // option is wrong; kFailedPrecondition: `client` has no shared memory, or takes part in this
  // device's pool of these sizes already.
  static absl::StatusOr<std::unique_ptr<DevicePool>> Open(const DevicePoolOptions& options,
                                                          DeviceMemory& memory, Client& client);

  // Ends calls under way. REQUIRES: no slot is held.
  virtual ~DevicePool() = default;

  // Returns a blank slot without blocking, or null if none is ready.
  virtual std::shared_ptr<const DeviceSlot> TakeBlank() = 0;
  // Returns up to `count` blank slots: those that are ready, then as many as crumbd grants. Blocks
  // on crumbd for up to `timeout` per call. Each group of `together` slots is released with its
  // last slot.
  virtual std::vector<std::shared_ptr<const DeviceSlot>> Reserve(int count, Duration timeout,
                                                                 int together = 1) = 0;
  // Blocks until `count` blank slots are ready. Returns false if they are not within `timeout`.
  virtual bool WaitBlank(int count, Duration timeout) = 0;

  // Makes fragments visible to the tenant's workers. Slots stay held whatever the outcome; those
  // that were not stored stay the caller's own. kAborted: crumbd has restarted meanwhile.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                            std::span<const Fragment> fragments,
                                                            Duration timeout) = 0;

  // Returns the id for AcquireRequest::pools; zeros if the pool is not joined now.
  virtual PoolId id() const = 0;
  // Holds the slots of fragments that an Acquire found in this pool, together with `lease`, and
  // maps new handles first. The slots are released together with the last of them. After an error
  // none is held: kNotFound: a fragment lies in another pool; kAborted: crumbd has restarted since
  // it granted the lease; kUnavailable: a handle has to be requested from crumbd, which is not
  // connected.
  virtual absl::StatusOr<std::vector<std::shared_ptr<const DeviceSlot>>> Hold(
      std::span<const DeviceFragment* const> fragments, std::shared_ptr<const Lease> lease) = 0;

  // Returns the headers that crumbd has for these slots, one per slot. They stay valid as long as
  // the slots are held.
  virtual absl::StatusOr<std::vector<std::optional<FragmentHeader>>> Headers(
      std::span<const uint64_t> slots, Duration timeout) = 0;
  // Makes this crumbd, and those that follow it, withdraw damaged pages; keys[i] is the key of the
  // page in slots[i], which is held and stays held.
  virtual absl::Status Withdraw(std::span<const uint64_t> slots, std::span<const PageKey> keys,
                                Duration timeout) = 0;

  virtual DeviceAddress base() const = 0;  // start of the address range
  virtual uint64_t slot_bytes() const = 0;
  virtual DevicePoolStats stats() const = 0;
};

}  // namespace crumb::client
