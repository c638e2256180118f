// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/clock.h"
#include "crumb/v1/peer_service.pb.h"
#include "crumb/v1/record.pb.h"
#include "server/keyspaces/keyspace.h"

namespace crumb::server {

// Finds the other nodes of the cluster and exchanges keyspace records with them. There are two:
// EtcdMembership over etcd, StaticMembership over a list of addresses. A membership starts with its
// construction, has threads of its own, and reports through Events; the cluster owns it.
// Thread-safe.
class Membership {
 public:
  // The nodes that are alive as far as this node knows, itself left out.
  struct Nodes {
    uint64_t epoch = 0;
    std::vector<v1::NodeRecord> nodes;
    std::vector<std::string> refused;  // nodes that do not count, and why
  };
  using Keyspaces = std::vector<v1::KeyspaceEntry>;

  // The state of the connection to etcd; kNone for a static list of nodes.
  enum class State : uint8_t {
    kNone,
    kOk,
    kSilent,   // etcd does not respond in time
    kFull,     // etcd's space is used up, or it is at a bound
    kRefused,  // etcd refuses this node's records: no permission, or the id is another node's
  };
  // The state of the exchange, for the status page, metrics and log lines.
  struct Health {
    State state = State::kNone;
    std::string trouble;  // the fault and its effect; empty: there is none
    size_t unsynced_nodes =
        0;  // nodes that respond, but whose records this node could not take over
  };
  // Records of this node's keyspaces in the order of their changes.
  struct OwnPage {
    Keyspaces keyspaces;
    uint64_t next = 0;  // the change that this page ends with
  };

  // Called on the membership's threads, one at a time.
  struct Events {
    // The nodes changed.
    std::function<void(Nodes)> nodes;
    // Takes over other nodes' records of keyspaces. Not OK: some of them are not in force here.
    std::function<absl::Status(const Keyspaces&)> keyspaces;
    // The number of the latest change of this node's own records.
    std::function<uint64_t()> own_version;
    // A page of own records that changed behind change `after`; 0: the first page.
    std::function<OwnPage(uint64_t after)> own_page;
    // Sends records to every other node directly, in the background. `failed` is called for each
    // node that did not take them over.
    std::function<void(Keyspaces, std::function<void()> failed)> send_to_peers;
    // Sets which pages are withheld because drops of other nodes may not have been received.
    std::function<void(Withholding)> withhold;
  };

  virtual ~Membership() = default;

  // Sets this node's record, which other nodes receive.
  virtual void Publish(const v1::NodeRecord& self) = 0;
  // Notes that this node's records of keyspaces have changed, and others need them soon. Does not
  // block.
  virtual void KeyspacesChanged() = 0;
  // Notes that another node has newer records of a keyspace, and requests them soon.
  virtual void RequestKeyspaces() = 0;
  // Takes over all records of others from the first one on: some were left out before.
  virtual void RereadKeyspaces() {}
  // Waits for at most `most` until the records of other nodes were taken over once and this node's
  // record was published or refused. False: no node's records were received.
  virtual bool WaitSynced(Duration most) = 0;
  // Returns the state as of the last exchange.
  virtual Health health() const { return {}; }
  // Leaves, and joins the threads. Idempotent. No event is reported after it returns. Must not be
  // called from an event.
  virtual void Stop() = 0;
};

inline constexpr std::array<Membership::State, 4> kEtcdStates = {
    Membership::State::kOk, Membership::State::kSilent, Membership::State::kFull,
    Membership::State::kRefused};
// Returns the value of the metrics' label `state`.
inline const char* EtcdStateName(Membership::State state) {
  switch (state) {
    case Membership::State::kNone:
      return "none";
    case Membership::State::kOk:
      return "ok";
    case Membership::State::kSilent:
      return "silent";
    case Membership::State::kFull:
      return "full";
    case Membership::State::kRefused:
      return "refused";
  }
  return "none";
}

}  // namespace crumb::server
