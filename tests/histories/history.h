// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace crumb::histories {

// Processes 0 and 3 are of tenant 0, 1 and 4 of tenant 1, 2 of tenant 2; those of one tenant are
// one engine.
inline constexpr uint32_t kWorkers = 5;

// Steps of workers, operators and the machine. Arguments are taken modulo the number of objects
// when the step runs, so every sequence of steps is a history, also one from which steps were taken
// out.
enum class Act : uint8_t {
  // Processes and sessions.
  kOpenSession,
  kDisconnect,  // the connection breaks, the process lives
  kKill,        // the process dies
  // Pages in host memory.
  kReserve,
  kCommit,
  kCommitTwice,  // all of a page and a part of it at once, and a Flush behind both
  kAbort,
  kPut,  // a fragment as bytes, without a session
  kAcquire,
  kJoin,
  kRelease,
  kGiveUp,  // an Acquire whose response was lost
  kLookup,
  kPrefetch,
  kPin,
  kUnpin,
  kDelete,
  kDrop,
  kSetState,
  kFlush,
  kNotices,  // reads the notices of the session stream
  // Device pools.
  kPoolJoin,
  kPoolOffer,
  kPoolReserve,
  kPoolCommit,
  kPoolRelease,
  kPoolLeave,
  kPoolReclaim,
  kPoolCheck,
  // The machine.
  kDiskFull,
  kDiskWriteErrors,
  kDiskReadErrors,
  kDiskRecordErrors,
  kDiskDamage,
  kDiskSpeed,
  kTime,
  kSettle,
  kCrash,
  kTakeover,
};
inline constexpr int kActs = static_cast<int>(Act::kTakeover) + 1;
const char* NameOf(Act act);

struct Step {
  Act act = Act::kSettle;
  uint32_t worker = 0;
  uint32_t a = 0;
  uint32_t b = 0;
  uint32_t c = 0;
  uint32_t pause = 0;  // switches of fibers before the next step

  std::string ToString() const;
};

// The node and the disk of a history.
struct Profile {
  uint32_t preemption = 0;  // Scheduler::Options
  uint64_t host_bytes = 0;
  uint64_t disk_fragments = 0;
  bool own_slabs = false;      // tenants.shared_memory: own, or all
  bool second_hit = false;     // store.ssd.admission: second_hit, or all
  bool reads_notices = false;  // workers read each notice at once, not now and then
  uint32_t write_queue = 0;
  uint32_t read_queue = 0;
  uint32_t blank_percent = 0;
  uint32_t pool_slots = 0;  // slots of one handle

  std::string ToString() const;
};

struct History {
  uint64_t seed = 0;
  // Chooses the order of fibers; a smaller history may need another one to fail in the same way.
  uint64_t schedule = 0;
  Profile profile;
  std::vector<Step> steps;
};

// Returns the history of `seed`, always the same one.
History MakeHistory(uint64_t seed);

}  // namespace crumb::histories
