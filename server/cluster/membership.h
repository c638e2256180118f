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

// Tells nodes of each other. Thread-safe.
class Membership {
 public:
  // The nodes that are alive, this one left out, as far as is known now.
  struct Nodes {
    uint64_t epoch = 0;
    std::vector<v1::NodeRecord> nodes;
    std::vector<std::string> refused;  // nodes that do not count, and why
  };
  using Keyspaces = std::vector<v1::KeyspaceEntry>;

  // How it stands with etcd; a static list has none.
  enum class State : uint8_t {
    kNone,
    kOk,
    kSilent,   // does not answer in time
    kFull,     // its space is used up, or it is at a bound
    kRefused,  // answers that this node may not, or cannot, take part
  };
  struct Health {
    State state = State::kNone;
    std::string trouble;       // what is wrong and what comes of it; empty: nothing
    size_t unheard_nodes = 0;  // nodes that answer, but whose records this node could not take over
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
    // Takes over what others know of keyspaces. Not OK: some of it is not in force here.
    std::function<absl::Status(const Keyspaces&)> keyspaces;
    // The number of the latest change of this node's own records.
    std::function<uint64_t()> own_version;
    // A page of own records that changed behind change `after`; 0: the first page.
    std::function<OwnPage(uint64_t after)> own_page;
    // Sends records to every other node directly, in the background. `failed` is called for each
    // node that did not take them over.
    std::function<void(Keyspaces, std::function<void()> failed)> tell_peers;
    // Sets which pages are withheld, because drops may not have been heard of.
    std::function<void(Withholding)> withhold;
  };

  virtual ~Membership() = default;

  // This node's record, to be told to others.
  virtual void Publish(const v1::NodeRecord& self) = 0;
  // This node's records of keyspaces have changed, and others need them soon.
  virtual void KeyspacesChanged() = 0;
  // A node knows more of a keyspace than this one: ask soon.
  virtual void AskKeyspaces() = 0;
  // Takes over all records of others from the first one on: some were left out before.
  virtual void RereadKeyspaces() {}
  // Waits until others were heard of once, and this node was told of where it can be, for at most
  // `most`. False: no node's records were heard of.
  virtual bool WaitSynced(Duration most) = 0;
  virtual Health health() const { return {}; }
  // Leaves, and joins the threads. Idempotent.
  virtual void Stop() = 0;
};

inline constexpr std::array<Membership::State, 4> kEtcdStates = {
    Membership::State::kOk, Membership::State::kSilent, Membership::State::kFull,
    Membership::State::kRefused};
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
