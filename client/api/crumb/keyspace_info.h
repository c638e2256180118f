// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "common/page_key.h"
#include "common/wire_enums.h"

namespace crumb::client {

using crumb::KeyspaceState;

// KeyspaceSpec has everything that determines a keyspace: see docs/formats/keyspace.md.
//
// Two processes share pages if, and only if, all of this is equal; a field that differs by one byte
// makes another keyspace, whose pages are misses. Workers fill it in from WorkerOptions; engines
// with a cache of their own choose the fields themselves.
struct KeyspaceSpec {
  // model, weights, format, rope and so on, as strings that are compared byte by byte
  std::map<std::string, std::string> fields;
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int group_size = 0;
  std::string tenant;  // empty: the default tenant
};

// KeyspaceInfo is crumbd's response to OpenKeyspace. Tile sizes are in bytes and follow from the
// geometry; a client that computes others has another version than crumbd and must not write pages.
// A higher `generation` than before means that the keyspace was dropped.
struct KeyspaceInfo {
  KeyspaceId id;
  uint64_t generation = 0;
  KeyspaceState state = KeyspaceState::kUnknown;
  uint32_t int2_tile_bytes = 0;
  uint32_t bf16_tile_bytes = 0;
  uint64_t epoch = 0;  // epoch of the crumbd that responded; 0 over TCP
};

}  // namespace crumb::client
