// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "crumb.h"

// Implements the functions of crumb.h for clients and pages.
namespace crumb::c_api {

crumb_code ClientOpen(const crumb_client_options* options, crumb_client** out);
void ClientClose(crumb_client* client);
int ClientConnected(crumb_client* client);
crumb_code ClientWaitConnected(crumb_client* client, uint32_t timeout_ms);
crumb_code ClientFlush(crumb_client* client, uint32_t timeout_ms, uint64_t* durable_pages);
crumb_code ClientReadStats(crumb_client* client, crumb_stat_receiver receiver, void* context);
crumb_code KeyspaceOpen(crumb_client* client, const crumb_keyspace_spec* spec, uint32_t timeout_ms,
                        crumb_keyspace* out);
crumb_code PageKeys(const uint8_t* keyspace, const int32_t* tokens, size_t token_count,
                    uint8_t* keys);
crumb_code ForeignKey(const uint8_t* keyspace, const void* name, size_t name_bytes, uint8_t* key);
crumb_code Lookup(crumb_client* client, const uint8_t* keyspace, const uint8_t* keys, size_t pages,
                  size_t* hits, int32_t* tiers, crumb_miss* reason);
crumb_code Get(crumb_client* client, const uint8_t* keyspace, const uint8_t* keys, size_t pages,
               uint32_t timeout_ms, crumb_receiver receiver, void* context, crumb_miss* reason);
crumb_code Put(crumb_client* client, const crumb_keyspace* keyspace,
               const crumb_fragment* fragments, size_t count, uint32_t timeout_ms,
               int32_t* outcomes);

}  // namespace crumb::c_api
