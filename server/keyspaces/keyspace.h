// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "common/wire_enums.h"
#include "server/metrics/model_tokens.h"

namespace crumb::server {

// Shape of a keyspace's pages: the model's layers, KV heads and elements of a head (head_dim), and
// the elements that share one INT2 scale (group_size).
struct Geometry {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t group_size = 0;

  // kInvalidArgument naming field and bound. A record whose geometry passes is safe to compute
  // with.
  absl::Status Validate() const;

  // Returns the range of a page that has all layers and KV heads.
  TileRange all_tiles() const {
    return {{0, static_cast<uint16_t>(layers)}, {0, static_cast<uint16_t>(kv_heads)}};
  }
  // Bytes of one page tile, that is of one layer and KV head of a page, in either format.
  uint32_t int2_tile_bytes() const;
  uint32_t bf16_tile_bytes() const;
  uint32_t tile_bytes(PageFormat format) const {
    return format == PageFormat::kInt2 ? int2_tile_bytes() : bf16_tile_bytes();
  }
  friend bool operator==(const Geometry&, const Geometry&) = default;
};

// The pages that this node withholds (serves to no process and no node), because they may have been
// dropped or deleted without this node's knowledge. docs/cluster.md explains how this ends.
enum class Withholding : uint8_t {
  kNothing,
  // Pages of recovered keyspaces. In force from the start of a node until it has received the drops
  // that other nodes made while it was down: only pages that it held before its start can be older
  // than those drops.
  kRecovered,
  // All pages. In force while another node is known to have changed records that this node could
  // not take over: each of them may be a drop that is younger than any page here.
  kEverything,
};

// A keyspace that is open on this node. Members that can change are atomic; the rest is fixed.
// Thread-safe; lives as long as its last reference.
//
// States of a keyspace and their transitions, which KeyspaceRegistry makes and writes to disk
// before they take effect:
//
//                 OpenKeyspace, Merge             SetState
//    (no record) --------------------> kActive <-------------> kBf16
//         ^                              |
//         '------------------------------'
//                   EndUnused
//
//    kActive  all pages are served
//    kBf16    INT2 pages are misses with reason QUALITY
//
// In either state, RaiseGeneration drops the keyspace: pages of lower generations are misses for
// good and are removed. NoteDeletion records deleted pages, so that nodes that are down receive the
// deletion with the record. A new keyspace begins with the generation floor, which is not below any
// generation that a keyspace had before EndUnused removed it.
//
// Independently of its state, a keyspace's pages are withheld while they may have been dropped
// without this node's knowledge (`unsynced`); that depends on the records received from other
// nodes.
struct Keyspace {
  KeyspaceId id;
  std::map<std::string, std::string> fields;  // the client's description
  Geometry geometry;
  std::string model;
  std::string tenant;        // empty: of no tenant
  bool int2_history = true;  // false: every page is BF16
  TokenCounters* tokens = nullptr;

  std::atomic<uint64_t> generation{1};
  std::atomic<KeyspaceState> state{KeyspaceState::kActive};
  // When a call last named the keyspace; the epoch: none has since this node started.
  std::atomic<TimePoint> used{TimePoint()};

  // Notes that a call names the keyspace now. Called by FindKeyspace and OpenKeyspace.
  void NoteUse(TimePoint now) { used.store(now, std::memory_order_relaxed); }

  // Whether this node may hold pages of the keyspace from before its start: its record was read at
  // the start, or a process has claimed device slots that it had filled before. False in a keyspace
  // that was opened since, because the registry removes pages that it finds without a record.
  std::atomic<bool> recovered{false};
  // The pages that this node withholds (KeyspaceRegistry::Withhold). Null in keyspaces that no
  // registry made.
  std::shared_ptr<const std::atomic<Withholding>> withholding;

  // Whether pages are to miss with reason QUALITY.
  bool quality_off() const { return int2_history && state.load() == KeyspaceState::kBf16; }
  // Whether pages are to miss with reason GENERATION, because they may have been dropped.
  bool unsynced() const {
    if (withholding == nullptr) return false;
    const Withholding withheld = withholding->load();
    return withheld == Withholding::kEverything ||
           (withheld == Withholding::kRecovered && recovered.load());
  }
  // Whether pages may be served at all.
  bool serves() const { return !quality_off() && !unsynced(); }

  // kInvalidArgument when a fragment with this header cannot belong here. Format, sizes, layout,
  // generation and range must fit.
  absl::Status CheckHeader(const FragmentHeader& header) const;

  // The range that a request names, all tiles for none. kInvalidArgument: empty or out of bounds.
  absl::StatusOr<TileRange> CheckRange(uint32_t layer_begin, uint32_t layer_end,
                                       uint32_t head_begin, uint32_t head_end) const;
};

}  // namespace crumb::server
