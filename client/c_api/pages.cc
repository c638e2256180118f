// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/c_api/core_table.h"

#include <algorithm>
#include <vector>

#include "client/c_api/handles.h"
#include "common/crc32c.h"
#include "common/status_macros.h"
#include "fmt/format.h"
#include "kernels/tile.h"

namespace crumb::c_api {
namespace {

Duration Ms(uint32_t ms) { return std::chrono::milliseconds(ms); }

KeyspaceId KeyspaceOf(const uint8_t* bytes) {
  KeyspaceId id;
  std::copy_n(bytes, id.bytes.size(), id.bytes.begin());
  return id;
}

std::vector<PageKey> KeysOf(const uint8_t* bytes, size_t pages) {
  std::vector<PageKey> keys(pages);
  for (size_t i = 0; i < pages; ++i) {
    std::copy_n(bytes + i * CRUMB_KEY_BYTES, CRUMB_KEY_BYTES, keys[i].bytes.begin());
  }
  return keys;
}

void SetMiss(client::MissReason reason, crumb_miss* out) {
  if (out != nullptr) *out = static_cast<crumb_miss>(reason);
}

crumb_fragment View(const client::FragmentBytes& fragment) {
  const FragmentHeader& header = fragment.header;
  crumb_fragment view{};
  std::copy(header.key.bytes.begin(), header.key.bytes.end(), view.key);
  std::copy(header.parent.bytes.begin(), header.parent.bytes.end(), view.parent);
  view.format = static_cast<uint32_t>(header.format);
  view.over_int2_prefix = header.over_int2_prefix ? 1 : 0;
  view.layer_begin = header.range.layers.begin;
  view.layer_end = header.range.layers.end;
  view.head_begin = header.range.heads.begin;
  view.head_end = header.range.heads.end;
  view.tiles = fragment.tiles.data();
  view.tiles_bytes = fragment.tiles.size();
  return view;
}

absl::StatusOr<client::FragmentBytes> FragmentOf(const crumb_keyspace& keyspace,
                                                 const crumb_fragment& given) {
  if (given.format != 1 && given.format != 2) {
    return absl::InvalidArgumentError(
        fmt::format("format {} is neither BF16 nor INT2", given.format));
  }
  if (given.layer_begin >= given.layer_end || given.head_begin >= given.head_end ||
      given.layer_end > UINT16_MAX || given.head_end > UINT16_MAX || given.tiles == nullptr) {
    return absl::InvalidArgumentError("a fragment without layers, heads or tiles");
  }
  client::FragmentBytes out;
  FragmentHeader& header = out.header;
  header.format = static_cast<PageFormat>(given.format);
  header.over_int2_prefix = given.over_int2_prefix != 0;
  header.layout_id = kernels::kTileLayoutId;
  header.tile_bytes =
      header.format == PageFormat::kInt2 ? keyspace.int2_tile_bytes : keyspace.bf16_tile_bytes;
  header.generation = keyspace.generation;
  header.keyspace = KeyspaceOf(keyspace.id);
  std::copy_n(given.key, CRUMB_KEY_BYTES, header.key.bytes.begin());
  std::copy_n(given.parent, CRUMB_KEY_BYTES, header.parent.bytes.begin());
  header.range = {
      {static_cast<uint16_t>(given.layer_begin), static_cast<uint16_t>(given.layer_end)},
      {static_cast<uint16_t>(given.head_begin), static_cast<uint16_t>(given.head_end)}};
  const int tiles = header.range.tiles();
  if (tiles > kFragmentTilesMax ||
      given.tiles_bytes != FragmentTilesBytes(tiles, header.tile_bytes)) {
    return absl::InvalidArgumentError(fmt::format("{} bytes for {} tiles of {} bytes",
                                                  given.tiles_bytes, tiles, header.tile_bytes));
  }
  out.tiles.assign(static_cast<const char*>(given.tiles), given.tiles_bytes);
  const auto* bytes = reinterpret_cast<const std::byte*>(out.tiles.data());
  for (int i = 0; i < tiles; ++i) {
    header.tile_sums.push_back(Crc32c({bytes + size_t{header.tile_bytes} * i, header.tile_bytes}));
  }
  return out;
}

}  // namespace

crumb_code ClientOpen(const crumb_client_options* options, crumb_client** out) {
  return Guarded([&]() -> absl::Status {
    if (out == nullptr) return absl::InvalidArgumentError("crumb_client_open: out is NULL");
    const crumb_client_options given = Known(options);
    client::ClientOptions wanted;
    if (given.socket_dir != nullptr) wanted.socket_dir = given.socket_dir;
    wanted.address = Text(given.address);
    wanted.tls_ca_file = Text(given.tls_ca_file);
    wanted.tls_cert_file = Text(given.tls_cert_file);
    wanted.tls_key_file = Text(given.tls_key_file);
    wanted.tls_server_name = Text(given.tls_server_name);
    wanted.token = Text(given.token);
    wanted.process_name = Text(given.process_name, "libcrumb");
    if (given.engine != nullptr) {
      wanted.engine.assign(reinterpret_cast<const char*>(given.engine), 16);
    }
    if (given.staging_bytes != 0) wanted.staging_bytes = given.staging_bytes;
    if (given.connect_timeout_ms != 0) wanted.connect_timeout = Ms(given.connect_timeout_ms);
    if (given.call_timeout_ms != 0) wanted.call_timeout = Ms(given.call_timeout_ms);
    CRUMB_ASSIGN_OR_RETURN(auto client, client::Client::Open(wanted));
    *out = new crumb_client{std::move(client)};
    return absl::OkStatus();
  });
}

void ClientClose(crumb_client* client) { delete client; }

int ClientConnected(crumb_client* client) { return client->client->connected() ? 1 : 0; }

crumb_code ClientWaitConnected(crumb_client* client, uint32_t timeout_ms) {
  return Guarded([&]() -> absl::Status {
    if (client->client->WaitConnected(Ms(timeout_ms))) return absl::OkStatus();
    return absl::UnavailableError(fmt::format("no crumbd within {} ms", timeout_ms));
  });
}

crumb_code ClientFlush(crumb_client* client, uint32_t timeout_ms, uint64_t* durable_pages) {
  return Guarded([&]() -> absl::Status {
    CRUMB_ASSIGN_OR_RETURN(const uint64_t pages, client->client->Flush(Ms(timeout_ms)));
    if (durable_pages != nullptr) *durable_pages = pages;
    return absl::OkStatus();
  });
}

crumb_code KeyspaceOpen(crumb_client* client, const crumb_keyspace_spec* spec, uint32_t timeout_ms,
                        crumb_keyspace* out) {
  return Guarded([&]() -> absl::Status {
    if (spec == nullptr || out == nullptr) {
      return absl::InvalidArgumentError("crumb_keyspace_open: spec or out is NULL");
    }
    const crumb_keyspace_spec given = Known(spec);
    client::KeyspaceSpec wanted;
    for (size_t i = 0; i < given.fields; ++i) wanted.fields[given.names[i]] = given.values[i];
    wanted.layers = static_cast<int>(given.layers);
    wanted.kv_heads = static_cast<int>(given.kv_heads);
    wanted.head_dim = static_cast<int>(given.head_dim);
    wanted.group_size = static_cast<int>(given.group_size);
    wanted.tenant = Text(given.tenant);
    CRUMB_ASSIGN_OR_RETURN(const client::KeyspaceInfo info,
                           client->client->OpenKeyspace(wanted, Ms(timeout_ms)));
    std::copy(info.id.bytes.begin(), info.id.bytes.end(), out->id);
    out->generation = info.generation;
    out->int2_tile_bytes = info.int2_tile_bytes;
    out->bf16_tile_bytes = info.bf16_tile_bytes;
    out->serves_bf16_only = info.state == client::KeyspaceState::kBf16 ? 1 : 0;
    return absl::OkStatus();
  });
}

crumb_code PageKeys(const uint8_t* keyspace, const int32_t* tokens, size_t token_count,
                    uint8_t* keys) {
  return Guarded([&]() -> absl::Status {
    if (keyspace == nullptr || (token_count > 0 && (tokens == nullptr || keys == nullptr))) {
      return absl::InvalidArgumentError("crumb_page_keys: keyspace, tokens or keys is NULL");
    }
    for (const PageKey& key : PageKeysOf(KeyspaceOf(keyspace), {tokens, token_count})) {
      keys = std::copy(key.bytes.begin(), key.bytes.end(), keys);
    }
    return absl::OkStatus();
  });
}

crumb_code ForeignKey(const uint8_t* keyspace, const void* name, size_t name_bytes, uint8_t* key) {
  return Guarded([&]() -> absl::Status {
    if (keyspace == nullptr || key == nullptr || (name == nullptr && name_bytes > 0)) {
      return absl::InvalidArgumentError("crumb_foreign_key: keyspace, name or key is NULL");
    }
    const PageKey made =
        ForeignPageKey(KeyspaceOf(keyspace), {static_cast<const uint8_t*>(name), name_bytes});
    std::copy(made.bytes.begin(), made.bytes.end(), key);
    return absl::OkStatus();
  });
}

crumb_code Lookup(crumb_client* client, const uint8_t* keyspace, const uint8_t* keys, size_t pages,
                  size_t* hits, int32_t* tiers, crumb_miss* reason) {
  return Guarded([&]() -> absl::Status {
    if (keyspace == nullptr || keys == nullptr || hits == nullptr) {
      return absl::InvalidArgumentError("crumb_lookup: keyspace, keys or hits is NULL");
    }
    CRUMB_ASSIGN_OR_RETURN(const client::LookupResult found,
                           client->client->Lookup(KeyspaceOf(keyspace), KeysOf(keys, pages)));
    *hits = static_cast<size_t>(found.hit_pages);
    for (size_t i = 0; tiers != nullptr && i < found.page_tiers.size(); ++i) {
      tiers[i] = static_cast<int32_t>(found.page_tiers[i]);
    }
    SetMiss(found.miss_reason, reason);
    return absl::OkStatus();
  });
}

crumb_code Get(crumb_client* client, const uint8_t* keyspace, const uint8_t* keys, size_t pages,
               uint32_t timeout_ms, crumb_receiver receiver, void* context, crumb_miss* reason) {
  return Guarded([&]() -> absl::Status {
    if (keyspace == nullptr || keys == nullptr || receiver == nullptr) {
      return absl::InvalidArgumentError("crumb_get: keyspace, keys or receiver is NULL");
    }
    CRUMB_ASSIGN_OR_RETURN(
        const client::MissReason missed,
        client->client->Get(KeyspaceOf(keyspace), KeysOf(keys, pages), Ms(timeout_ms),
                            [&](const client::FragmentBytes& fragment) {
                              const crumb_fragment view = View(fragment);
                              const auto page = static_cast<size_t>(fragment.page);
                              return receiver(context, page, &view) == 0
                                         ? absl::OkStatus()
                                         : absl::AbortedError("the receiver ended the get");
                            }));
    SetMiss(missed, reason);
    return absl::OkStatus();
  });
}

crumb_code Put(crumb_client* client, const crumb_keyspace* keyspace,
               const crumb_fragment* fragments, size_t count, uint32_t timeout_ms,
               int32_t* outcomes) {
  return Guarded([&]() -> absl::Status {
    if (keyspace == nullptr || outcomes == nullptr || (fragments == nullptr && count > 0)) {
      return absl::InvalidArgumentError("crumb_put: keyspace, fragments or outcomes is NULL");
    }
    std::vector<client::FragmentBytes> bytes;
    for (size_t i = 0; i < count; ++i) {
      CRUMB_ASSIGN_OR_RETURN(client::FragmentBytes fragment, FragmentOf(*keyspace, fragments[i]));
      bytes.push_back(std::move(fragment));
    }
    CRUMB_ASSIGN_OR_RETURN(const std::vector<client::CommitOutcome> written,
                           client->client->Put(KeyspaceOf(keyspace->id), bytes, Ms(timeout_ms)));
    for (size_t i = 0; i < written.size() && i < count; ++i) {
      outcomes[i] = static_cast<int32_t>(written[i]);
    }
    return absl::OkStatus();
  });
}

}  // namespace crumb::c_api
