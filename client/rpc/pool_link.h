// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "common/unique_fd.h"
#include "crumb/acquire.h"
#include "crumb/staging.h"

// The interface to crumbd's device pools: descriptors travel over crumbd.fd.sock, slots over calls.
namespace crumb::client {

// A piece of device memory of a pool, of which crumbd keeps a descriptor.
struct PoolHandle {
  uint32_t number = 0;  // its index in the pool, which is never used for another handle
  UniqueFd fd;
};

// The properties by which crumbd distinguishes the pools of a tenant.
struct PoolName {
  DeviceUuid device;
  uint64_t slot_bytes = 0;
  uint64_t handle_bytes = 0;

  friend bool operator==(const PoolName&, const PoolName&) = default;
};

// A request to take part in a pool.
struct PoolJoin {
  PoolName name;
  // A pool that this process takes part in, possibly under an earlier crumbd. If crumbd does not
  // know the pool, it creates it with this id and roster, without handles. Zeros: any pool of that
  // name, or a new one.
  PoolId known = {};
  int roster_fd = -1;
};

// A slot that this process held in the pool of an earlier crumbd.
struct SlotClaim {
  uint64_t slot = 0;
  // Header of the page in the slot. Absent: the slot is blank and belongs to this process.
  std::optional<FragmentHeader> header;
};

// A page that crumbd wants copied to staging memory and committed there, because it needs the slot.
struct Demotion {
  PoolId pool;
  uint64_t slot = 0;
  FragmentHeader header;
};

// PoolSession is this process's membership in one pool over one connection. It ends when it is
// destroyed or when the connection breaks, after which every call returns kUnavailable. Codes as
// for Client. Thread-safe.
//
// A slot is blank (reserved by this process, not yet readable by others), committed (its page can
// be read by every process of the tenant), or free. Reserve makes free slots blank, Commit makes
// blank slots committed, and ReleaseLater ends this process's hold: a blank slot becomes free, a
// committed one stays until crumbd evicts its page (see Demotion).
class PoolSession {
 public:
  virtual ~PoolSession() = default;

  virtual const PoolId& id() const = 0;
  virtual uint64_t epoch() const = 0;  // epoch of crumbd
  // Identifies the holder of slots to crumbd; equal for all sessions over one connection.
  virtual const std::string& holder() const = 0;
  virtual bool connected() const = 0;

  // Returns the handles that the pool had when this process joined. REQUIRES: it is called at most
  // once.
  virtual std::vector<PoolHandle> TakeFirstHandles() = 0;
  // Returns the handles from number `first` on.
  virtual absl::StatusOr<std::vector<PoolHandle>> Handles(uint32_t first) = 0;
  // Adds a handle to the pool, unless it would exceed `bytes_max`, and returns the handle's number.
  // `fd` stays the caller's. kResourceExhausted: the pool is large enough.
  virtual absl::StatusOr<uint32_t> Offer(int fd, uint64_t bytes_max) = 0;
  // Gives a restarted crumbd the handle that had this number. kAlreadyExists: another process has
  // done so.
  virtual absl::Status OfferAgain(int fd, uint32_t number) = 0;
  // Claims slots that this process held before. An element is false if there is no such slot, or it
  // has another page.
  virtual absl::StatusOr<std::vector<bool>> Claim(const KeyspaceId& keyspace,
                                                  std::span<const SlotClaim> claims) = 0;
  // Reports this process's mark in the roster, once it has set the mark and claimed its slots. When
  // every process in the roster has reported, crumbd frees the slots that no process claimed.
  virtual absl::Status ReportMark(uint64_t mark) = 0;

  // Reserves up to `count` blank slots; fewer if the pool is full of pages in use.
  virtual absl::StatusOr<std::vector<uint64_t>> Reserve(int count, Duration timeout) = 0;
  // Makes the contents of blank slots visible. A stored slot stays held by this process, and one
  // with another outcome stays blank, both until ReleaseLater.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                            std::span<const uint64_t> slots,
                                                            std::span<const FragmentHeader> headers,
                                                            Duration timeout) = 0;
  // Returns the header that crumbd has for each of these slots, which this process holds or has
  // leased.
  virtual absl::StatusOr<std::vector<std::optional<FragmentHeader>>> Headers(
      std::span<const uint64_t> slots, Duration timeout) = 0;
  // Removes damaged pages from the pool; keys[i] is the key of the page in slots[i].
  virtual absl::Status Withdraw(std::span<const uint64_t> slots, std::span<const PageKey> keys,
                                Duration timeout) = 0;
  // Releases slots in the background. The process must not use them any more.
  virtual void ReleaseLater(std::span<const uint64_t> slots) = 0;
  // Releases all slots that crumbd records as held over this lost connection, except `slots`; for
  // example those in a response that did not arrive. REQUIRES: nothing is reserved or claimed over
  // the connection any more. kUnavailable, kDeadlineExceeded: the outcome is unknown; the call may
  // be repeated.
  virtual absl::Status ReleaseAllBut(std::span<const uint64_t> slots) = 0;
  // Reports that these slots' pages were copied and committed, or never will be.
  virtual absl::Status Demoted(std::span<const uint64_t> slots) = 0;
  // Ends the membership once all slots are released. crumbd requests no more demotions.
  virtual void Leave() = 0;
};

// PoolListener receives events of a pool on the connection's thread. It must not block.
//
// REQUIRES: it neither calls PoolLink::Listen nor StopListening from these functions, because the
// list of listeners is locked meanwhile.
class PoolListener {
 public:
  virtual ~PoolListener() = default;
  // A connection was opened; the pool has to be joined again over it.
  virtual void OnConnected() = 0;
  virtual void OnDemotions(const PoolId& pool, std::vector<Demotion> demotions) = 0;
};

// The result of joining a pool.
struct JoinedPool {
  std::shared_ptr<PoolSession> session;
  UniqueFd roster;  // file in which the process sets its mark before it uses a slot
};

// PoolLink joins device pools. Thread-safe.
class PoolLink {
 public:
  virtual ~PoolLink() = default;
  // kUnavailable: there is no crumbd; kFailedPrecondition: it has no device pools;
  // kResourceExhausted: a bound of crumbd's is reached.
  virtual absl::StatusOr<JoinedPool> Join(const PoolJoin& request) = 0;
  // Makes crumbd drop pools on the device that no process uses, the longest unused first, until
  // `bytes` are free. Returns the number of bytes freed.
  virtual absl::StatusOr<uint64_t> Reclaim(const DeviceUuid& device, uint64_t bytes) = 0;
  // Calls `listener`, a member of the pool, until StopListening has returned. kFailedPrecondition:
  // the pool has a listener in this process already. crumbd distinguishes processes only, so that
  // slots released by one member would be released for both.
  virtual absl::Status Listen(const PoolName& pool, PoolListener* listener) = 0;
  virtual void StopListening(PoolListener* listener) = 0;
};

}  // namespace crumb::client
