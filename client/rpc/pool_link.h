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

// Device pools as crumbd serves them: descriptors over crumbd.fd.sock, slots over calls.
namespace crumb::client {

// A handle that crumbd keeps for a pool.
struct PoolHandle {
  uint32_t number = 0;  // its place in the pool; never used again for another
  UniqueFd fd;
};

// What crumbd tells the pools of a tenant apart by.
struct PoolName {
  DeviceUuid device;
  uint64_t slot_bytes = 0;
  uint64_t handle_bytes = 0;

  friend bool operator==(const PoolName&, const PoolName&) = default;
};

struct PoolJoin {
  PoolName name;
  // A pool that this process is in, or was with an earlier crumbd: then it is made anew under its
  // id, from its roster, without handles. Zeros: any pool of that name, or a new one.
  PoolId known = {};
  int roster_fd = -1;
};

// A slot that this process held in the pool of a crumbd before.
struct SlotClaim {
  uint64_t slot = 0;
  // Of the page that the slot holds; none: the slot is blank, and this process's.
  std::optional<FragmentHeader> header;
};

// A page to be copied to staging memory and committed there, because its slot is needed.
struct Demotion {
  PoolId pool;
  uint64_t slot = 0;
  FragmentHeader header;
};

// This process's part in one pool, over one connection; ends when it is destroyed or the connection
// breaks: then calls answer kUnavailable. Thread-safe. Codes as those of Client.
class PoolSession {
 public:
  virtual ~PoolSession() = default;

  virtual const PoolId& id() const = 0;
  virtual uint64_t epoch() const = 0;  // of crumbd
  // Who holds slots, as crumbd sees it: the same for all sessions over one connection.
  virtual const std::string& holder() const = 0;
  virtual bool connected() const = 0;

  // The handles that were there when the pool was joined, once.
  virtual std::vector<PoolHandle> TakeFirstHandles() = 0;
  // The handles from number `first` on.
  virtual absl::StatusOr<std::vector<PoolHandle>> Handles(uint32_t first) = 0;
  // Gives crumbd one more, unless the pool would have more than `bytes_max` with it; answers its
  // number. `fd` stays the caller's. kResourceExhausted: the pool is large enough.
  virtual absl::StatusOr<uint32_t> Offer(int fd, uint64_t bytes_max) = 0;
  // Gives one back to a crumbd that was restarted, by its number. kAlreadyExists: somebody else
  // has.
  virtual absl::Status OfferAgain(int fd, uint32_t number) = 0;
  // Claims slots held before. False: no such slot, or another page is there.
  virtual absl::StatusOr<std::vector<bool>> Claim(const KeyspaceId& keyspace,
                                                  std::span<const SlotClaim> claims) = 0;
  // Tells this process's mark in the roster, once it has taken it and claimed what it held: slots
  // that nobody claims are free when everybody in the roster has told.
  virtual absl::Status ReportMark(uint64_t mark) = 0;

  // Up to `count` blank slots; fewer when the pool is full of pages that are in use.
  virtual absl::StatusOr<std::vector<uint64_t>> Reserve(int count, Duration timeout) = 0;
  // Makes what was written to blank slots visible. A stored slot stays held by this process, and
  // one with another outcome stays blank: both until Release.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                            std::span<const uint64_t> slots,
                                                            std::span<const FragmentHeader> headers,
                                                            Duration timeout) = 0;
  // What crumbd knows to lie in slots that the process holds or has leased, one a slot.
  virtual absl::StatusOr<std::vector<std::optional<FragmentHeader>>> Headers(
      std::span<const uint64_t> slots, Duration timeout) = 0;
  // Takes pages out of the pool whose bytes in these slots are damaged; keys[i] is the one in
  // slots[i].
  virtual absl::Status Withdraw(std::span<const uint64_t> slots, std::span<const PageKey> keys,
                                Duration timeout) = 0;
  // Lets go of slots, soon; the process uses them no more.
  virtual void ReleaseLater(std::span<const uint64_t> slots) = 0;
  // Of a connection that was lost: lets go of all that crumbd says is held over it but `slots`,
  // such as what was in an answer that did not arrive. Nothing is reserved or claimed over it any
  // more. kUnavailable, kDeadlineExceeded: not known whether it has; may be called again.
  virtual absl::Status ReleaseAllBut(std::span<const uint64_t> slots) = 0;
  // The copies of these slots are committed, or will never be.
  virtual absl::Status Demoted(std::span<const uint64_t> slots) = 0;
  // Takes part no more once what it holds is released; is asked for nothing.
  virtual void Leave() = 0;
};

// Hears of what concerns pools. Called on the connection's thread; must not block.
class PoolListener {
 public:
  virtual ~PoolListener() = default;
  // There is a new connection: sessions of pools have to be made anew.
  virtual void OnConnected() = 0;
  virtual void OnDemotions(const PoolId& pool, std::vector<Demotion> demotions) = 0;
};

struct JoinedPool {
  std::shared_ptr<PoolSession> session;
  UniqueFd roster;  // that the process marks itself in before it uses a slot
};

// Thread-safe.
class PoolLink {
 public:
  virtual ~PoolLink() = default;
  // kUnavailable: no crumbd; kFailedPrecondition: it has no device pools; kResourceExhausted: over
  // a bound of crumbd's.
  virtual absl::StatusOr<JoinedPool> Join(const PoolJoin& request) = 0;
  // Makes crumbd give up pools on the device that no process has any more, the longest unused
  // first, until `bytes` are free. Answers how many were.
  virtual absl::StatusOr<uint64_t> Reclaim(const DeviceUuid& device, uint64_t bytes) = 0;
  // `listener`, which takes part in the pool, is called until StopListening has returned.
  // kFailedPrecondition: another one does. crumbd knows processes, not their parts: what one lets
  // go would be let go for both.
  virtual absl::Status Listen(const PoolName& pool, PoolListener* listener) = 0;
  virtual void StopListening(PoolListener* listener) = 0;
};

}  // namespace crumb::client
